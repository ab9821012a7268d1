"""From the tokens of a sample to one vector: plain ways by name, and attention pooling.

Shapes: B samples, N tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worldtokens.backbone.attention import plan_cross
from worldtokens.backbone.block import CrossAttention, FeedForward
from worldtokens.backbone.config import TransformerConfig, make_norm
from worldtokens.layout import Layout
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

POOLS = ("mean", "first", "last", "patches")


class AttentionPool(Part):
    """One learned query reads a sample's tokens; a feed-forward follows. The head of SigLIP (Zhai et al. 2023), whose
    numbers timm's `AttentionPoolLatent` gives.

    Args:
        dim: width D.
        heads: attention heads; divides `dim`.
        hidden: width inside the feed-forward. None: 4 dim.
        norm, eps, activation: as in `TransformerConfig`.
        skip: leading tokens of each sample that are not read, such as a class token.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        hidden: int | None = None,
        norm: str = "layer",
        eps: float = 1e-5,
        activation: str = "gelu",
        skip: int = 0,
    ) -> None:
        super().__init__()
        cfg = TransformerConfig(dim, 1, heads, hidden=hidden, norm=norm, eps=eps, activation=activation)
        self.dim, self.skip = dim, skip
        self.latent = nn.Parameter(torch.empty(1, dim))
        self.read, self.norm, self.mlp = CrossAttention(cfg), make_norm(cfg), FeedForward(cfg)
        nn.init.normal_(self.latent, std=dim**-0.5)
        for layer in (self.read.q, self.read.kv, self.read.proj, self.mlp.fc1, self.mlp.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens) -> Tensor:
        """(B, N, D) -> (B, D), packed rows one vector a sample; a sample with nothing valid gives zeros."""
        tokens = behind(tokens, self.skip)
        if not tokens.shape[1]:
            return tokens.x.new_zeros(len(tokens), self.dim)
        b = tokens.shape[0]
        query = Tokens(
            x=self.latent.expand(b, 1, self.dim),
            segment=tokens.segment[:, :1],
            layout=Layout((), "bidirectional", open="whole")
            if torch.compiler.is_exporting()
            else Layout.simple([1] * b, "bidirectional"),
        )
        context = tokens.x.masked_fill(~tokens.valid[..., None], 0)
        x = self.read(query.x, context, plan_cross(query, tokens))
        x = x + self.mlp(self.norm(x))
        return x[:, 0].masked_fill(~tokens.valid.any(1, keepdim=True), 0)


def behind(tokens: Tokens, count: int) -> Tokens:
    """One sample a row, without the first `count` tokens of each. Tokens without a layout are looked into once."""
    if tokens.layout is None:
        tokens = tokens.infer_layout()
    if tokens.layout is not None and not tokens.layout.single:
        tokens = tokens.unpack()
    if not count:
        return tokens
    fields = {k: v if v is None else v[:, count:] for k, v in tokens.fields().items()}
    layout = tokens.layout
    if layout is not None and layout.rows >= 0:  # an open layout stays what it is
        left = [max(0, sum(row) - count) for row in layout.lengths]
        layout = Layout.simple(left, layout.order)
    return Tokens(**fields, layout=layout)


def usual_pool(tokenizer: nn.Module) -> str:
    """How a front-end's tokens are pooled where nobody says: the last token where reading is causal, the class token
    where there is one, else the mean, without registers."""
    if getattr(tokenizer, "causal", False):
        return "last"
    first = getattr(tokenizer, "class_token", None)
    if first is not None and first is not False:
        return "first"
    return "patches" if getattr(tokenizer, "prefix", 0) else "mean"


def pool_tokens(tokens: Tokens, how: str | AttentionPool, prefix: int = 0) -> Tensor:
    """(B, N, D) -> (B, D).

    Args:
        tokens: what a trunk gives.
        how: ``"mean"``, ``"first"``, ``"last"``; ``"patches"``, the mean of what stands behind the first `prefix`
            tokens; ``"prefix"``, those put one after another, (B, prefix * D); or an `AttentionPool`.
        prefix: class token and registers of a sample.
    """
    if isinstance(how, nn.Module):
        return how(tokens)
    if how == "prefix":
        return behind(tokens, 0).x[:, :prefix].flatten(1)
    if how == "patches":
        return behind(tokens, prefix).pool("mean")
    return tokens.pool(how)
