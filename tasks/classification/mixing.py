"""MixUp and CutMix of whole batches, torchvision's (Zhang et al. 2017, Yun et al. 2019), with labels that may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tasks.language.loss import IGNORE


class Mix:
    """Each sample becomes a mixture of itself and its neighbour in the batch, and its label the same mixture.

    With both settings above 0 each batch draws one of the two. All is drawn from torch's global CPU generator, which the
    training loop seeds step by step.

    Args:
        mixup, cutmix: alpha of the Beta distribution that a mixture's share is drawn from, 0 for never.

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

    def __call__(self, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Float (B, 3, H, W) and soft labels (B, classes) -> both mixed."""
        from torchvision.transforms import v2

        ways = [(name, alpha) for name, alpha in self.alphas.items() if alpha]
        name, alpha = ways[int(torch.randint(len(ways), ()))] if len(ways) > 1 else ways[0]
        return getattr(v2, name)(alpha=alpha)(pictures, labels)


def pictures_of(front: nn.Module, batch: Mapping[str, Any] | Tensor) -> Tensor:
    """A front-end's batch -> its images as normalised float32 (B, 3, H, W), which that front-end takes too.

    Raises:
        InputError: the batch is not one of images of equal shape.
    """
    if isinstance(batch, Tensor) and batch.ndim == 4 and batch.is_floating_point():
        return batch
    front = getattr(front, "tokenizer", front)  # behind a TokenReducer
    pixels = batch.get("pixels") if isinstance(batch, Mapping) else None
    if pixels is None or "keep" in batch:
        found = f"a batch of {sorted(batch)}" if isinstance(batch, Mapping) else f"{tuple(batch.shape)}"
        raise InputError(
            f"mixup and cutmix mix images of one shape, found {found} of {type(front).__name__}: set both to 0, or read "
            "images with a fixed size and resize='crop' or 'squash'"
        )
    mean, std = (torch.tensor(v, device=pixels.device)[:, None, None] * 255 for v in (front.mean, front.std))
    return (pixels.float() - mean) / std


def soft(labels: Tensor, classes: int) -> Tensor:
    """Class numbers (B,) -> (B, classes) float, one 1 a row; a row without class (`IGNORE`) is all 0."""
    known = labels != IGNORE
    return F.one_hot(labels.where(known, 0), classes) * known[:, None].float()


def soft_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy against soft labels, the mean over their whole mass; no mass gives 0, with a graph.

    Args:
        logits, labels: (B, classes); a row of labels adds up to 1, or to less where it is in part unknown.
        label_smoothing: share of a row's mass that is spread evenly over the classes.
    """
    mass = labels.sum(-1, keepdim=True)
    labels = (1 - label_smoothing) * labels + label_smoothing * mass / labels.shape[-1]
    return -(labels * logits.log_softmax(-1)).sum() / mass.sum().clamp(min=1.0)
