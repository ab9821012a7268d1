"""The shared trunk: Tokens in, Tokens out. One block, written once.

Notable: padding is emptied at the door (`where(valid, x, 0)`), so whatever it held, NaN included, can't reach a
real token by any path; the way of reading is planned once and handed to every layer; all weights are initialised
in `init_weights`.

Shapes: B rows, N tokens, D width, H heads, E = D / H.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from worldtokens.backbone.attention import Reading, attend, plan
from worldtokens.backbone.positions import rope_angles, rotate
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

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
        activation: ``"gelu"``, ``"quick_gelu"`` (x sigmoid(1.702 x)) or ``"swiglu"``.
        bias: linear layers have biases.
        qk_norm: normalise queries and keys per head.
        rope: axes that rotary positions turn by: 0 none, 1 (t), 2 (y, x), 3 (t, y, x).
        rope_theta: base of the rotary wavelengths.
        layer_scale: start value of a learned gain on each half's output, or None.
        drop_path: chance of leaving out a half for a sample in training, rising linearly with depth to this.
        window: a token reads only those less than this far behind it in t, or None.
        final_norm: a norm after the last block. None: as `pre_norm` says.
        checkpoint: recompute blocks in the backward pass to save memory.
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

    def __post_init__(self) -> None:
        kv = self.kv_heads or self.heads
        if self.dim % self.heads or self.heads % kv:
            raise ValueError(f"heads={self.heads} must divide dim={self.dim}, and kv_heads={kv} divide heads")
        for name, allowed in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected one of {sorted(allowed)}")
        if self.rope not in (0, 1, 2, 3):
            raise ValueError(f"rope={self.rope}, expected 0 (none), 1 (t), 2 (y, x) or 3 (t, y, x)")
        if self.rope and (self.dim // self.heads) % 2:
            raise ValueError(f"rope turns pairs of channels: dim / heads = {self.dim // self.heads} is odd")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path={self.drop_path}, expected 0 <= drop_path < 1")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward."""
        if self.hidden is not None:
            return self.hidden
        return -(-self.dim * 8 // 3 // 8) * 8 if self.activation == "swiglu" else 4 * self.dim


def quick_gelu(x: Tensor) -> Tensor:
    """The approximation that the first CLIP models were trained with."""
    return x * torch.sigmoid(1.702 * x)


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"gelu": F.gelu, "quick_gelu": quick_gelu, "swiglu": None}


def make_norm(cfg: TransformerConfig, dim: int | None = None) -> nn.Module:
    return NORMS[cfg.norm](dim or cfg.dim, eps=cfg.eps)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads or cfg.heads, cfg.head_dim
        self.qkv = nn.Linear(cfg.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=cfg.bias)
        self.proj = nn.Linear(cfg.dim, cfg.dim, bias=cfg.bias)
        self.q_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg, self.head_dim) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, reading: Reading, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        h, kv = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (h + 2 * kv, self.head_dim))  # (B, N, H + 2 Hkv, E)
        q, k, v = qkv.split((h, kv, kv), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return self.proj(attend(q, k, v, reading).flatten(2))  # (B, N, D)


class FeedForward(nn.Module):
    """Two linear layers around an activation; with SwiGLU (Shazeer 2020) the first makes a gate too."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[cfg.activation]
        self.fc1 = nn.Linear(cfg.dim, cfg.inner * (2 if self.act is None else 1), bias=cfg.bias)
        self.fc2 = nn.Linear(cfg.inner, cfg.dim, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.act is None:
            gate, up = x.chunk(2, -1)
            return self.fc2(F.silu(gate) * up)
        return self.fc2(self.act(x))


class LayerScale(nn.Module):
    """A learned gain on every channel (CaiT, Touvron et al. 2021)."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Attention, then feed-forward, each with a residual path."""

    def __init__(self, cfg: TransformerConfig, drop_path: float) -> None:
        super().__init__()
        self.pre_norm, self.drop_path = cfg.pre_norm, drop_path
        self.norm1, self.attn = make_norm(cfg), Attention(cfg)
        self.norm2, self.mlp = make_norm(cfg), FeedForward(cfg)
        scaled = cfg.layer_scale is not None
        self.scale1 = LayerScale(cfg.dim, cfg.layer_scale) if scaled else nn.Identity()
        self.scale2 = LayerScale(cfg.dim, cfg.layer_scale) if scaled else nn.Identity()

    def forward(self, x: Tensor, reading: Reading, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.pre_norm:
            x = x + self._drop(self.scale1(self.attn(self.norm1(x), reading, rope)), reading)
            return x + self._drop(self.scale2(self.mlp(self.norm2(x))), reading)
        x = self.norm1(x + self._drop(self.scale1(self.attn(x, reading, rope)), reading))
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
        return x * torch.cat(each)[None, :, None]


class Transformer(Part):
    """A stack of blocks over `Tokens`, whatever made them.

    Arguments are those of `TransformerConfig`. Padding may hold anything and gives zeros; a row with nothing
    valid gives zeros.

    Raises:
        ValueError: arguments don't fit together, or the tokens have another width.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        norm: str = "layer",
        eps: float = 1e-5,
        pre_norm: bool = True,
        activation: str = "gelu",
        bias: bool = True,
        qk_norm: bool = False,
        rope: int = 0,
        rope_theta: float = 10000.0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        window: float | None = None,
        final_norm: bool | None = None,
        checkpoint: bool = False,
    ) -> None:
        given = {k: v for k, v in locals().items() if k in TransformerConfig.__dataclass_fields__}
        super().__init__()
        self.cfg = cfg = TransformerConfig(**given)
        self.dim = dim
        last = max(1, depth - 1)
        self.blocks = nn.ModuleList(Block(cfg, drop_path * i / last) for i in range(depth))
        self.norm = make_norm(cfg) if (pre_norm if final_norm is None else final_norm) else nn.Identity()
        init_weights(self)

    @classmethod
    def size(cls, name: str, **options) -> Transformer:
        """A named size: ``"tiny"`` (192 wide, 12 deep, 3 heads), ``"small"`` (384, 12, 6), ``"base"`` (768, 12, 12).

        Args:
            name: one of the above.
            options: as in the constructor, e.g. ``depth=6`` or ``rope=2``.
        """
        if name not in SIZES:
            raise ValueError(f"size {name!r}, expected one of {sorted(SIZES)}")
        return cls(**(dict(zip(("dim", "depth", "heads"), SIZES[name], strict=True)) | options))

    def forward(self, tokens: Tokens, kind: str | None = None) -> Tokens:
        """Update every token by what it may read.

        Args:
            tokens: (B, N, D).
            kind: force a way of reading (see `backbone/attention.py`); for tests and benchmarks.

        Returns:
            The same tokens with new `x`; zeros at padding.
        """
        if tokens.dim != self.dim:
            raise ValueError(
                f"tokens are {tokens.dim} wide and this Transformer {self.dim}: give the front-end dim={self.dim}"
            )
        b, n, _ = tokens.shape
        if n == 0:
            return tokens
        reading = plan(tokens, self.cfg.window, kind)
        whole = tokens.layout is not None and tokens.layout.full(n)
        x = tokens.x if whole else tokens.x.masked_fill(~tokens.valid[..., None], 0)
        x = reading.enter(x)
        rope = None
        if self.cfg.rope:
            pos = tokens.pos if whole else tokens.pos.masked_fill(~tokens.valid[..., None], 0)
            pos = reading.enter(pos)
            rope = rope_angles(pos, self.cfg.head_dim, self.cfg.rope, self.cfg.rope_theta)
        for block in self.blocks:
            if self.cfg.checkpoint and self.training and torch.is_grad_enabled():
                x = recompute(block, x, reading, rope, use_reentrant=False)
            else:
                x = block(x, reading, rope)
        x = reading.leave(self.norm(x), b, n)
        if not whole and reading.kind != "groups":
            x = x.masked_fill(~tokens.valid[..., None], 0)
        return tokens.replace(x=x)


def init_weights(trunk: Transformer) -> None:
    """The one place where a trunk's weights are set.

    Widths decide the spread, as in the first CLIP models (Radford et al. 2021): query, key and value maps
    get std D^-1/2, the feed-forward's first map (2 D)^-1/2, and the two maps that write to the residual path
    D^-1/2 (2 depth)^-1/2, as in GPT-2, so that the path's variance doesn't grow with depth. Biases are 0, norms' gains
    1; LayerScale keeps its own start.
    """
    d, depth = trunk.cfg.dim, max(1, trunk.cfg.depth)
    into, out = d**-0.5, d**-0.5 * (2 * depth) ** -0.5
    for block in trunk.blocks:
        for layer, std in (
            (block.attn.qkv, into),
            (block.attn.proj, out),
            (block.mlp.fc1, (2 * d) ** -0.5),
            (block.mlp.fc2, out),
        ):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
