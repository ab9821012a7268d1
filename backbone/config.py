"""Settings of a Transformer, and the norms and activations that they name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.positions import check_scaling
from worldtokens.parts import settings

SIZES = {
    # name: (dim, depth, heads), as ViT-Ti / S / B
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Less common settings of a Transformer, most of them there to match published models.

    Args:
        mlp_dim: hidden width of the MLP. None: 4 dim, or 8/3 dim (rounded up to a multiple of 8) with SwiGLU.
        eps: epsilon of the norms.
        pre_norm: True: norm before each sub-layer and after the last block. False: norm after each residual sum.
        final_norm: norm after the last block. None: as `pre_norm`.
        first_norm: norm before the first block, as in CLIP and BERT.
        mlp_norm: norm inside the MLP, before its second linear layer, as in EVA-02.
        bias: linear layers have biases.
        qkv_bias: the query, key and value projections have biases. None: as `bias`; Qwen2 has biases there alone.
        head_dim: width E of a head; heads x head_dim may differ from dim (Qwen3). None: dim / heads.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: ``(factor, low, high, original)`` of Llama 3.1: wavelengths longer than original / low positions are
            multiplied by `factor`, those shorter than original / high are unchanged, those between are interpolated.
            `original` is the context length in training. None: no scaling.
        layer_scale: initial value of LayerScale on each sub-layer's output. None: no LayerScale.
        gradient_checkpointing: recompute blocks in the backward pass to save memory.
    """

    mlp_dim: int | None = None
    eps: float = 1e-5
    pre_norm: bool = True
    final_norm: bool | None = None
    first_norm: bool = False
    mlp_norm: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    layer_scale: float | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", check_scaling(self.rope_scaling))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(TransformerConfig):
    """All settings of a Transformer with the defaults filled in, as its blocks use them (``trunk.cfg``).

    Args:
        dim, depth, heads, ...: as in `Transformer`.

    Raises:
        ValueError: settings do not fit together.
    """

    dim: int
    depth: int
    heads: int
    rope: int = 0
    norm: str = "layer"
    activation: str = "gelu"
    qk_norm: bool = False
    kv_heads: int | None = None
    cross: bool = False
    context_dim: int | None = None
    adaln: bool = False
    drop_path: float = 0.0
    window: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kv = self.kv_heads or self.heads
        if (self.head_dim is None and self.dim % self.heads) or self.heads % kv:
            raise ValueError(f"heads={self.heads} must divide dim={self.dim}, and kv_heads={kv} divide heads")
        for name, allowed in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected one of {sorted(allowed)}")
        if self.context_dim is not None and not self.cross:
            raise ValueError(f"context_dim={self.context_dim} without cross-attention: set cross=True")
        inner = -(-self.dim * 8 // 3 // 8) * 8 if self.activation == "swiglu" else 4 * self.dim
        for name, default in (
            ("kv_heads", kv),
            ("head_dim", self.dim // self.heads),
            ("mlp_dim", inner),
            ("context_dim", self.dim),
            ("final_norm", self.pre_norm),
            ("qkv_bias", self.bias),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.rope not in (0, 1, 2, 3):
            raise ValueError(f"rope={self.rope}, expected 0 (none), 1 (t), 2 (y, x) or 3 (t, y, x)")
        if self.rope and self.head_dim % 2:
            raise ValueError(f"rope rotates pairs of channels, and head_dim={self.head_dim} is odd")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path={self.drop_path}, expected 0 <= drop_path < 1")
        if self.adaln and not self.pre_norm:
            raise ValueError("adaln=True modulates the norm before each sub-layer: it needs pre_norm=True")

    @classmethod
    def resolve(cls, config: TransformerConfig | dict[str, Any] | None, **main: Any) -> BlockConfig:
        """Join the arguments of `Transformer` (`main`) with its `config`.

        Raises:
            ValueError: unknown keys, or settings that do not fit together.
        """
        rest = settings(TransformerConfig, config, "config")
        return cls(**{f.name: getattr(rest, f.name) for f in dataclasses.fields(TransformerConfig)}, **main)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, common in JAX models."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """GELU approximation of OpenAI's CLIP models: x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "swiglu": None}


def make_norm(cfg: BlockConfig, dim: int | None = None, affine: bool = True) -> nn.Module:
    return NORMS[cfg.norm](dim or cfg.dim, eps=cfg.eps, elementwise_affine=affine)
