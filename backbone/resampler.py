"""Perceiver resampler: a fixed number of learned latents attends to a sample's tokens (Jaegle et al. 2021).

Each layer is a cross-attention from the latents to the tokens, followed by a Transformer block over the latents. Both
follow the rule of visibility: a latent attends to the valid tokens of its own segment, so packed rows give latents per
sample.

Shapes: B rows, N tokens, L latents per sample, M latents per row, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worldtokens.backbone.attention import AttentionPlan, plan_attention
from worldtokens.backbone.block import Block, CrossAttention
from worldtokens.backbone.config import BlockConfig, make_norm
from worldtokens.layout import Layout, modality_id
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class LatentAttention(CrossAttention):
    """Cross-attention with a norm of queries and of keys."""

    def __init__(self, cfg: BlockConfig, context_dim: int) -> None:
        super().__init__(cfg, context_dim)
        self.norm, self.context_norm = make_norm(cfg), make_norm(cfg, context_dim)

    def forward(self, x: Tensor, context: Tensor, plan: AttentionPlan) -> Tensor:
        """(B, M, D) attends to (B, N, context_dim) -> (B, M, D)."""
        return super().forward(self.norm(x), self.context_norm(context), plan)


class Resampler(Part):
    """Map each sample's tokens, of any number, to `latents` tokens.

    The order of the input tokens matters only through their `x`. Padding may hold anything. A sample without valid tokens
    gives zeros that are not valid.

    Args:
        dim: width D of the latents.
        latents: output tokens L per sample.
        depth: layers.
        heads: attention heads; divides `dim`.
        context_dim: width of the input tokens. None: `dim`.

    Raises:
        ValueError: arguments do not fit together, or the tokens have another width.
    """

    def __init__(
        self, dim: int, latents: int = 64, depth: int = 2, heads: int = 8, context_dim: int | None = None
    ) -> None:
        super().__init__()
        if latents < 1 or depth < 1:
            raise ValueError(f"latents={latents} and depth={depth}, expected 1 or more of each")
        cfg = BlockConfig(dim=dim, depth=depth, heads=heads)
        self.dim, self.context_dim = dim, context_dim or dim
        self.latents = nn.Parameter(torch.empty(latents, dim))
        self.cross_attentions = nn.ModuleList(LatentAttention(cfg, self.context_dim) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(cfg, 0.0) for _ in range(depth))
        self.norm = make_norm(cfg)
        self.init_weights()

    def init_weights(self) -> None:
        """Latents: std 0.02, as in Perceiver; linear layers: variance 1 / input dim, those that write to the residual
        stream 1 / (3 depth) of it; biases 0."""
        nn.init.trunc_normal_(self.latents, std=0.02, a=-2, b=2)
        for module in (*self.cross_attentions.modules(), *self.blocks.modules()):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for cross, block in zip(self.cross_attentions, self.blocks, strict=True):
                for layer in (cross.proj, block.attn.proj, block.mlp.fc2):
                    layer.weight.mul_((3 * len(self.blocks)) ** -0.5)

    def forward(self, tokens: Tokens) -> Tokens:
        """Resample every sample of every row.

        Args:
            tokens: (B, N, context_dim), padded or packed. Without a layout the samples of each row are looked up on the
                device once.

        Returns:
            (B, M, D): L latents per sample of a row, in the order of its samples and with their segment numbers, padded
            on the right; M is L times the largest number of samples in a row. Modality ``"latents"``, t counts from 0 in
            each sample, bidirectional.
        """
        if tokens.dim != self.context_dim:
            raise ValueError(
                f"tokens have dim {tokens.dim} and this Resampler expects {self.context_dim}: build it with "
                f"context_dim={tokens.dim}"
            )
        out = self._queries(tokens)
        if not tokens.shape[1]:
            return out.replace(x=torch.zeros_like(out.x))
        plan = plan_attention(out, context=tokens)
        context = tokens.x
        if not (tokens.layout is not None and tokens.layout.full(tokens.shape[1])):
            context = context.masked_fill(~tokens.valid[..., None], 0)
        x, context = plan.unpad(out.x), plan.cross.unpad(context)
        for cross, block in zip(self.cross_attentions, self.blocks, strict=True):
            x = block(x + cross(x, context, plan.cross), plan, None)
        return out.replace(x=plan.pad(self.norm(x)).masked_fill(~out.valid[..., None], 0))

    def _queries(self, tokens: Tokens) -> Tokens:
        """The learned latents as Tokens, per sample of each row."""
        n, b, device = len(self.latents), len(tokens), tokens.device
        counts, segment = _samples(tokens)
        most = segment.shape[1]
        m = most * n
        pos = torch.zeros(b, m, 3, device=device)
        pos[..., 0] = torch.arange(n, dtype=torch.float32, device=device).repeat(most)
        origin = tokens.layout.origin if tokens.layout is not None else None
        return Tokens(
            x=self.latents.repeat(most, 1).expand(b, m, self.dim),
            valid=torch.arange(m, device=device) < torch.tensor(counts, device=device)[:, None] * n,
            pos=pos,
            segment=segment.repeat_interleave(n, 1),
            modality=torch.full((b, m), modality_id("latents"), dtype=torch.int16, device=device),
            layout=Layout(tuple((n,) * c for c in counts), "bidirectional", origin),
        )


def _samples(tokens: Tokens) -> tuple[list[int], Tensor]:
    """Number of samples per row, and their segment numbers, (B, max samples) int32 (0 where there is none)."""
    device = tokens.device
    if tokens.layout is None:  # waits for the device
        valid, segment = tokens.valid.cpu(), tokens.segment.cpu()
        found = [list(dict.fromkeys(s[v].tolist())) for s, v in zip(segment, valid, strict=True)]
        counts = [len(row) for row in found]
        rows = [row + [0] * (max([1, *counts]) - len(row)) for row in found]
        return counts, torch.tensor(rows, dtype=torch.int32, device=device).view(len(tokens), -1)
    lengths = tokens.layout.lengths
    counts = [len(row) for row in lengths]
    most = max([1, *counts])
    if not tokens.shape[1]:
        return counts, torch.zeros(len(tokens), most, dtype=torch.int32, device=device)
    first = [[sum(row[:i]) for i in range(len(row))] + [0] * (most - len(row)) for row in lengths]
    return counts, tokens.segment.gather(1, torch.tensor(first, device=device).view(len(tokens), most))
