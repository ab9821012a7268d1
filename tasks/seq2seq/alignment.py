"""Where a decoder looks while it writes: its cross-attention, read out for people.

Shapes: N written ids, K context tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worldtokens.backbone.maps import attention_maps
from worldtokens.errors import InputError
from worldtokens.tasks.base import evaluating
from worldtokens.tasks.seq2seq.model import EncoderDecoder
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens


class CrossAttention(NamedTuple):
    """One answer and what was looked at for each of its ids."""

    written: list[int]  # N ids, the end token last
    weights: list[Tensor]  # of each layer (N, K) float, the mean over heads; a row sums to 1
    context: Tokens  # (1, K, D): their `pos` tells where they are


class Alignment(NamedTuple):
    """Who looked where: for every written piece its weights over the source's pieces, which sum to 1."""

    written: list[str]  # N pieces, the end token last
    read: list[str]  # K pieces
    weights: Tensor  # (N, K) float


@torch.no_grad()
def cross_attention(model: EncoderDecoder, source: Mapping[str, Any], text: str) -> CrossAttention:
    """Cross-attention while `text` is written.

    Args:
        source: a row with columns that the model reads.
        text: what it is told to write.

    Raises:
        InputError: the decoder has no attention to its context.
    """
    if not hasattr(model.decoder, "blocks") and not hasattr(model.decoder, "seen"):
        raise InputError(
            f"a {type(model.decoder).__name__} decoder does not attend to its context: there is no map"
        )
    with evaluating(model):
        batch = model.collate([model.read({**source, model.text: text})]).to(model.device)
        with attention_maps(model.decoder) as maps:
            model(batch)
        context = model.encode(batch)
    labels = batch[model.text]["labels"][0].tolist()
    at = [i for i, label in enumerate(labels) if label >= 0]
    weights = [m[0].float().mean(0)[at].cpu() for m in maps.cross]
    return CrossAttention([labels[i] for i in at], weights, context.to("cpu"))


def token_strings(front: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """Each id spelt out; a part of a character, and what cannot be printed, shows as a replacement sign."""
    return [_shown(front.token_bytes(i)) for i in ids]


def _shown(spelt: bytes) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in spelt.decode("utf-8", "replace"))


def group_words(front: TextTokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Ids put together to words: (word, places of its ids); a special token by its name is a word of its own."""
    found: list[tuple[bytes, list[int]]] = []
    for place, id in enumerate(ids):
        spelt = front.token_bytes(id)
        special = front.decode([id]) == ""
        if not found or special or spelt[:1].isspace():
            found.append((spelt, [place]))
        else:
            found[-1] = (found[-1][0] + spelt, [*found[-1][1], place])
    return [(_shown(w.strip()), places) for w, places in found]
