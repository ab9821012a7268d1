"""adaLN-zero: a conditioning vector per sample shifts, scales and gates each sub-layer (DiT, Peebles & Xie 2023).

A sub-layer becomes ``x + gate * f((1 + scale) * norm(x) + shift)``. Shift, scale and gate are linear in the condition and
zero at initialisation, so a fresh block is the identity. The norms then have no gain and bias of their own.

Shapes: B rows, N tokens, S samples, D width, T = all valid tokens of the mode ``"groups"``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.attention import AttentionPlan
from worldtokens.tokens import Tokens


class Modulation(NamedTuple):
    """Shift, scale and gate of one sub-layer, each (B | 1, 1 | N | T, D)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor | None


@dataclasses.dataclass(frozen=True)
class Condition:
    """The condition of a forward pass, prepared once (`prepare_condition`) for all layers.

    Args:
        x: (S, D), or (1 | B, T | N, D) for each token, after its SiLU.
        sample_index: (B | 1, N | T) int64, which of the S each token belongs to; None: a row is a sample, or `x` is per
            token.
    """

    x: Tensor
    sample_index: Tensor | None = None


def prepare_condition(condition: Tensor, tokens: Tokens, plan: AttentionPlan) -> Condition:
    """Bring a condition into the form that the layers use.

    Args:
        condition: (S, D), one per sample in the order of `Tokens.pool`, which is (B, D) where a row holds one sample; or
            (B, N, D), one per token. In tokens without a layout a row is taken as one sample.
        tokens: (B, N, D).
        plan: how they attend.

    Raises:
        ValueError: another shape.
    """
    b, n, d = tokens.shape
    samples = b if tokens.layout is None else tokens.layout.samples
    if condition.shape not in ((samples, d), (b, n, d)):
        raise ValueError(
            f"condition is {tuple(condition.shape)}, expected {(samples, d)}, one per sample, or {(b, n, d)}, one per "
            "token; packed rows need a layout to separate their samples: tokens.infer_layout()"
        )
    x = F.silu(condition)
    if condition.ndim == 3:
        # values at padding must not reach a token, also not as 0 x NaN
        return Condition(plan.unpad(x.masked_fill(~tokens.valid[..., None], 0)))
    if tokens.layout is None or tokens.layout.single:
        if plan.indices is None:
            return Condition(x[:, None])
        return Condition(x, plan.add_rows(plan.indices // n)[None])
    return Condition(x, plan.unpad(_sample_index(tokens)))


def _sample_index(tokens: Tokens) -> Tensor:
    """(B, N) int64: the index, in the order before packing, of each token's sample; 0 at padding."""
    n, layout, rows, index = tokens.shape[1], tokens.layout, [], 0
    for lengths in layout.lengths:
        row = []
        for length in lengths:
            row += [index if layout.origin is None else layout.origin[index]] * length
            index += 1
        index += not lengths
        rows.append(row + [0] * (n - len(row)))
    return torch.tensor(rows, device=tokens.device)


class AdaLN(nn.Module):
    """Condition -> shift and scale, and with `gated` a gate, for each sub-layer.

    Args:
        dim: width D of tokens and condition.
        sublayers: number of modulated norms.
        gated: False for the norm after the last block, which has no residual connection.
    """

    def __init__(self, dim: int, sublayers: int, gated: bool = True) -> None:
        super().__init__()
        self.dim, self.gated = dim, gated
        self.linear = nn.Linear(dim, sublayers * (3 if gated else 2) * dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Condition) -> list[Modulation]:
        """One `Modulation` per sub-layer."""
        parts = self.linear(condition.x).split(self.dim, -1)
        if condition.sample_index is not None:
            parts = [p[condition.sample_index] for p in parts]
        each = 3 if self.gated else 2
        return [Modulation(*parts[i : i + each], *[None][self.gated :]) for i in range(0, len(parts), each)]


def modulate(x: Tensor, modulation: Modulation | None) -> Tensor:
    """Shift and scale the output of a norm."""
    return x if modulation is None else torch.addcmul(modulation.shift, x, 1 + modulation.scale)


def gate(x: Tensor, modulation: Modulation | None) -> Tensor:
    """Scale the output of a sub-layer before the residual sum."""
    return x if modulation is None else x * modulation.gate
