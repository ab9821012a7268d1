"""Who reads whom, and how much: the attention maps of a trunk, for people and for tests.

    with wt.attention_maps(trunk) as maps:
        trunk(words, context=image)
    maps.cross[-1][0].mean(0)  # last layer, first row, mean of heads: each word over the image's tokens

The kernels never hold these numbers, so they are computed anew beside the forward pass, by hooks that exist only inside
the `with`: outside it nothing is computed and nothing is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from worldtokens.backbone.additive import AdditiveDecoder
from worldtokens.backbone.transformer import Transformer
from worldtokens.tokens import visible


@dataclasses.dataclass
class Maps:
    """The weights of the latest forward pass, a tensor for each layer.

    Attributes:
        own: (B, H, N, N) each, or (B, H, N, L) with a cache that holds L tokens.
        cross: (B, H, N, K) each, over the context; empty where there is none.
    """

    own: list[Tensor] = dataclasses.field(default_factory=list)
    cross: list[Tensor] = dataclasses.field(default_factory=list)


def _weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """(B, N, H, E), (B, K, Hkv, E), (B, N, K) -> (B, H, N, K), zeros where nothing is read."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    score = torch.einsum("bnhe,bkhe->bhnk", q, k).float() * q.shape[-1] ** -0.5
    score = score.masked_fill(~mask[:, None], -torch.inf)
    return score.softmax(-1).masked_fill(~mask[:, None], 0)


@contextlib.contextmanager
def attention_maps(trunk: Transformer | AdditiveDecoder) -> Iterator[Maps]:
    """Record the attention weights of every forward pass inside the `with`.

    Args:
        trunk: any Transformer; how it reads (groups, cache, window) changes nothing here. Or an `AdditiveDecoder`, which
            has cross maps of one head.

    Yields:
        `Maps` of the latest pass. A row of weights sums to 1, or is zeros at padding and where nothing can be read.
    """
    if isinstance(trunk, AdditiveDecoder):
        with trunk.seen() as seen_cross:
            yield Maps(cross=seen_cross)
        return
    maps, now = Maps(), {}

    def begin(module, args, kwargs):
        given = dict(zip(("tokens", "context", "cache"), args, strict=False)) | kwargs
        now.update({k: given.get(k) for k in ("tokens", "context", "cache")})
        maps.own.clear()
        maps.cross.clear()

    def own(attn, args, output):
        x, reading, rope, layer = args
        tokens = now["tokens"]
        now["reading"] = reading
        q, k, _ = attn.queries_keys(x, rope)
        k = layer.k.value if reading.past else reading.leave(k)
        seen = now["cache"].visible if reading.past else visible
        mask = seen(tokens, window=trunk.cfg.window) & tokens.valid[..., None]
        maps.own.append(_weights(reading.leave(q), k, mask))

    def cross(attn, args, output):
        x, context, reading, layer = args
        tokens = now["tokens"]
        k = reading.leave(attn.keys(context)[0]) if layer is None else layer.context[0]
        seen = now["context"] if now["context"] is not None else now["cache"].context
        mask = visible(tokens, seen) & tokens.valid[..., None]
        # queries stand in the order of the tokens' own reading, which `own` has just seen
        maps.cross.append(_weights(now["reading"].leave(attn.queries(x)), k, mask))

    handles = [trunk.register_forward_pre_hook(begin, with_kwargs=True)]
    for b in trunk.blocks:
        handles.append(b.attn.register_forward_hook(own))
        if b.cross is not None:
            handles.append(b.cross.register_forward_hook(cross))
    try:
        yield maps
    finally:
        for h in handles:
            h.remove()
