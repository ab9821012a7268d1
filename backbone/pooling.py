"""Pooling of a sample's tokens to one vector: by name, or by attention.

Shapes: B samples, N tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.attention import plan_cross_attention
from worldtokens.backbone.block import CrossAttention, FeedForward
from worldtokens.backbone.config import BlockConfig, make_norm
from worldtokens.layout import Layout
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

POOLS = ("mean", "first", "last", "patches")


class AttentionPool(Part):
    """One learned query attends to a sample's tokens, followed by an MLP: the head of SigLIP (Zhai et al. 2023), with the
    numbers of timm's `AttentionPoolLatent`.

    Args:
        dim: width D.
        heads: attention heads; divides `dim`.
        mlp_dim: hidden width of the MLP. None: 4 dim.
        norm, activation: as in `Transformer`.
        eps: epsilon of the norm.
        skip: leading tokens of each sample to ignore, such as a class token.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        mlp_dim: int | None = None,
        norm: str = "layer",
        eps: float = 1e-5,
        activation: str = "gelu",
        skip: int = 0,
    ) -> None:
        super().__init__()
        cfg = BlockConfig(
            dim=dim, depth=1, heads=heads, mlp_dim=mlp_dim, norm=norm, eps=eps, activation=activation
        )
        self.dim, self.skip = dim, skip
        self.query = nn.Parameter(torch.empty(1, dim))
        self.attn, self.norm, self.mlp = CrossAttention(cfg), make_norm(cfg), FeedForward(cfg)
        nn.init.normal_(self.query, std=dim**-0.5)
        for layer in (self.attn.q, self.attn.kv, self.attn.proj, self.mlp.fc1, self.mlp.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens) -> Tensor:
        """(B, N, D) -> (B, D), one vector per sample of packed rows; a sample without valid tokens gives zeros."""
        tokens = drop_prefix(tokens, self.skip)
        if not tokens.shape[1]:
            return tokens.x.new_zeros(len(tokens), self.dim)
        b = tokens.shape[0]
        query = Tokens(
            x=self.query.expand(b, 1, self.dim),
            segment=tokens.segment[:, :1],
            layout=Layout((), "bidirectional", dynamic="full")
            if torch.compiler.is_exporting()
            else Layout.simple([1] * b, "bidirectional"),
        )
        context = tokens.x.masked_fill(~tokens.valid[..., None], 0)
        x = self.attn(query.x, context, plan_cross_attention(query, tokens))
        x = x + self.mlp(self.norm(x))
        return x[:, 0].masked_fill(~tokens.valid.any(1, keepdim=True), 0)


def drop_prefix(tokens: Tokens, count: int) -> Tokens:
    """One sample per row, without the first `count` tokens of each. Tokens without a layout are inspected once."""
    if tokens.layout is None:
        tokens = tokens.infer_layout()
    if tokens.layout is not None and not tokens.layout.single:
        tokens = tokens.unpack()
    if not count:
        return tokens
    fields: dict[str, Any] = {k: v if v is None else v[:, count:] for k, v in tokens.fields().items()}
    layout = tokens.layout
    if layout is not None and layout.rows >= 0:  # a dynamic layout stays as it is
        left = [max(0, sum(row) - count) for row in layout.lengths]
        layout = Layout.simple(left, layout.order)
    return Tokens(**fields, layout=layout)


def default_pool(tokenizer: nn.Module) -> str:
    """Default pooling for a front-end: the last token if causal, the class token if it has one, otherwise the mean
    without registers."""
    if getattr(tokenizer, "causal", False):
        return "last"
    first = getattr(tokenizer, "class_token", None)
    if first is not None and first is not False:
        return "first"
    return "patches" if getattr(tokenizer, "prefix", 0) else "mean"


def pool_tokens(tokens: Tokens, how: str | AttentionPool, prefix: int = 0) -> Tensor:
    """(B, N, D) -> (B, D).

    Args:
        tokens: output of a trunk.
        how: ``"mean"``, ``"first"``, ``"last"``; ``"patches"``, the mean without the first `prefix` tokens;
            ``"prefix"``, those concatenated, (B, prefix * D); or an `AttentionPool`.
        prefix: number of class tokens and registers of a sample.
    """
    if isinstance(how, nn.Module):
        return how(tokens)
    if how == "prefix":
        return drop_prefix(tokens, 0).x[:, :prefix].flatten(1)
    if how == "patches":
        return drop_prefix(tokens, prefix).pool("mean")
    return tokens.pool(how)
