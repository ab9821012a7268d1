"""Many tokens -> few: a fixed number of learned latents reads a sample's tokens (Perceiver, Jaegle et al. 2021).

Each layer is a cross-attention from the latents to the tokens followed by an ordinary block among the latents. Both read
by the one rule: a latent sees the valid tokens of its own segment, so packed rows give latents for each sample.

Shapes: B rows, N tokens, L latents of a sample, M latents of a row, D width, H heads, E = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worldtokens.backbone.attention import Reading, plan
from worldtokens.backbone.block import Block, CrossAttention
from worldtokens.backbone.config import TransformerConfig, make_norm
from worldtokens.layout import Layout, modality_id
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Read(CrossAttention):
    """Cross-attention with a norm for each side."""

    def __init__(self, cfg: TransformerConfig, context_dim: int) -> None:
        super().__init__(cfg, context_dim)
        self.norm, self.context_norm = make_norm(cfg), make_norm(cfg, context_dim)

    def forward(self, x: Tensor, context: Tensor, reading: Reading) -> Tensor:
        """(B, M, D) reads (B, N, context_dim) -> (B, M, D)."""
        return super().forward(self.norm(x), self.context_norm(context), reading)


class Resampler(Part):
    """Turns each sample's tokens, however many, into `latents` tokens.

    The order of the tokens does not matter to it beyond what their `x` tells. Padding may hold anything. A sample with
    no valid token gives zeros that are not valid.

    Args:
        dim: width D of the latents.
        latents: tokens L that each sample becomes.
        depth: layers.
        heads: attention heads; divides `dim`.
        context_dim: width of the tokens that are read; None: `dim`.

    Raises:
        ValueError: arguments do not fit together, or the tokens have another width.
    """

    def __init__(
        self, dim: int, latents: int = 64, depth: int = 2, heads: int = 8, context_dim: int | None = None
    ) -> None:
        super().__init__()
        if latents < 1 or depth < 1:
            raise ValueError(f"latents={latents} and depth={depth}, expected 1 or more of each")
        cfg = TransformerConfig(dim, depth, heads)
        self.dim, self.context_dim = dim, context_dim or dim
        self.latents = nn.Parameter(torch.empty(latents, dim))
        self.reads = nn.ModuleList(Read(cfg, self.context_dim) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(cfg, 0.0) for _ in range(depth))
        self.norm = make_norm(cfg)
        self.init_weights()

    def init_weights(self) -> None:
        """Latents: deviation 0.02, as in Perceiver; linear maps: variance 1 / inputs, those that write to the residual
        path 1 / (3 depth) of it; biases 0."""
        nn.init.trunc_normal_(self.latents, std=0.02, a=-2, b=2)
        for module in (*self.reads.modules(), *self.blocks.modules()):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for read, block in zip(self.reads, self.blocks, strict=True):
                for writes in (read.proj, block.attn.proj, block.mlp.fc2):
                    writes.weight.mul_((3 * len(self.blocks)) ** -0.5)

    def forward(self, tokens: Tokens) -> Tokens:
        """Read every sample of every row.

        Args:
            tokens: (B, N, context_dim), padded or packed. Without a layout the device is asked once which samples
                the rows hold.

        Returns:
            (B, M, D): L latents for each sample of a row, in the order of its samples and under their segment
            numbers, padded behind; M is L times the most samples of a row. Modality ``"latents"``, t counts from 0 in
            each sample, all read together.
        """
        if tokens.dim != self.context_dim:
            raise ValueError(
                f"tokens are {tokens.dim} wide and this Resampler reads {self.context_dim}: give it "
                f"context_dim={tokens.dim}"
            )
        out = self._queries(tokens)
        if not tokens.shape[1]:
            return out.replace(x=torch.zeros_like(out.x))
        reading = plan(out, context=tokens)
        context = tokens.x
        if not (tokens.layout is not None and tokens.layout.full(tokens.shape[1])):
            context = context.masked_fill(~tokens.valid[..., None], 0)
        x, context = reading.enter(out.x), reading.cross.enter(context)
        for read, block in zip(self.reads, self.blocks, strict=True):
            x = block(x + read(x, context, reading.cross), reading, None)
        return out.replace(x=reading.leave(self.norm(x)).masked_fill(~out.valid[..., None], 0))

    def _queries(self, tokens: Tokens) -> Tokens:
        """The latents as Tokens, before they have read anything."""
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
    """How many samples each row holds, and their segment numbers, (B, most) int32 (0 where there is none)."""
    device = tokens.device
    if tokens.layout is None:  # looks at the device
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
