"""Attention maps of a trunk, for analysis and tests.

    with wt.attention_maps(trunk) as maps:
        trunk(text, context=image)
    maps.cross[-1][0].mean(0)  # last layer, first row, mean over heads: each text token over the image's tokens

Fused kernels never store these weights, so hooks recompute them beside the forward pass. The hooks exist only inside the
`with`.
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
class AttentionMaps:
    """Attention weights of the latest forward pass, one tensor per layer.

    Attributes:
        self_attention: (B, H, N, N) each, or (B, H, N, L) with a cache of L tokens.
        cross: (B, H, N, K) each, over the context; empty without cross-attention.
    """

    self_attention: list[Tensor] = dataclasses.field(default_factory=list)
    cross: list[Tensor] = dataclasses.field(default_factory=list)


def _weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """(B, N, H, E), (B, K, Hkv, E), (B, N, K) -> (B, H, N, K), zeros where no key is visible."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    score = torch.einsum("bnhe,bkhe->bhnk", q, k).float() * q.shape[-1] ** -0.5
    score = score.masked_fill(~mask[:, None], -torch.inf)
    return score.softmax(-1).masked_fill(~mask[:, None], 0)


@contextlib.contextmanager
def attention_maps(trunk: Transformer | AdditiveDecoder) -> Iterator[AttentionMaps]:
    """Record the attention weights of every forward pass inside the `with`.

    Args:
        trunk: any Transformer, with any attention mode, cache or window. Or an `AdditiveDecoder`, which has cross maps of
            one head.

    Yields:
        `AttentionMaps` of the latest pass. A row of weights sums to 1, or is zeros at padding and where no key is visible.
    """
    if isinstance(trunk, AdditiveDecoder):
        with trunk.record_weights() as weights:
            yield AttentionMaps(cross=weights)
        return
    maps, state = AttentionMaps(), {}

    def start(module, args, kwargs):
        given = dict(zip(("tokens", "context", "cache"), args, strict=False)) | kwargs
        state.update({k: given.get(k) for k in ("tokens", "context", "cache")})
        maps.self_attention.clear()
        maps.cross.clear()

    def record_self(attn, args, output):
        x, plan, rope, layer = args
        tokens = state["tokens"]
        state["plan"] = plan
        q, k, _ = attn.queries_keys_values(x, rope)
        k = layer.k.value if plan.cached else plan.pad(k)
        rule = state["cache"].visible if plan.cached else visible
        mask = rule(tokens, window=trunk.cfg.window) & tokens.valid[..., None]
        maps.self_attention.append(_weights(plan.pad(q), k, mask))

    def record_cross(attn, args, output):
        x, context, plan, layer = args
        tokens = state["tokens"]
        k = plan.pad(attn.keys_values(context)[0]) if layer is None else layer.context[0]
        keys = state["context"] if state["context"] is not None else state["cache"].context
        mask = visible(tokens, keys) & tokens.valid[..., None]
        # queries are in the order of the self-attention's plan, which `record_self` has just stored
        maps.cross.append(_weights(state["plan"].pad(attn.queries(x)), k, mask))

    handles = [trunk.register_forward_pre_hook(start, with_kwargs=True)]
    for b in trunk.blocks:
        handles.append(b.attn.register_forward_hook(record_self))
        if b.cross is not None:
            handles.append(b.cross.register_forward_hook(record_cross))
    try:
        yield maps
    finally:
        for h in handles:
            h.remove()
