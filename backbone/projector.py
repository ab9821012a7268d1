"""Project tokens to another width: LayerNorm and a two-layer MLP with GELU, per token (LLaVA 1.5's connector)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Projector(Part):
    """Tokens of width `context_dim` -> the same number of width `dim`; all fields but `x` are unchanged.

    Args:
        dim: output width.
        context_dim: input width. None: `dim`.
        mlp_dim: hidden width. None: `dim`.
    """

    def __init__(self, dim: int, context_dim: int | None = None, mlp_dim: int | None = None) -> None:
        super().__init__()
        self.dim, self.context_dim = dim, context_dim or dim
        self.norm = nn.LayerNorm(self.context_dim)
        self.fc1 = nn.Linear(self.context_dim, mlp_dim or dim)
        self.fc2 = nn.Linear(mlp_dim or dim, dim)
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens) -> Tokens:
        """(B, N, context_dim) -> (B, N, dim)."""
        if tokens.dim != self.context_dim:
            raise ValueError(
                f"tokens have dim {tokens.dim} and this Projector expects {self.context_dim}: build it with "
                f"context_dim={tokens.dim}"
            )
        x = tokens.x.masked_fill(~tokens.valid[..., None], 0)
        return tokens.replace(x=self.fc2(F.gelu(self.fc1(self.norm(x)))))
