"""Cross-attention weights of a decoder, for figures and alignments.

Shapes: N target ids, K context tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worldtokens.backbone.additive import AdditiveDecoder
from worldtokens.backbone.maps import attention_maps
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.tasks.base import evaluating
from worldtokens.tasks.seq2seq.model import EncoderDecoder
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens


class CrossAttention(NamedTuple):
    """Target ids and their attention weights over the context tokens."""

    ids: list[int]  # N ids, the end token last
    weights: list[Tensor]  # per layer (N, K) float, the mean over heads; a row sums to 1
    context: Tokens  # (1, K, D); `pos` holds the coordinates of the tokens


class Alignment(NamedTuple):
    """Attention weights of every target token over the source tokens; a row sums to 1."""

    target: list[str]  # N tokens, the end token last
    source: list[str]  # K tokens
    weights: Tensor  # (N, K) float


@torch.no_grad()
def cross_attention(model: EncoderDecoder, source: Mapping[str, Any], text: str) -> CrossAttention:
    """Cross-attention weights of the decoder for a given target text.

    Args:
        source: a row with the model's source columns.
        text: the target text.

    Raises:
        InputError: the decoder has no cross-attention.
    """
    if not isinstance(model.decoder, Transformer | AdditiveDecoder):
        raise InputError(
            f"a {type(model.decoder).__name__} decoder has no cross-attention, so there are no weights to return"
        )
    with evaluating(model):
        batch = model.collate([model.read({**source, model.text: text})]).to(model.device)
        with attention_maps(model.decoder) as maps:
            model(batch)
        context = model.encode(batch)
    labels = batch[model.text]["labels"][0].tolist()
    positions = [i for i, label in enumerate(labels) if label >= 0]
    weights = [m[0].float().mean(0)[positions].cpu() for m in maps.cross]
    return CrossAttention([labels[i] for i in positions], weights, context.to("cpu"))


def token_strings(front: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id; incomplete and unprintable characters become U+FFFD."""
    return [_printable(front.token_bytes(i)) for i in ids]


def _printable(raw: bytes) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in raw.decode("utf-8", "replace"))


def group_words(front: TextTokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Group ids into words: (word, positions of its ids). A special token is a word by itself."""
    found: list[tuple[bytes, list[int]]] = []
    for position, id in enumerate(ids):
        token = front.token_bytes(id)
        special = front.decode([id]) == ""
        if not found or special or token[:1].isspace():
            found.append((token, [position]))
        else:
            found[-1] = (found[-1][0] + token, [*found[-1][1], position])
    return [(_printable(w.strip()), positions) for w, positions in found]
