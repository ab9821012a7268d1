"""Linear maps laid out for a handful of rows, as decoding multiplies them: one new token for each text of a batch.

A product with 2 to 32 rows ought to cost what reading the weights costs. In float32 on a CPU, torch's own takes two to
four times as long (docs/LOG.md); oneDNN's, with the weights in blocks, comes near it. The blocks are a copy, made when a
generation starts and dropped when it ends, so they never grow stale and the model itself is as it was.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 32
FEWEST_STEPS = 8  # the copy costs about as much as three steps
LEAST = (
    1 << 18
)  # weights; a product with fewer is over before oneDNN, with its 30 microseconds a call, has begun


class PackedLinear(nn.Module):
    """``F.linear`` with the weight in oneDNN's blocks: (..., D) -> (..., V)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocks, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")


def worthwhile(weight: Tensor, rows: int, steps: int) -> bool:
    """Whether so many steps of so many rows gain by packing."""
    return (
        2 <= rows <= MOST_ROWS
        and steps >= FEWEST_STEPS
        and weight.numel() >= LEAST
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def packed_linear(weight: Tensor, bias: Tensor | None, rows: int, steps: int):
    """A function of x that multiplies by this weight, packed where that is worthwhile."""
    if worthwhile(weight, rows, steps):
        return PackedLinear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def packed(module: nn.Module, rows: int, steps: int) -> nn.Module:
    """A twin of a module for inference, its linear maps packed where that is worthwhile, all else shared; or itself.

    Args:
        module: a trunk in eval mode.
        rows: of every product to come.
        steps: how many there will be.
    """
    if any(p.dtype != torch.float32 for p in module.parameters()):
        return module
    return _twin(module, rows, steps)


def _twin(module: nn.Module, rows: int, steps: int) -> nn.Module:
    plain = type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)
    if plain and "forward" not in module.__dict__:
        pack = worthwhile(module.weight, rows, steps)
        return PackedLinear(module.weight, module.bias) if pack else module
    children = {n: _twin(child, rows, steps) for n, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    return twin
