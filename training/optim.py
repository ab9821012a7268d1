"""AdamW with decay on matrices alone, the learning rate as a function of the step, and averaged weights.

Notable here: the rate is computed from the optimizer's step and from nothing else, so it cannot advance with
micro-batches or twice after a resume; a step with a gradient that is not finite is left out on the device, so
that no step waits for the host.
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
    """How weights are updated.

    Args:
        lr: the highest learning rate.
        weight_decay: AdamW's decay, for matrices only (see `decays`).
        betas: AdamW's moments.
        eps: AdamW's epsilon.
        warmup: steps in which the rate rises from 0; below 1, that share of all steps.
        final: the rate at the last step, as a share of `lr`.
        clip: largest norm of the whole gradient, or null for no clipping.
        ema: decay of averaged weights (for example 0.999), which then are what is evaluated and saved; or null.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    warmup: float = 0.05
    final: float = 0.0
    clip: float | None = 1.0
    ema: float | None = None

    def __post_init__(self) -> None:
        # from YAML a list comes; written so that a settings object compares equal either way
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, good, want in (
            ("lr", self.lr > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("betas", all(0 <= b < 1 for b in self.betas), "two numbers of 0 or more, below 1"),
            ("warmup", self.warmup >= 0, "0 or more"),
            ("final", 0 <= self.final <= 1, "from 0 to 1"),
            ("clip", self.clip is None or self.clip > 0, "above 0, or null"),
            ("ema", self.ema is None or 0 < self.ema < 1, "between 0 and 1, or null"),
        ):
            if not good:
                raise InputError(f"optim.{name} is {getattr(self, name)}, expected {want}")


def rate(step: int, steps: int, settings: OptimSettings) -> float:
    """The learning rate of optimizer step `step` (0 is the first) of `steps`: linear warmup, then cosine."""
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.lr * (settings.final + (1 - settings.final) * cosine)


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
_POSITIONS = {"pos", "position", "positions", "positional"}
_LEARNED = {
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
_LEARNED |= {"null", "scale", "gain", "gamma", "bias"}


def decays(module: nn.Module, module_name: str, name: str, param: Tensor) -> bool:
    """Whether weight decay is right for this parameter: for what multiplies features, and embeddings of words.

    Not for norms, biases, gains, scales, embeddings of positions, and learned tokens (class, mask, latents). The
    module's type decides first, then the dimensions; names only tell what neither can: an nn.Embedding of
    positions from one of words, and a bare nn.Parameter that is a table of tokens from one that is a matrix.

    Args:
        module: the module that holds the parameter, by the name `name`.
        module_name: the module's own name.
    """
    if param.ndim < 2 or isinstance(module, _NORMS):
        return False
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return not _POSITIONS & _words(module_name.rpartition(".")[2])
    if isinstance(module, _MATRICES):
        return "bias" not in name
    return sum(n > 1 for n in param.shape) >= 2 and not (_POSITIONS | _LEARNED) & _words(name)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))


def groups(model: nn.Module, settings: OptimSettings) -> list[dict]:
    """Every trainable parameter in exactly one of two groups: with decay and without.

    A module may name further ones to leave alone in a method `no_weight_decay()`, as timm's models do.

    Raises:
        InputError: nothing is trainable.
    """
    left_alone, seen = set(), set()
    for prefix, module in model.named_modules():
        if callable(listed := getattr(module, "no_weight_decay", None)):
            left_alone |= {f"{prefix}.{name}".lstrip(".") for name in listed()}
    split: dict[bool, list[Tensor]] = {True: [], False: []}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if not param.requires_grad or id(param) in seen:  # a tied weight counts where it comes first
                continue
            seen.add(id(param))
            alone = f"{prefix}.{name}".lstrip(".") in left_alone
            split[not alone and decays(module, prefix, name, param)].append(param)
    if not seen:
        raise InputError(f"{type(model).__name__} has nothing to train: every parameter is frozen")
    made = [
        {"params": split[True], "weight_decay": settings.weight_decay},
        {"params": split[False], "weight_decay": 0.0},
    ]
    return [g for g in made if g["params"]]


def make_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over `groups`, as one fused kernel where the device has it."""
    split = groups(model, settings)
    fused = all(
        p.device.type in ("cpu", "cuda", "mps", "xpu") and p.is_floating_point()
        for g in split
        for p in g["params"]
    )
    return torch.optim.AdamW(split, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def update(
    optimizer: torch.optim.AdamW,
    params: list[Tensor],
    lr: float,
    clip: float | None,
    loss: Tensor,
    scaler: torch.amp.GradScaler,
) -> tuple[Tensor, Tensor]:
    """One optimizer step, in the one right order: unscale, clip, step. Gradients are freed.

    A step whose loss or gradient is not finite changes nothing: neither weights, nor moments, nor the count of
    steps that AdamW corrects its bias by.

    Args:
        loss: the step's loss, a scalar on the device; the same on every rank.
        scaler: enabled for float16 only.

    Returns:
        (norm of the whole gradient before clipping, whether the step was made: 1.0 or 0.0), on the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.unscale_(optimizer)
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_([p for p in params if p.grad is not None], clip, norm)
    made = (torch.isfinite(norm) & torch.isfinite(loss)).to(torch.float32)
    if scaler.is_enabled():
        scaler.step(optimizer)  # leaves a step out by itself, from what unscale_ found
        scaler.update()
    elif optimizer.defaults["fused"]:
        # the kernel's own door for this, which GradScaler uses too: no wait for the host
        optimizer.grad_scale, optimizer.found_inf = None, 1.0 - made
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    elif bool(made):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, made


class Average:
    """An exponential moving average of the trainable weights, kept in float32.

    Early on it follows faster, as min(decay, (1 + step) / (10 + step)), so that it does not hold the random start.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        self.values = {n: p.detach().float().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        keep = min(self.decay, (1 + step) / (10 + step))
        now = [p.detach().float() for p in self.params.values()]
        torch._foreach_lerp_(list(self.values.values()), now, 1 - keep)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, the model holds the averaged weights."""
        kept = {n: p.detach().clone() for n, p in self.params.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in self.params.items():
                    p.copy_(kept[n])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for n, p in self.params.items():
            p.copy_(self.values[n])
