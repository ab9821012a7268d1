"""A pretrained image front-end's weights for another front-end, so that its trunk reads sound or clips."""

from __future__ import annotations

from typing import TypeVar

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
def adapt_tokenizer(pictures: ImageTokenizer, tokenizer: Front, channels: str = "sum") -> Front:
    """Fill a new front-end with a pretrained image front-end's weights; its trunk then takes the new tokens as they are.

        sounds = wt.adapt_tokenizer(vit.tokenizers["image"], wt.AudioTokenizer(384, preset="ast", config={"class_tokens": 1}))
        model = wt.Classifier(sounds, vit.trunk, classes=50)

    **Sound** (AST, Gong et al. 2021; patches of a spectrum): the spectrum is a grey image, time to the right, frequency
    downward from low to high. The kernel's three channels become one; a kernel of another size is resized as
    `resize_images` does. The position table is stretched to the spectrogram's grid (AST cuts where a side is shorter).
    **Clips** (ViViT, Arnab et al. 2021): the kernel is spread evenly over a tubelet's frames, so that a clip which stands
    still gives the image's tokens; its places take the images' table, its times start at zero.

    Class tokens and registers, in their order, fill as many class tokens as the new front-end has; further ones keep
    their start.

    Args:
        images: the pretrained front-end; not changed.
        tokenizer: the new one, of the same width; changed in place.
        channels: sound only: ``"sum"``, what a grey image would give whose channels are alike, or ``"mean"``, a third
            of it.

    Returns:
        `tokenizer`.

    Raises:
        InputError: widths differ, or it is not a front-end of patches.
    """
    if channels not in ("sum", "mean"):
        raise InputError(f"channels is {channels!r}, expected 'sum' or 'mean'")
    if pictures.dim != tokenizer.dim:
        raise InputError(f"the images' tokens are {pictures.dim} wide, the new ones {tokenizer.dim}")
    kernel = pictures.proj.weight.unflatten(1, (3, *pictures.patch))  # (D, 3, height, width)
    before = [t[0] for t in (pictures.class_token, pictures.registers) if t is not None]
    if isinstance(tokenizer, AudioTokenizer) and isinstance(tokenizer.stem, PatchStem):
        _sound(pictures, tokenizer, kernel.sum(1, keepdim=True) / (1 if channels == "sum" else 3))
        if tokenizer.class_embed is not None and before:
            own = tokenizer.class_embed[0]
            prefix = torch.cat(before)[: len(own)]
            own[: len(prefix)] = prefix.to(own)
    elif isinstance(tokenizer, VideoTokenizer):
        _clip(pictures, tokenizer, kernel)
    else:
        what = type(tokenizer).__name__ + (
            " without patches" if isinstance(tokenizer, AudioTokenizer) else ""
        )
        raise InputError(
            f"a {what} cannot take an image's weights: an AudioTokenizer of patches (preset='ast') and a VideoTokenizer can"
        )
    return tokenizer


def _sound(pictures: ImageTokenizer, sounds: AudioTokenizer, kernel: Tensor) -> None:
    frames, bands = sounds.stem.patch
    kernel = resize_kernel(kernel, (bands, frames))
    sounds.stem.conv.weight.copy_(kernel.mT)  # (D, 1, time, frequency)
    _bias(pictures, sounds.stem.conv.bias)
    if sounds.pos_embed is not None and pictures.pos_embed is not None:
        columns, rows = sounds.pos_embed.shape[:2]
        sounds.pos_embed.copy_(resample_positions(pictures.pos_embed, (rows, columns)).transpose(0, 1))


def _clip(pictures: ImageTokenizer, clips: VideoTokenizer, kernel: Tensor) -> None:
    steps, *patch = clips.tubelet
    kernel = resize_kernel(kernel, patch)[:, :, None].expand(-1, -1, steps, -1, -1) / steps
    clips.proj.weight.copy_(kernel.flatten(1))
    _bias(pictures, clips.proj.bias)
    if clips.place_embed is not None and pictures.pos_embed is not None:
        clips.place_embed.copy_(resample_positions(pictures.pos_embed, clips.place_embed.shape[:2]))
        clips.time_embed.zero_()


def _bias(pictures: ImageTokenizer, bias: Tensor) -> None:
    bias.zero_() if pictures.proj.bias is None else bias.copy_(pictures.proj.bias)
