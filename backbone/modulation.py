"""adaLN-zero: a vector for each sample shifts, scales and gates what a block does (DiT, Peebles & Xie 2023).

A block's half becomes ``x + gate * half((1 + scale) * norm(x) + shift)``, the three being linear in the condition and zero
at the start: a fresh block is the identity. The norms have no gain and bias of their own then.

Shapes: B rows, N tokens, S samples, D width, T = all valid tokens of a reading by groups.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.attention import Reading
from worldtokens.tokens import Tokens


class Parts(NamedTuple):
    """What one half is changed by, each (B | 1, 1 | N | T, D)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor | None


@dataclasses.dataclass(frozen=True)
class Condition:
    """The conditions of a forward pass, made once (`spread`) and handed to every layer.

    Args:
        x: (S, D), or (1 | B, T | N, D) for each token, behind its SiLU.
        owner: (B | 1, N | T) int64, which of the S each token belongs to; None: a row is a sample, or `x` has all tokens.
    """

    x: Tensor
    owner: Tensor | None = None


def spread(condition: Tensor, tokens: Tokens, reading: Reading) -> Condition:
    """A condition as the layers read it.

    Args:
        condition: (S, D), one for each sample in the order in which `Tokens.pool` gives them, which is (B, D) where a row
            holds one; or (B, N, D), one for each token. Tokens without a layout: a row is taken as one sample.
        tokens: (B, N, D).
        reading: how they are read.

    Raises:
        ValueError: another shape.
    """
    b, n, d = tokens.shape
    samples = b if tokens.layout is None else tokens.layout.samples
    if condition.shape not in ((samples, d), (b, n, d)):
        raise ValueError(
            f"condition is {tuple(condition.shape)}, expected {(samples, d)}, one for each sample, or {(b, n, d)}, one for "
            "each token; packed rows need a layout to tell their samples: tokens.infer_layout()"
        )
    x = F.silu(condition)
    if condition.ndim == 3:
        # what padding holds must not reach a token, also not as 0 x NaN
        return Condition(reading.enter(x.masked_fill(~tokens.valid[..., None], 0)))
    if tokens.layout is None or tokens.layout.single:
        if reading.gather is None:
            return Condition(x[:, None])
        return Condition(x, reading.fill(reading.gather // n)[None])
    return Condition(x, reading.enter(_owners(tokens)))


def _owners(tokens: Tokens) -> Tensor:
    """(B, N) int64: the number, in the order before packing, of the sample that each token belongs to; 0 at padding."""
    n, layout, rows, number = tokens.shape[1], tokens.layout, [], 0
    for lengths in layout.lengths:
        row = []
        for length in lengths:
            row += [number if layout.origin is None else layout.origin[number]] * length
            number += 1
        number += not lengths
        rows.append(row + [0] * (n - len(row)))
    return torch.tensor(rows, device=tokens.device)


class Modulation(nn.Module):
    """Condition -> shift and scale, and with `gated` a gate, for each of so many halves.

    Args:
        dim: width D of tokens and condition.
        halves: how many norms are modulated.
        gated: False for the norm behind the last block, which has no residual path.
    """

    def __init__(self, dim: int, halves: int, gated: bool = True) -> None:
        super().__init__()
        self.dim, self.halves, self.gated = dim, halves, gated
        self.linear = nn.Linear(dim, halves * (3 if gated else 2) * dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Condition) -> list[Parts]:
        """One `Parts` for each half."""
        parts = self.linear(condition.x).split(self.dim, -1)
        if condition.owner is not None:
            parts = [p[condition.owner] for p in parts]
        each = 3 if self.gated else 2
        return [Parts(*parts[i : i + each], *[None][self.gated :]) for i in range(0, len(parts), each)]


def modulated(x: Tensor, parts: Parts | None) -> Tensor:
    """A norm's output, shifted and scaled."""
    return x if parts is None else torch.addcmul(parts.shift, x, 1 + parts.scale)


def gated(x: Tensor, parts: Parts | None) -> Tensor:
    """What a half gives to the residual path."""
    return x if parts is None else x * parts.gate
