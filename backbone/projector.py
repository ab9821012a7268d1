"""One modality's tokens in another's width: two linear layers with GELU between, token by token (LLaVA 1.5's bridge)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Projector(Part):
    """Tokens `context_dim` wide -> as many tokens `dim` wide; what there is beside `x` stays.

    Args:
        dim: width of what it gives.
        context_dim: width of what it takes; None: `dim`.
        hidden: width between; None: `dim`.
    """

    def __init__(self, dim: int, context_dim: int | None = None, hidden: int | None = None) -> None:
        super().__init__()
        self.dim, self.context_dim = dim, context_dim or dim
        self.norm = nn.LayerNorm(self.context_dim)
        self.fc1 = nn.Linear(self.context_dim, hidden or dim)
        self.fc2 = nn.Linear(hidden or dim, dim)
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens) -> Tokens:
        """(B, N, context_dim) -> (B, N, dim)."""
        if tokens.dim != self.context_dim:
            raise ValueError(
                f"tokens are {tokens.dim} wide and this Projector takes {self.context_dim}: give it "
                f"context_dim={tokens.dim}"
            )
        x = tokens.x.masked_fill(~tokens.valid[..., None], 0)
        return tokens.replace(x=self.fc2(F.gelu(self.fc1(self.norm(x)))))
