"""A longer or shorter context for a trained model: learned position embeddings are interpolated or extended."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from worldtokens.errors import InputError
from worldtokens.pretrained.surgery.replace import find_front, owners, rebuild
from worldtokens.pretrained.surgery.vocabulary import sample_rows
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


def resize_context(
    model: nn.Module, context: int, how: str = "interpolate", keep: int = 0, column: str | None = None
) -> nn.Module:
    """Change the context length of a text model.

    Learned position embeddings get `context` rows. With RoPE there is no table; only the limit changes.

    Args:
        model: a task, an `Encoder` or a `TextTokenizer`; changed in place, before an optimizer is made.
        context: maximum number of tokens of a text.
        how: ``"interpolate"``: linear interpolation between the old rows, first and last row unchanged; ``"extend"``: the
            old rows stay, new ones are sampled with their mean and covariance.
        keep: with ``"interpolate"``, number of first rows that stay unchanged; Long-CLIP (Zhang et al. 2024) keeps 20 of
            CLIP's 77, since few texts of its training were longer.
        column: name of the text front-end, needed if there are several.

    Returns:
        The model.

    Raises:
        InputError: a setting is out of its range.
    """
    front = find_front(model, TextTokenizer, column)
    if how not in ("interpolate", "extend"):
        raise InputError(f"how is {how!r}, expected 'interpolate' or 'extend'")
    if type(context) is not int or context < 1 or not 0 <= keep < min(context, front.context or context):
        raise InputError(
            f"context={context!r} and keep={keep}, expected whole numbers, keep below both contexts"
        )
    before, tensors = front.context, {}
    changes: dict[str, Any] = {"vocabulary": front.backend, "context": context}
    if front.pos_embed is not None:
        table = front.pos_embed.detach()  # (positions, D); a BERT may have more positions than its context
        if how == "extend":
            size = max(len(table), context) if "max_positions" in front._args else context
            g = torch.Generator().manual_seed(0)
            more = sample_rows(table.double(), max(0, size - len(table)), 1.0, g).to(table)
            tensors["pos_embed"] = torch.cat([table[:size], more])
        else:
            rest = table[keep:before].float().T[None]
            rest = nn.functional.interpolate(rest, size=context - keep, mode="linear", align_corners=True)
            tensors["pos_embed"] = torch.cat([table[:keep], rest[0].T.to(table)])
        if "max_positions" in front._args:
            changes["max_positions"] = len(tensors["pos_embed"])
    rebuild(front, changes, tensors)
    for owner in owners(model, front):
        if "context" in owner._args:
            same = owner._args["context"] == before
            rebuild(owner, {"context": context} if same else {})
    return model
