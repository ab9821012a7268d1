"""The shared trunk: Tokens in, Tokens out.

Notable: padding is emptied at the door (`where(valid, x, 0)`), so whatever it held, NaN included, cannot reach a
real token by any path; the way of reading is planned once and handed to every layer; all weights are initialised
in `init_weights`. An encoder-decoder is two of them: ``decoder(words, context=encoder(image))``.

Shapes: B rows, N tokens, D width, K tokens of a context.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from worldtokens.backbone.attention import plan
from worldtokens.backbone.block import Block
from worldtokens.backbone.cache import Cache
from worldtokens.backbone.config import SIZES, TransformerConfig, make_norm
from worldtokens.backbone.modulation import Modulation, modulated, spread
from worldtokens.backbone.positions import rope_angles
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Transformer(Part):
    """A stack of blocks over `Tokens`, whatever made them.

    Arguments are those of `TransformerConfig`. Padding may hold anything and gives zeros; a row with nothing
    valid gives zeros. ``torch.compile(trunk, dynamic=True)`` compiles once for all lengths and row counts (see
    `backbone/attention.py`).

    Raises:
        ValueError: arguments do not fit together, or the tokens have another width.
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
        cross: bool = False,
        context_dim: int | None = None,
        first_norm: bool = False,
        mlp_norm: bool = False,
        qkv_bias: bool | None = None,
        head_width: int | None = None,
        rope_scaling: tuple[float, float, float, float] | None = None,
        modulated: bool = False,
    ) -> None:
        given = {k: v for k, v in locals().items() if k in TransformerConfig.__dataclass_fields__}
        super().__init__()
        self.cfg = cfg = TransformerConfig(**given)
        self.dim = dim
        last = max(1, depth - 1)
        self.first_norm = make_norm(cfg) if first_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(cfg, drop_path * i / last) for i in range(depth))
        last_norm = pre_norm if final_norm is None else final_norm
        self.norm = make_norm(cfg, affine=not modulated) if last_norm else nn.Identity()
        self.modulation = Modulation(dim, 1, gated=False) if modulated and last_norm else None
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

    def cache(self, batch: int, max_len: int | None = None) -> Cache:
        """An empty memory of keys and values for stepwise decoding; see `backbone/cache.py`.

        Args:
            batch: rows B.
            max_len: room for so many tokens in a row is taken at once. None: it grows as needed.
        """
        return Cache(len(self.blocks), batch, max_len)

    def forward(
        self,
        tokens: Tokens,
        context: Tokens | None = None,
        cache: Cache | None = None,
        kind: str | None = None,
        condition: Tensor | None = None,
    ) -> Tokens:
        """Update every token by what it may read.

        Args:
            tokens: (B, N, D).
            context: (B, K, context_dim), read by every block where ``cross=True``: same segment, whatever its block.
                A token with no context to read gets zeros from that part. With a cache it is needed once.
            cache: what was read before; these tokens read it too, by the one rule, and are held in it after. Their
                `pos` and `block` are taken as they are: `cache.follow(tokens)` numbers them on.
            kind: force a way of reading (see `backbone/attention.py`); for tests and benchmarks.
            condition: what every block is modulated by where ``modulated=True``: (S, D), one for each sample in the order
                in which `Tokens.pool` gives them, so (B, D) where a row holds one; or (B, N, D), one for each token.

        Returns:
            The same tokens with new `x`; zeros at padding.
        """
        self._check(tokens, context, cache, condition)
        n = tokens.shape[1]
        if n == 0:
            return tokens
        if cache is None:
            reading = plan(tokens, self.cfg.window, kind, context)
        else:
            reading = cache.plan(tokens, self.cfg.window, context)
        x = self.first_norm(reading.enter(_emptied(tokens, tokens.x)))
        rope = None
        if self.cfg.rope:
            pos = reading.enter(_emptied(tokens, tokens.pos))
            rope = rope_angles(
                pos, self.cfg.head_dim, self.cfg.rope, self.cfg.rope_theta, self.cfg.rope_scaling
            )
        read = None if context is None else reading.cross.enter(_emptied(context, context.x))
        by = None if condition is None else spread(condition, tokens, reading)
        for i, block in enumerate(self.blocks):
            if self.cfg.checkpoint and self.training and torch.is_grad_enabled() and cache is None:
                x = recompute(block, x, reading, rope, read, None, by, use_reentrant=False)
            else:
                x = block(x, reading, rope, read, None if cache is None else cache.layers[i], by)
        x = self.norm(x) if self.modulation is None else modulated(self.norm(x), self.modulation(by)[0])
        x = reading.leave(x)
        return tokens.replace(x=x if reading.gather is not None else _emptied(tokens, x))

    def _check(
        self, tokens: Tokens, context: Tokens | None, cache: Cache | None, condition: Tensor | None
    ) -> None:
        if self.cfg.modulated != (condition is not None):
            has, got = ("modulated=True", "none") if self.cfg.modulated else ("modulated=False", "one")
            raise ValueError(
                f"this Transformer has {has} and got {got}: trunk(tokens, condition=(B, {self.dim}))"
            )
        if tokens.dim != self.dim:
            raise ValueError(
                f"tokens are {tokens.dim} wide and this Transformer {self.dim}: give the front-end dim={self.dim}"
            )
        if context is None:
            if self.cfg.cross and (cache is None or cache.context is None):
                raise ValueError(
                    "this Transformer has cross=True and got no context: trunk(tokens, context=...)"
                )
            return
        if not self.cfg.cross:
            raise ValueError("this Transformer reads no context: build it with cross=True")
        width = self.cfg.context_dim or self.dim
        if context.dim != width:
            raise ValueError(
                f"the context is {context.dim} wide and this Transformer reads {width}: give it "
                f"context_dim={context.dim}"
            )
        if len(context) != len(tokens):
            raise ValueError(
                f"tokens have {len(tokens)} rows and the context {len(context)}: one each is expected"
            )


def _emptied(tokens: Tokens, x: Tensor) -> Tensor:
    """(B, N, ...) with zeros at padding."""
    if tokens.layout is not None and tokens.layout.full(tokens.shape[1]):
        return x
    return x.masked_fill(~tokens.valid[..., None], 0)


def init_weights(trunk: Transformer) -> None:
    """The one place where a trunk's weights are set.

    Widths decide the spread, as in the first CLIP models (Radford et al. 2021): query, key and value maps
    get std D^-1/2 of what they read, the feed-forward's first map (2 D)^-1/2, and the maps that write to the residual
    path D^-1/2 (parts depth)^-1/2, as in GPT-2 (parts: 2, or 3 with a context), so that the path's variance does not
    grow with depth. Biases are 0, norms' gains 1; LayerScale keeps its own start, and `Modulation` its zeros.
    """
    cfg = trunk.cfg
    d, depth = cfg.dim, max(1, cfg.depth)
    into, out = d**-0.5, d**-0.5 * ((3 if cfg.cross else 2) * depth) ** -0.5
    for block in trunk.blocks:
        layers = [(block.attn.qkv, into), (block.attn.proj, out)]
        if block.cross is not None:
            layers += [(block.cross.q, into), (block.cross.proj, out)]
            layers += [(block.cross.kv, block.cross.kv.in_features**-0.5)]
        for layer, std in (*layers, (block.mlp.fc1, (2 * d) ** -0.5), (block.mlp.fc2, out)):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
