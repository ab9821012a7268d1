"""One block, written once: self-attention, cross-attention where there is a context, feed-forward.

Shapes: B rows, N tokens, D width, H heads, E = D / H, K tokens of a context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.attention import Reading, attend
from worldtokens.backbone.cache import LayerCache
from worldtokens.backbone.config import ACTIVATIONS, TransformerConfig, make_norm
from worldtokens.backbone.modulation import Condition, Modulation, gated, modulated
from worldtokens.backbone.positions import rotate


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads or cfg.heads, cfg.head_dim
        bias = cfg.bias if cfg.qkv_bias is None else cfg.qkv_bias
        self.qkv = nn.Linear(cfg.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.proj = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=cfg.bias)
        self.q_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()

    def queries_keys(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, D) -> (B, N, H, E) and twice (B, N, Hkv, E): queries and keys as they are compared, and values."""
        h, kv = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (h + 2 * kv, self.head_dim))  # (B, N, H + 2 Hkv, E)
        q, k, v = qkv.split((h, kv, kv), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        reading: Reading,
        rope: tuple[Tensor, Tensor] | None,
        layer: LayerCache | None = None,
    ) -> Tensor:
        q, k, v = self.queries_keys(x, rope)
        if layer is not None:
            held = layer.k.append(reading.leave(k)), layer.v.append(reading.leave(v))
            k, v = held if reading.past else (k, v)
        return self.proj(attend(q, k, v, reading).flatten(2))  # (B, N, D)


class CrossAttention(nn.Module):
    """Multi-head attention from one sequence to another; what has nothing to read gets zeros."""

    def __init__(self, cfg: TransformerConfig, context_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads or cfg.heads, cfg.head_dim
        bias = cfg.bias if cfg.qkv_bias is None else cfg.qkv_bias
        self.q = nn.Linear(cfg.dim, self.heads * self.head_dim, bias=bias)
        width = context_dim or cfg.context_dim or cfg.dim
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias=bias)
        self.proj = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=cfg.bias)
        self.q_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()

    def queries(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, H, E)."""
        return self.q_norm(self.q(x).unflatten(-1, (self.heads, self.head_dim)))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, context_dim) -> keys and values, (B, K, Hkv, E) each."""
        k, v = self.kv(context).unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, 2)
        return self.k_norm(k), v

    def forward(
        self, x: Tensor, context: Tensor | None, reading: Reading, layer: LayerCache | None = None
    ) -> Tensor:
        """(B, N, D) reads (B, K, context_dim) -> (B, N, D)."""
        if layer is not None and layer.context is not None:
            k, v = layer.context
        else:
            k, v = self.keys(context)
            if layer is not None:
                layer.context = reading.leave(k), reading.leave(v)
        if not k.shape[1]:
            return torch.zeros_like(x)
        out = self.proj(attend(self.queries(x), k, v, reading).flatten(2))
        return out if reading.blind is None else out.masked_fill(reading.blind, 0)


class FeedForward(nn.Module):
    """Two linear layers around an activation; with SwiGLU (Shazeer 2020) the first makes a gate too."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[cfg.activation]
        self.fc1 = nn.Linear(cfg.dim, cfg.inner * (2 if self.act is None else 1), bias=cfg.bias)
        self.norm = make_norm(cfg, cfg.inner) if cfg.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(cfg.inner, cfg.dim, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.act is None:
            gate, up = x.chunk(2, -1)
            return self.fc2(self.norm(F.silu(gate) * up))
        if self.act is F.gelu and not torch.is_grad_enabled():
            return self.fc2(self.norm(torch.ops.aten.gelu_(x)))  # no new memory: 4 % of a ViT's time on a CPU
        return self.fc2(self.norm(self.act(x)))


class LayerScale(nn.Module):
    """A learned gain on every channel (CaiT, Touvron et al. 2021)."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def make_scale(cfg: TransformerConfig) -> nn.Module:
    return nn.Identity() if cfg.layer_scale is None else LayerScale(cfg.dim, cfg.layer_scale)


class Block(nn.Module):
    """Self-attention, cross-attention where there is a context, feed-forward; each with a residual path."""

    def __init__(self, cfg: TransformerConfig, drop_path: float) -> None:
        super().__init__()
        self.pre_norm, self.drop_path = cfg.pre_norm, drop_path
        affine = not cfg.modulated
        self.norm1, self.attn, self.scale1 = make_norm(cfg, affine=affine), Attention(cfg), make_scale(cfg)
        self.norm_cross = self.cross = self.scale_cross = None
        if cfg.cross:
            self.norm_cross, self.cross, self.scale_cross = (
                make_norm(cfg, affine=affine),
                CrossAttention(cfg),
                make_scale(cfg),
            )
        self.norm2, self.mlp, self.scale2 = make_norm(cfg, affine=affine), FeedForward(cfg), make_scale(cfg)
        self.modulation = Modulation(cfg.dim, 3 if cfg.cross else 2) if cfg.modulated else None

    def forward(
        self,
        x: Tensor,
        reading: Reading,
        rope: tuple[Tensor, Tensor] | None,
        context: Tensor | None = None,
        layer: LayerCache | None = None,
        condition: Condition | None = None,
    ) -> Tensor:
        """(B, N, D), or (1, T, D) as `reading` enters it, -> the same.

        Args:
            reading: how the tokens read each other, and under `cross` the context.
            rope: cosine and sine of their angles.
            context: (B, K, context_dim); None where `layer` holds its keys and values.
            layer: what this layer remembers.
            condition: what modulates the halves, where the settings say ``modulated``.
        """
        if self.pre_norm:
            own, *between, last = [None] * 3 if self.modulation is None else self.modulation(condition)
            made = self.attn(modulated(self.norm1(x), own), reading, rope, layer)
            x = x + self._drop(gated(self.scale1(made), own), reading)
            if self.cross is not None:
                (mid,) = between
                read = self.cross(modulated(self.norm_cross(x), mid), context, reading.cross, layer)
                x = x + self._drop(gated(self.scale_cross(read), mid), reading)
            made = self.mlp(modulated(self.norm2(x), last))
            made = self._drop(gated(self.scale2(made), last), reading)
            # x is this block's own since the first half was added
            return x + made if torch.is_grad_enabled() else x.add_(made)
        x = self.norm1(x + self._drop(self.scale1(self.attn(x, reading, rope, layer)), reading))
        if self.cross is not None:
            read = self.cross(x, context, reading.cross, layer)
            x = self.norm_cross(x + self._drop(self.scale_cross(read), reading))
        return self.norm2(x + self._drop(self.scale2(self.mlp(x)), reading))

    def _drop(self, x: Tensor, reading: Reading) -> Tensor:
        """Stochastic depth (Huang et al. 2016): whole samples skip this half, the rest is scaled up."""
        if not self.drop_path or not self.training:
            return x
        keep = 1.0 - self.drop_path
        if reading.kind != "groups":
            return x * (x.new_empty(x.shape[0], 1, 1).bernoulli_(keep) / keep)
        samples = sum(count for count, _ in reading.groups)
        chosen = x.new_empty(samples).bernoulli_(keep) / keep
        parts = chosen.split([count for count, _ in reading.groups])
        each = [p.repeat_interleave(n) for p, (_, n) in zip(parts, reading.groups, strict=True)]
        return x * reading.fill(torch.cat(each)[:, None])[None]
