"""What a Transformer is made of: its settings, and the norms and activations that they name."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.positions import checked_scaling

SIZES = {
    # name: (dim, depth, heads), as ViT-Ti / S / B
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What a Transformer is made of.

    Args:
        dim: width D of a token.
        depth: number of blocks.
        heads: attention heads; divides `dim`.
        kv_heads: heads of keys and values (grouped-query attention); divides `heads`. None: as many.
        hidden: width inside the feed-forward. None: 4 dim, or 8/3 dim (rounded up to 8) with SwiGLU.
        norm: ``"layer"`` or ``"rms"``.
        eps: of the norms.
        pre_norm: norm before each half of a block (with one at the end) or after it.
        activation: ``"gelu"``, ``"gelu_tanh"`` (its tanh approximation), ``"quick_gelu"`` (x sigmoid(1.702 x)) or
            ``"swiglu"``.
        bias: linear layers have biases.
        qk_norm: normalise queries and keys per head.
        rope: axes that rotary positions turn by: 0 none, 1 (t), 2 (y, x), 3 (t, y, x).
        rope_theta: base of the rotary wavelengths.
        layer_scale: start value of a learned gain on each half's output, or None.
        drop_path: chance of leaving out a half for a sample in training, rising linearly with depth to this.
        window: a token reads only those less than this far behind it in t, or None.
        first_norm: a norm before the first block, as in CLIP and BERT.
        final_norm: a norm after the last block. None: as `pre_norm` says.
        mlp_norm: a norm inside the feed-forward, before its second map, as in EVA-02.
        modulated: a condition of width `dim` shifts, scales and gates every half (adaLN-zero, see `modulation`).
        checkpoint: recompute blocks in the backward pass to save memory.
        cross: each block also reads a context, between its two halves.
        context_dim: width of the context's tokens. None: `dim`.
        qkv_bias: the map to queries, keys and values has a bias. None: as `bias` says; Qwen2 has this one alone.
        head_width: width E of a head; heads x head_width need not be `dim` (Qwen3). None: dim / heads.
        rope_scaling: ``(factor, low, high, original)``: waves longer than original / low positions are stretched by
            `factor`, those shorter than original / high are not, between them gradually, as Llama 3.1 reads 128k tokens
            after `original` = 8,192 in training. None: as they are.
    """

    dim: int
    depth: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    norm: str = "layer"
    eps: float = 1e-5
    pre_norm: bool = True
    activation: str = "gelu"
    bias: bool = True
    qk_norm: bool = False
    rope: int = 0
    rope_theta: float = 10000.0
    layer_scale: float | None = None
    drop_path: float = 0.0
    window: float | None = None
    final_norm: bool | None = None
    checkpoint: bool = False
    cross: bool = False
    context_dim: int | None = None
    first_norm: bool = False
    mlp_norm: bool = False
    qkv_bias: bool | None = None
    head_width: int | None = None
    rope_scaling: tuple[float, float, float, float] | None = None
    modulated: bool = False

    def __post_init__(self) -> None:
        kv = self.kv_heads or self.heads
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", checked_scaling(self.rope_scaling))
        if (self.head_width is None and self.dim % self.heads) or self.heads % kv:
            raise ValueError(f"heads={self.heads} must divide dim={self.dim}, and kv_heads={kv} divide heads")
        for name, allowed in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected one of {sorted(allowed)}")
        if self.rope not in (0, 1, 2, 3):
            raise ValueError(f"rope={self.rope}, expected 0 (none), 1 (t), 2 (y, x) or 3 (t, y, x)")
        if self.rope and self.head_dim % 2:
            raise ValueError(f"rope turns pairs of channels: a head of {self.head_dim} is odd")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path={self.drop_path}, expected 0 <= drop_path < 1")
        if self.context_dim is not None and not self.cross:
            raise ValueError(f"context_dim={self.context_dim} without a context: give cross=True too")
        if self.modulated and not self.pre_norm:
            raise ValueError(
                "modulated=True changes what the norms before each half give: it needs pre_norm=True"
            )

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward."""
        if self.hidden is not None:
            return self.hidden
        return -(-self.dim * 8 // 3 // 8) * 8 if self.activation == "swiglu" else 4 * self.dim


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula, which many JAX models were trained with."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """The approximation that the first CLIP models were trained with."""
    return x * torch.sigmoid(1.702 * x)


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "swiglu": None}


def make_norm(cfg: TransformerConfig, dim: int | None = None, affine: bool = True) -> nn.Module:
    return NORMS[cfg.norm](dim or cfg.dim, eps=cfg.eps, elementwise_affine=affine)
