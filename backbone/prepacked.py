"""Linear layers with prepacked weights, for decoding on a CPU: one new token for each text of a batch.

A product with 2 to 32 rows should cost as much as reading the weights from memory. In float32 on a CPU torch's own takes
two to four times as long (docs/LOG.md); oneDNN's, with the weights in blocks, comes close. The blocks are a copy, made when
a generation starts and freed when it ends, so they never become stale and the model itself is unchanged.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS = 32
MIN_STEPS = 8  # the copy costs about as much as three steps
MIN_WEIGHTS = 1 << 18  # with fewer, oneDNN's 30 microseconds per call exceed the product itself


class PrepackedLinear(nn.Module):
    """``F.linear`` with the weight in oneDNN's blocks: (..., D) -> (..., V)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocks, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")


def is_faster(weight: Tensor, rows: int, steps: int) -> bool:
    """Whether prepacking this weight saves time over so many steps of so many rows."""
    return (
        2 <= rows <= MAX_ROWS
        and steps >= MIN_STEPS
        and weight.numel() >= MIN_WEIGHTS
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def prepacked_linear(weight: Tensor, bias: Tensor | None, rows: int, steps: int):
    """A function of x that applies this linear layer, prepacked where that is faster."""
    if is_faster(weight, rows, steps):
        return PrepackedLinear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def prepacked(module: nn.Module, rows: int, steps: int) -> nn.Module:
    """A copy of a module for inference with prepacked linear layers where that is faster, all else shared; or itself.

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
        faster = is_faster(module.weight, rows, steps)
        return PrepackedLinear(module.weight, module.bias) if faster else module
    children = {n: _twin(child, rows, steps) for n, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    return twin
