"""Initialise an audio or video front-end from a pretrained image front-end, for use with the same trunk."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.pretrained.surgery.resize import resize_kernel
from worldtokens.tokenizers.audio.stems import PatchStem
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
from worldtokens.tokenizers.patches import resample_positions
from worldtokens.tokenizers.video.tokenizer import VideoTokenizer

Front = TypeVar("Front", AudioTokenizer, VideoTokenizer)


@torch.no_grad()
def adapt_tokenizer(image_tokenizer: ImageTokenizer, tokenizer: Front, channels: str = "sum") -> Front:
    """Initialise an audio or video front-end from a pretrained image front-end.

        audio = wt.adapt_tokenizer(vit.tokenizers["image"], wt.AudioTokenizer(384, preset="ast", config={"class_tokens": 1}))
        model = wt.Classifier(audio, vit.trunk, classes=50)

    Audio (AST, Gong et al. 2021): a spectrogram is a grey image, time to the right, frequency downward from low to
    high. The three channels of the patch kernel become one; a kernel of another size is resized as in `resize_images`.
    Position embeddings are interpolated to the spectrogram's grid (AST crops them along a shorter side).

    Video (ViViT, Arnab et al. 2021): the kernel is inflated, spread evenly over the frames of a tubelet, so that a still
    video gives the tokens of its image. Spatial positions are those of the images, temporal positions start at zero.

    Class tokens and registers, in this order, initialise the class tokens of an audio front-end; any further ones keep
    their own initialisation.

    Args:
        image_tokenizer: the pretrained front-end; not changed.
        tokenizer: the new front-end, of the same dim; changed in place.
        channels: for audio: ``"sum"`` of the three channels, as for a grey image, or their ``"mean"``.

    Returns:
        `tokenizer`.

    Raises:
        InputError: the dims differ, or the new front-end has no patches.
    """
    if channels not in ("sum", "mean"):
        raise InputError(f"channels is {channels!r}, expected 'sum' or 'mean'")
    if image_tokenizer.dim != tokenizer.dim:
        raise InputError(
            f"the image tokens are of dim {image_tokenizer.dim}, the new ones of dim {tokenizer.dim}"
        )
    kernel = image_tokenizer.proj.weight.unflatten(1, (3, *image_tokenizer.patch))  # (D, 3, height, width)
    prefixes = [t[0] for t in (image_tokenizer.class_token, image_tokenizer.registers) if t is not None]
    if isinstance(tokenizer, AudioTokenizer) and isinstance(tokenizer.stem, PatchStem):
        _adapt_audio(
            image_tokenizer, tokenizer, kernel.sum(1, keepdim=True) / (1 if channels == "sum" else 3)
        )
        if tokenizer.class_embed is not None and prefixes:
            own = tokenizer.class_embed[0]
            prefix = torch.cat(prefixes)[: len(own)]
            own[: len(prefix)] = prefix.to(own)
    elif isinstance(tokenizer, VideoTokenizer):
        _adapt_video(image_tokenizer, tokenizer, kernel)
    else:
        what = type(tokenizer).__name__ + (
            " without patches" if isinstance(tokenizer, AudioTokenizer) else ""
        )
        raise InputError(
            f"a {what} cannot take an image's weights: an AudioTokenizer of patches (preset='ast') and a VideoTokenizer can"
        )
    return tokenizer


def _adapt_audio(images: ImageTokenizer, audio: AudioTokenizer, kernel: Tensor) -> None:
    stem: Any = audio.stem
    frames, bands = stem.patch
    kernel = resize_kernel(kernel, (bands, frames))
    stem.conv.weight.copy_(kernel.mT)  # (D, 1, time, frequency)
    _copy_bias(images, stem.conv.bias)
    if audio.pos_embed is not None and images.pos_embed is not None:
        columns, rows = audio.pos_embed.shape[:2]
        audio.pos_embed.copy_(resample_positions(images.pos_embed, (rows, columns)).transpose(0, 1))


def _adapt_video(images: ImageTokenizer, video: VideoTokenizer, kernel: Tensor) -> None:
    frames, *patch = video.tubelet
    kernel = resize_kernel(kernel, patch)[:, :, None].expand(-1, -1, frames, -1, -1) / frames
    video.proj.weight.copy_(kernel.flatten(1))
    _copy_bias(images, video.proj.bias)
    if video.space_embed is not None and images.pos_embed is not None:
        video.space_embed.copy_(resample_positions(images.pos_embed, video.space_embed.shape[:2]))
        video.time_embed.zero_()


def _copy_bias(images: ImageTokenizer, bias: Tensor) -> None:
    bias.zero_() if images.proj.bias is None else bias.copy_(images.proj.bias)
