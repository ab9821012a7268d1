"""MixUp and CutMix of a batch by torchvision (Zhang et al. 2017, Yun et al. 2019); labels may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tasks.language.loss import IGNORE


class Mix:
    """Mixes each sample with its neighbour in the batch, and its label in the same proportion.

    With both settings above 0 each batch draws one of the two. Draws use torch's global CPU generator, which the
    training loop seeds at every step.

    Args:
        mixup, cutmix: alpha of the Beta distribution of the mixing ratio, 0 to disable.

    Raises:
        ValueError: an alpha below 0.
    """

    def __init__(self, mixup: float = 0.0, cutmix: float = 0.0) -> None:
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not alpha >= 0:
                raise ValueError(f"{name}={alpha}, expected 0 or more")
        self.alphas = {"MixUp": mixup, "CutMix": cutmix}

    def __bool__(self) -> bool:
        return any(self.alphas.values())

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes float images (B, 3, H, W) and soft labels (B, classes)."""
        from torchvision.transforms import v2

        enabled = [(name, alpha) for name, alpha in self.alphas.items() if alpha]
        name, alpha = enabled[int(torch.randint(len(enabled), ()))] if len(enabled) > 1 else enabled[0]
        return getattr(v2, name)(alpha=alpha)(images, labels)


def normalized_images(tokenizer: nn.Module, batch: Mapping[str, Any] | Tensor) -> Tensor:
    """The images of a tokenizer's batch as normalised float32 (B, 3, H, W), which that tokenizer also accepts.

    Raises:
        InputError: the batch does not hold images of one shape.
    """
    if isinstance(batch, Tensor) and batch.ndim == 4 and batch.is_floating_point():
        return batch
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # behind a TokenReducer
    pixels = batch.get("pixels") if isinstance(batch, Mapping) else None
    if pixels is None or "keep" in batch:
        found = f"a batch of {sorted(batch)}" if isinstance(batch, Mapping) else f"{tuple(batch.shape)}"
        raise InputError(
            f"mixup and cutmix need images of one shape, found {found} of {type(tokenizer).__name__}: set both to 0, or "
            "read images with a fixed size and resize='crop' or 'squash'"
        )
    mean, std = (
        torch.tensor(v, device=pixels.device)[:, None, None] * 255 for v in (tokenizer.mean, tokenizer.std)
    )
    return (pixels.float() - mean) / std


def soft_labels(labels: Tensor, classes: int) -> Tensor:
    """Class indices (B,) -> one-hot float (B, classes); a row without a class (`IGNORE`) is all 0."""
    known = labels != IGNORE
    return F.one_hot(labels.where(known, 0), classes) * known[:, None].float()


def soft_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with soft labels, averaged over the sum of all labels; labels of sum 0 give 0, with a graph.

    Args:
        logits, labels: (B, classes); a row of labels sums to 1, or to less where it is partly unknown.
        label_smoothing: share of a row's target that is spread evenly over the classes.
    """
    mass = labels.sum(-1, keepdim=True)
    labels = (1 - label_smoothing) * labels + label_smoothing * mass / labels.shape[-1]
    return -(labels * logits.log_softmax(-1)).sum() / mass.sum().clamp(min=1.0)
