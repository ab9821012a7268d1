"""AdamW with weight decay on matrices only, warmup and cosine schedule, and EMA of the weights.

Notable here: the learning rate is a function of the optimizer step alone, so micro-batches or a resume cannot advance
it; a step with a NaN or infinite gradient is skipped on the device, without a synchronisation with the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import clean_name


@dataclasses.dataclass(frozen=True)
class OptimSettings:
    """AdamW, its learning-rate schedule, gradient clipping and weight averaging.

    Args:
        lr: peak learning rate.
        weight_decay: AdamW's weight decay. It applies to matrices only, see `has_weight_decay`.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        warmup: steps of linear warmup from 0. Below 1, a share of all steps.
        min_lr_ratio: learning rate at the last step, as a share of `lr`. The decay is a cosine.
        max_grad_norm: largest norm of the whole gradient; null: no clipping.
        ema: decay of the weights' moving average, such as 0.999; null: off. The averaged weights are evaluated and
            saved.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    warmup: float = 0.05
    min_lr_ratio: float = 0.0
    max_grad_norm: float | None = 1.0
    ema: float | None = None

    def __post_init__(self) -> None:
        # YAML gives a list; a tuple makes settings from both compare equal
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, valid, expected in (
            ("lr", self.lr > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("betas", all(0 <= b < 1 for b in self.betas), "two numbers of 0 or more, below 1"),
            ("warmup", self.warmup >= 0, "0 or more"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "from 0 to 1"),
            ("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, "above 0, or null"),
            ("ema", self.ema is None or 0 < self.ema < 1, "between 0 and 1, or null"),
        ):
            if not valid:
                raise InputError(f"optim.{name} is {getattr(self, name)}, expected {expected}")


def lr_at(step: int, steps: int, settings: OptimSettings) -> float:
    """Learning rate of optimizer step `step` (0 is the first) of `steps`: linear warmup, then cosine decay."""
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


_MATRICES = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,
)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
)
_POSITION_NAMES = {"pos", "position", "positions", "positional"}
_LEARNED_TOKENS = {
    "token",
    "tokens",
    "cls",
    "mask",
    "latent",
    "latents",
    "register",
    "registers",
    "query",
    "queries",
}
_LEARNED_TOKENS |= {"null", "scale", "gain", "gamma", "bias"}


def has_weight_decay(module: nn.Module, module_name: str, name: str, param: Tensor) -> bool:
    """Whether a parameter gets weight decay: weight matrices and token embeddings do.

    Norms, biases, gains, scales, position embeddings and learned tokens (class, mask, latents) do not. The module's
    type decides first, then the number of dimensions. Names decide only what neither can: whether an nn.Embedding
    holds positions or tokens, and whether a bare nn.Parameter is a table of learned tokens or a matrix.

    Args:
        module: the module that holds the parameter under the name `name`.
        module_name: the module's own name.
    """
    if param.ndim < 2 or isinstance(module, _NORMS):
        return False
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return not _POSITION_NAMES & _name_parts(module_name.rpartition(".")[2])
    if isinstance(module, _MATRICES):
        return "bias" not in name
    return sum(n > 1 for n in param.shape) >= 2 and not (_POSITION_NAMES | _LEARNED_TOKENS) & _name_parts(
        name
    )


def _name_parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))


def param_groups(model: nn.Module, settings: OptimSettings) -> list[dict]:
    """Two parameter groups, with and without weight decay; every trainable parameter is in exactly one.

    A module may exempt further parameters in a method `no_weight_decay()`, as timm's models do.

    Raises:
        InputError: no parameter is trainable.
    """
    exempt, seen = set(), set()
    for prefix, module in model.named_modules():
        if callable(listed := getattr(module, "no_weight_decay", None)):
            exempt |= {f"{prefix}.{name}".lstrip(".") for name in listed()}
    split: dict[bool, list[Tensor]] = {True: [], False: []}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if not param.requires_grad or id(param) in seen:  # a tied weight counts at its first occurrence
                continue
            seen.add(id(param))
            exempted = f"{prefix}.{name}".lstrip(".") in exempt
            split[not exempted and has_weight_decay(module, prefix, name, param)].append(param)
    if not seen:
        raise InputError(f"{type(model).__name__} has nothing to train: every parameter is frozen")
    groups = [
        {"params": split[True], "weight_decay": settings.weight_decay},
        {"params": split[False], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def make_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over `param_groups`, fused where the device supports it."""
    groups = param_groups(model, settings)
    fused = all(
        p.device.type in ("cpu", "cuda", "mps", "xpu") and p.is_floating_point()
        for g in groups
        for p in g["params"]
    )
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def optimizer_step(
    optimizer: torch.optim.AdamW,
    params: list[Tensor],
    lr: float,
    max_grad_norm: float | None,
    loss: Tensor,
    scaler: torch.amp.GradScaler,
) -> tuple[Tensor, Tensor]:
    """One optimizer step in the order unscale, clip, step; gradients are freed.

    A step whose loss or gradient is not finite changes nothing: neither weights, nor moments, nor AdamW's step count.

    Args:
        lr: learning rate of this step.
        max_grad_norm: largest norm of the whole gradient; None: no clipping.
        loss: the step's loss, a scalar on the device; the same on every rank.
        scaler: enabled for float16 only.

    Returns:
        (gradient norm before clipping, whether the step was taken: 1.0 or 0.0), both on the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.unscale_(optimizer)
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_([p for p in params if p.grad is not None], max_grad_norm, norm)
    taken = (torch.isfinite(norm) & torch.isfinite(loss)).to(torch.float32)
    if scaler.is_enabled():
        scaler.step(optimizer)  # skips the step by itself, from what unscale_ found
        scaler.update()
    elif optimizer.defaults["fused"]:
        # the fused kernel's interface for GradScaler: it skips the step without waiting for the host
        # (AdamW does not declare the two attributes)
        optimizer.grad_scale, optimizer.found_inf = None, 1.0 - taken  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(taken):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, taken


class EMA:
    """Exponential moving average of the trainable weights, in float32.

    The decay starts low, min(decay, (1 + step) / (10 + step)), so that the random initialisation is forgotten early.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        self.values = {n: p.detach().float().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update after optimizer step `step`, 0 the first."""
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [p.detach().float() for p in self.params.values()]
        torch._foreach_lerp_(list(self.values.values()), current, 1 - decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside this context the model holds the averaged weights."""
        original = {n: p.detach().clone() for n, p in self.params.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in self.params.items():
                    p.copy_(original[n])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Overwrite the model's weights with the averaged ones."""
        for n, p in self.params.items():
            p.copy_(self.values[n])
