"""Another image size or patch size for a trained model: interpolate position embeddings, resize patch embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.pretrained.surgery.replace import find_front, rebuild
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
from worldtokens.tokenizers.patches import axis_weights, grid_size, resample_positions, sides


def resize_images(
    model: nn.Module,
    size: int | tuple[int, int] | str | None = "same",
    patch: int | tuple[int, int] | str = "same",
    column: str | None = None,
    max_tokens: int | None = None,
) -> nn.Module:
    """Change the image size or patch size of a model.

    Position embeddings are interpolated to the new grid as the front-end does (`PatchEmbedConfig.interpolation`), by
    default bicubic with anti-aliasing as timm's `resample_abs_pos_embed`; class token and registers stay. The patch kernel
    is resized by the pseudo-inverse of image resizing (FlexiViT, Beyer et al. 2023), so an image enlarged with its patches
    gives the same tokens.

    RoPE uses the positions of the new grid, unless the front-end was built with `span`.

    Args:
        model: a task, an `Encoder` or an `ImageTokenizer`; changed in place, before an optimizer is made.
        size: side in pixels, or (height, width); None: native aspect, any number of patches.
        patch: side of a patch in pixels, or (height, width).
        column: name of the front-end, needed if there are several.
        max_tokens: maximum number of patches of an image in native aspect.

    Returns:
        The model.

    Raises:
        InputError: the model has no image front-end, or a size is out of range.
    """
    front = find_front(model, ImageTokenizer, column)
    # `sides` raises an InputError for any string other than "same"
    patch = front.patch if patch == "same" else sides(cast(tuple, patch), 2, "patch")
    size = front.size if isinstance(size, str) and size == "same" else size
    size = None if size is None else sides(cast(tuple, size), 2, "size")
    changes: dict[str, Any] = {"size": size, "patch": patch}
    grid: tuple[int, int] | None = None
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    if size is None:
        grid = front.position_grid
        changes["preprocess"] = replace(front.preprocess, crop_pct=1.0)
    elif front.size is not None and front.position_grid != grid_size(front.size, front.patch):
        grid = front.position_grid  # a table of its own size is interpolated in each batch
    changes["embedding"] = replace(front.embedding, position_grid=grid)
    weight = front.proj.weight.detach().unflatten(1, (3, *front.patch))
    tensors = {"proj.weight": resize_kernel(weight, patch).flatten(1)}
    if front.pos_embed is not None:
        grid = grid or grid_size(cast(tuple, size), patch)  # a grid is set above for size=None
        tensors["pos_embed"] = resample_positions(
            front.pos_embed.detach(), grid, front.embedding.interpolation
        )
    rebuild(front, changes, tensors)
    return model


def resize_kernel(weight: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a patch kernel, as timm's `resample_patch_embed`: (D, C, h, w) -> (D, C, *size).

    Resizing a patch is a matrix B = By (x) Bx. The kernel with the same products on enlarged patches is pinv(B^T) w, and
    the pseudo-inverse of a Kronecker product is the product of the pseudo-inverses.

    Raises:
        InputError: the kernel does not have four axes.
    """
    if weight.ndim != 4:
        raise InputError(f"a patch kernel is {tuple(weight.shape)}, expected (D, C, height, width)")
    if tuple(weight.shape[2:]) == tuple(size):
        return weight
    y, x = (
        torch.linalg.pinv(axis_weights(new, old).double().T).to(weight.device)
        for new, old in zip(size, weight.shape[2:], strict=True)
    )
    return torch.einsum("yi,xj,dcij->dcyx", y, x, weight.double()).to(weight.dtype)
