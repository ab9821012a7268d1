"""The shared trunk: Tokens in, Tokens out.

Notable: padding is set to zero on entry (`where(valid, x, 0)`), so that its content, NaN included, cannot reach a valid
token; attention is planned once for all layers; all weights are initialised in `init_weights`. An encoder-decoder is two
trunks: ``decoder(text, context=encoder(image))``.

Shapes: B rows, N tokens, D width, K context tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from worldtokens.backbone.adaln import AdaLN, modulate, prepare_condition
from worldtokens.backbone.attention import plan_attention
from worldtokens.backbone.block import Block
from worldtokens.backbone.cache import Cache
from worldtokens.backbone.config import SIZES, BlockConfig, TransformerConfig, make_norm
from worldtokens.backbone.positions import rope_angles
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Transformer(Part):
    """A stack of Transformer blocks over `Tokens` of any modality.

    Padding may hold anything and gives zeros; so does a row without valid tokens. ``torch.compile(trunk, dynamic=True)``
    compiles once for all lengths and row counts (see `backbone/attention.py`). ``trunk.cfg`` holds all settings.

    Args:
        dim: width D of a token.
        depth: number of blocks.
        heads: attention heads; divides `dim`.
        rope: axes of rotary positions: 0 none, 1 (t), 2 (y, x), 3 (t, y, x).
        norm: ``"layer"`` or ``"rms"``.
        activation: ``"gelu"``, ``"gelu_tanh"`` (its tanh approximation), ``"quick_gelu"`` (x sigmoid(1.702 x)) or
            ``"swiglu"``.
        qk_norm: normalise queries and keys per head.
        kv_heads: heads of keys and values (grouped-query attention); divides `heads`. None: `heads`.
        cross: each block has cross-attention to a context, between self-attention and MLP.
        context_dim: width of the context's tokens. None: `dim`.
        adaln: a condition of width `dim` shifts, scales and gates every sub-layer (adaLN-zero, see `adaln`).
        drop_path: probability that a sample skips a sub-layer in training (stochastic depth), rising linearly with depth
            to this value.
        window: a token attends only to tokens less than this before it in t (sliding window). None: no limit.
        config: less common settings, see `TransformerConfig`; a dict of its fields, e.g. ``{"pre_norm": False}``.

    Raises:
        ValueError: arguments do not fit together, or the tokens have another width.
    """

    settings_types = {"config": TransformerConfig}

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        rope: int = 0,
        norm: str = "layer",
        activation: str = "gelu",
        qk_norm: bool = False,
        kv_heads: int | None = None,
        cross: bool = False,
        context_dim: int | None = None,
        adaln: bool = False,
        drop_path: float = 0.0,
        window: float | None = None,
        config: TransformerConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.cfg = cfg = BlockConfig.resolve(
            config, dim=dim, depth=depth, heads=heads, rope=rope, norm=norm, activation=activation,
            qk_norm=qk_norm, kv_heads=kv_heads, cross=cross, context_dim=context_dim, adaln=adaln,
            drop_path=drop_path, window=window,
        )  # fmt: skip
        self.dim = dim
        self.first_norm = make_norm(cfg) if cfg.first_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(cfg, drop_path * i / max(1, depth - 1)) for i in range(depth))
        self.norm = make_norm(cfg, affine=not adaln) if cfg.final_norm else nn.Identity()
        self.adaln = AdaLN(dim, 1, gated=False) if adaln and cfg.final_norm else None
        init_weights(self)

    @classmethod
    def size(cls, name: str, **options: Any) -> Transformer:
        """A named size: ``"tiny"`` (dim 192, depth 12, 3 heads), ``"small"`` (384, 12, 6), ``"base"`` (768, 12, 12).

        Args:
            name: one of the above.
            options: as in the constructor, e.g. ``depth=6`` or ``rope=2``.
        """
        if name not in SIZES:
            raise ValueError(f"size {name!r}, expected one of {sorted(SIZES)}")
        return cls(**(dict(zip(("dim", "depth", "heads"), SIZES[name], strict=True)) | options))

    def cache(self, batch: int, max_len: int | None = None) -> Cache:
        """An empty KV cache for stepwise decoding; see `backbone/cache.py`.

        Args:
            batch: rows B.
            max_len: tokens per row to allocate at once. None: it grows as needed.
        """
        return Cache(len(self.blocks), batch, max_len)

    def forward(
        self,
        tokens: Tokens,
        context: Tokens | None = None,
        cache: Cache | None = None,
        mode: str | None = None,
        condition: Tensor | None = None,
    ) -> Tokens:
        """Update every token from the tokens that it attends to.

        Args:
            tokens: (B, N, D).
            context: (B, K, context_dim), attended to by every block with ``cross=True``: same segment, any block. The
                cross-attention of a token without context gives zeros. With a cache it is needed once.
            cache: KV cache of past tokens, which these tokens attend to by the same rule and are added to. `pos` and
                `block` are used as they are: `cache.offset(tokens)` continues their numbering.
            mode: force an attention mode (see `backbone/attention.py`); for tests and benchmarks.
            condition: conditioning of every block, with ``adaln=True``: (S, D), one per sample in the order of
                `Tokens.pool`, which is (B, D) where a row holds one sample; or (B, N, D), one per token.

        Returns:
            The same tokens with new `x`; zeros at padding.
        """
        self._check(tokens, context, cache, condition)
        cfg, n = self.cfg, tokens.shape[1]
        if n == 0:
            return tokens
        if cache is None:
            plan = plan_attention(tokens, cfg.window, mode, context)
        else:
            plan = cache.plan(tokens, cfg.window, context)
        x = self.first_norm(plan.unpad(_zero_padding(tokens, tokens.x)))
        rope = None
        if cfg.rope:
            pos = plan.unpad(_zero_padding(tokens, tokens.pos))
            rope = rope_angles(pos, cfg.head_dim or 0, cfg.rope, cfg.rope_theta, cfg.rope_scaling)
        keys = None if context is None else plan.cross.unpad(_zero_padding(context, context.x))
        per_block: Any = None if condition is None else prepare_condition(condition, tokens, plan)
        recompute = cfg.gradient_checkpointing and self.training and torch.is_grad_enabled() and cache is None
        for i, block in enumerate(self.blocks):
            if recompute:
                x = checkpoint(block, x, plan, rope, keys, None, per_block, use_reentrant=False)
            else:
                x = block(x, plan, rope, keys, None if cache is None else cache.layers[i], per_block)
        x = self.norm(x) if self.adaln is None else modulate(self.norm(x), self.adaln(per_block)[0])
        x = plan.pad(x)
        return tokens.replace(x=x if plan.indices is not None else _zero_padding(tokens, x))

    def _check(
        self, tokens: Tokens, context: Tokens | None, cache: Cache | None, condition: Tensor | None
    ) -> None:
        if self.cfg.adaln != (condition is not None):
            has, got = ("adaln=True", "no condition") if self.cfg.adaln else ("adaln=False", "a condition")
            raise ValueError(
                f"this Transformer has {has} and got {got}: trunk(tokens, condition=(B, {self.dim}))"
            )
        if tokens.dim != self.dim:
            raise ValueError(
                f"tokens have dim {tokens.dim} and this Transformer {self.dim}: give the front-end dim={self.dim}"
            )
        if context is None:
            if self.cfg.cross and (cache is None or cache.context is None):
                raise ValueError(
                    "this Transformer has cross=True and got no context: trunk(tokens, context=...)"
                )
            return
        if not self.cfg.cross:
            raise ValueError("this Transformer has no cross-attention: build it with cross=True")
        if context.dim != self.cfg.context_dim:
            raise ValueError(
                f"the context has dim {context.dim} and this Transformer expects {self.cfg.context_dim}: build it with "
                f"context_dim={context.dim}"
            )
        if len(context) != len(tokens):
            raise ValueError(
                f"tokens have {len(tokens)} rows and the context {len(context)}, expected the same number"
            )


def _zero_padding(tokens: Tokens, x: Tensor) -> Tensor:
    """(B, N, ...) with zeros at padding."""
    if tokens.layout is not None and tokens.layout.full(tokens.shape[1]):
        return x
    return x.masked_fill(~tokens.valid[..., None], 0)


def init_weights(trunk: Transformer) -> None:
    """Initialise all weights of a trunk.

    Standard deviations follow the widths, as in the first CLIP models (Radford et al. 2021): query, key and value layers
    input_dim^-1/2, the MLP's first layer (2 D)^-1/2, and the layers that write to the residual stream
    D^-1/2 (n depth)^-1/2, as in GPT-2 (n = 2 sub-layers per block, or 3 with cross-attention), so that its variance does
    not grow with depth. Biases are 0, gains of norms 1; LayerScale keeps its initial value, and `AdaLN` its zeros.
    """
    cfg = trunk.cfg
    d, depth = cfg.dim, max(1, cfg.depth)
    into, out = d**-0.5, d**-0.5 * ((3 if cfg.cross else 2) * depth) ** -0.5
    for block in trunk.blocks:
        layers: list[tuple[Any, float]] = [(block.attn.qkv, into), (block.attn.proj, out)]
        if block.cross is not None:
            layers += [(block.cross.q, into), (block.cross.proj, out)]
            kv: Any = block.cross.kv
            layers += [(kv, kv.in_features**-0.5)]
        for layer, std in (*layers, (block.mlp.fc1, (2 * d) ** -0.5), (block.mlp.fc2, out)):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
