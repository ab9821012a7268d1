"""The Transformer block: self-attention, optional cross-attention, MLP.

Shapes: B rows, N tokens, D width, H heads, E channels per head, K context tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.adaln import AdaLN, Condition, gate, modulate
from worldtokens.backbone.attention import AttentionPlan, attend
from worldtokens.backbone.cache import LayerCache
from worldtokens.backbone.config import ACTIVATIONS, BlockConfig, make_norm
from worldtokens.backbone.positions import apply_rope


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, cfg: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads, cfg.head_dim
        self.qkv = nn.Linear(cfg.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=cfg.qkv_bias)
        self.proj = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=cfg.bias)
        self.q_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()

    def queries_keys_values(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, D) -> queries (B, N, H, E), keys and values (B, N, Hkv, E), normalised and rotated."""
        h, kv = self.heads, self.kv_heads
        # unflatten, not einops, whose overhead is 9 % of a decoding step of a small model on a CPU
        qkv = self.qkv(x).unflatten(-1, (h + 2 * kv, self.head_dim))  # (B, N, H + 2 Hkv, E)
        q, k, v = qkv.split((h, kv, kv), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan,
        rope: tuple[Tensor, Tensor] | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        q, k, v = self.queries_keys_values(x, rope)
        if cache is not None:
            cached = cache.k.append(plan.pad(k)), cache.v.append(plan.pad(v))
            k, v = cached if plan.cached else (k, v)
        return self.proj(attend(q, k, v, plan).flatten(2))  # (B, N, D)


class CrossAttention(nn.Module):
    """Multi-head attention from one sequence to another; queries without a visible key get zeros."""

    def __init__(self, cfg: BlockConfig, context_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads, cfg.head_dim
        self.q = nn.Linear(cfg.dim, self.heads * self.head_dim, bias=cfg.qkv_bias)
        width = context_dim or cfg.context_dim
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias=cfg.qkv_bias)
        self.proj = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=cfg.bias)
        self.q_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()

    def queries(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, H, E)."""
        return self.q_norm(self.q(x).unflatten(-1, (self.heads, self.head_dim)))

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, context_dim) -> keys and values, (B, K, Hkv, E) each."""
        k, v = self.kv(context).unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, 2)
        return self.k_norm(k), v

    def forward(
        self, x: Tensor, context: Tensor | None, plan: AttentionPlan, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, N, D) attends to (B, K, context_dim) -> (B, N, D)."""
        if cache is not None and cache.context is not None:
            k, v = cache.context
        else:
            k, v = self.keys_values(context)
            if cache is not None:
                cache.context = plan.pad(k), plan.pad(v)
        if not k.shape[1]:
            return torch.zeros_like(x)
        out = self.proj(attend(self.queries(x), k, v, plan).flatten(2))
        return out if plan.no_keys is None else out.masked_fill(plan.no_keys, 0)


class FeedForward(nn.Module):
    """MLP: two linear layers with an activation between; with SwiGLU (Shazeer 2020) the first also makes a gate."""

    def __init__(self, cfg: BlockConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[cfg.activation]
        self.fc1 = nn.Linear(cfg.dim, cfg.mlp_dim * (2 if self.act is None else 1), bias=cfg.bias)
        self.norm = make_norm(cfg, cfg.mlp_dim) if cfg.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(cfg.mlp_dim, cfg.dim, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.act is None:
            gate, up = x.chunk(2, -1)
            return self.fc2(self.norm(F.silu(gate) * up))
        if self.act is F.gelu and not torch.is_grad_enabled():
            return self.fc2(self.norm(torch.ops.aten.gelu_(x)))  # no new memory: 4 % of a ViT's time on a CPU
        return self.fc2(self.norm(self.act(x)))


class LayerScale(nn.Module):
    """A learned gain per channel (CaiT, Touvron et al. 2021)."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def make_scale(cfg: BlockConfig) -> nn.Module:
    return nn.Identity() if cfg.layer_scale is None else LayerScale(cfg.dim, cfg.layer_scale)


class Block(nn.Module):
    """Self-attention, optional cross-attention and MLP, each with a residual connection."""

    def __init__(self, cfg: BlockConfig, drop_path: float) -> None:
        super().__init__()
        self.pre_norm, self.drop_path = cfg.pre_norm, drop_path
        affine = not cfg.adaln
        self.norm1, self.attn, self.scale1 = make_norm(cfg, affine=affine), Attention(cfg), make_scale(cfg)
        self.norm_cross = self.cross = self.scale_cross = None
        if cfg.cross:
            self.norm_cross = make_norm(cfg, affine=affine)
            self.cross, self.scale_cross = CrossAttention(cfg), make_scale(cfg)
        self.norm2, self.mlp, self.scale2 = make_norm(cfg, affine=affine), FeedForward(cfg), make_scale(cfg)
        self.adaln = AdaLN(cfg.dim, 3 if cfg.cross else 2) if cfg.adaln else None

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan,
        rope: tuple[Tensor, Tensor] | None,
        context: Tensor | None = None,
        cache: LayerCache | None = None,
        condition: Condition | None = None,
    ) -> Tensor:
        """(B, N, D), or (1, T, D) as unpadded by `plan`, -> the same.

        Args:
            plan: how the tokens attend to each other, and under `cross` to the context.
            rope: cosine and sine of the rotary angles.
            context: (B, K, context_dim); None where `cache` holds its keys and values.
            cache: keys and values of this layer.
            condition: conditioning of the sub-layers, with ``adaln``.
        """
        if self.pre_norm:
            self_mod, *cross_mod, mlp_mod = [None] * 3 if self.adaln is None else self.adaln(condition)
            y = self.attn(modulate(self.norm1(x), self_mod), plan, rope, cache)
            x = x + self._drop(gate(self.scale1(y), self_mod), plan)
            if self.cross is not None:
                (cross_mod,) = cross_mod
                y = self.cross(modulate(self.norm_cross(x), cross_mod), context, plan.cross, cache)
                x = x + self._drop(gate(self.scale_cross(y), cross_mod), plan)
            y = self.mlp(modulate(self.norm2(x), mlp_mod))
            y = self._drop(gate(self.scale2(y), mlp_mod), plan)
            # in place: x was allocated by the sum above, so no caller holds it
            return x + y if torch.is_grad_enabled() else x.add_(y)
        x = self.norm1(x + self._drop(self.scale1(self.attn(x, plan, rope, cache)), plan))
        if self.cross is not None:
            y = self.cross(x, context, plan.cross, cache)
            x = self.norm_cross(x + self._drop(self.scale_cross(y), plan))
        return self.norm2(x + self._drop(self.scale2(self.mlp(x)), plan))

    def _drop(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """Stochastic depth (Huang et al. 2016): whole samples skip this sub-layer, the others are scaled up."""
        if not self.drop_path or not self.training:
            return x
        keep = 1.0 - self.drop_path
        if plan.mode != "groups":
            return x * (x.new_empty(x.shape[0], 1, 1).bernoulli_(keep) / keep)
        counts = [count for count, _ in plan.groups]
        factors = (x.new_empty(sum(counts)).bernoulli_(keep) / keep).split(counts)
        per_token = [f.repeat_interleave(n) for f, (_, n) in zip(factors, plan.groups, strict=True)]
        return x * plan.add_rows(torch.cat(per_token)[:, None])[None]
