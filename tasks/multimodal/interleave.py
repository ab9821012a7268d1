"""Encodes conversations with media as rows of tokens: text and media (images, audio, video) in their order.

Everything that the forward pass needs is computed here on the CPU: the positions of each medium's tokens, the block
numbers for attention, and the labels.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from worldtokens.errors import InputError
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text.chat_template import Chat


class Medium(NamedTuple):
    """One medium of a conversation: an image, a recording, ..."""

    column: str  # column of its tokenizer
    raw: Any
    size: int  # number of tokens


class ChatRow(NamedTuple):
    """A conversation encoded as one row."""

    ids: Tensor  # (N,) int64, padding at the positions of media
    labels: Tensor  # (N,) int64, the next token, IGNORE where it is not predicted
    block: Tensor  # (N,) int32: one number per text token, one number shared by a medium's tokens
    media: list[tuple[int, Medium]]  # with the index of the first token


def prompt_row(chat: Chat, pad: int) -> ChatRow:
    """Encodes a conversation that ends in a question, with the template's generation prompt."""
    return _chat_row([(part, None) for part in chat.parts(reply=True)], pad)


def training_row(chat: Chat, ends: Collection[int], pad: int) -> ChatRow:
    """Encodes a conversation with its answers as labels: the assistant's tokens, up to the first of `ends`, inclusive.

    Raises:
        InputError: the template renders a question differently once it is answered, so answers cannot be located.
    """
    whole, media, at, parts = chat.text(), [m for ms in chat.media for m in ms], 0, []

    def encode(end: int, answer: bool) -> None:
        nonlocal at, media
        text, at = whole[at:end], end
        n = len(media) if end == len(whole) else text.count(chat.slot)
        for part in chat.read(text, media[:n]):
            parts.append((part, _until(part, ends) if answer and isinstance(part, Tensor) else None))
        media = media[n:]

    for i, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        question, answered = chat.text(0, i, reply=True), chat.text(0, i + 1)
        if not answered.startswith(question) or not whole.startswith(answered):
            raise InputError(
                f"the chat template renders the text before message {i} differently once the answer is present: found "
                f"{answered[-80:]!r}, expected it to begin with {question[-80:]!r}"
            )
        encode(len(question), False)
        encode(len(answered), True)
    encode(len(whole), False)
    row = _chat_row(parts, pad)
    predicted = (row.labels != IGNORE).nonzero()
    if not len(predicted):
        return row
    n = int(predicted[-1]) + 1  # tokens after the last answer predict nothing
    return ChatRow(row.ids[:n], row.labels[:n], row.block[:n], [m for m in row.media if m[0] < n])


def _until(ids: Tensor, ends: Collection[int]) -> Tensor:
    """(n,) bool, True up to and including the first end token."""
    stops = torch.isin(ids, torch.tensor(sorted(ends), dtype=torch.int64)).long().cumsum(0)
    return torch.cat((stops.new_zeros(1), stops[:-1])) == 0


def _chat_row(parts: Sequence[tuple[Any, Tensor | None]], pad: int) -> ChatRow:
    """Joins ids and media in order, each with a mask of the ids to predict."""
    ids, predicted, steps, media, at = [], [], [], [], 0
    for part, answer in parts:
        if isinstance(part, Medium):
            media.append((at, part))
            ids.append(torch.full((part.size,), pad))
            steps.append(torch.zeros(part.size, dtype=torch.int32))
            steps[-1][:1] = 1
        else:
            ids.append(part)
            steps.append(torch.ones(len(part), dtype=torch.int32))
        n = len(ids[-1])
        predicted.append(torch.zeros(n, dtype=torch.bool) if answer is None else answer)
        at += n
    if not at:
        return ChatRow(
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0), []
        )
    ids, predicted, block = (
        torch.cat(ids),
        torch.cat(predicted),
        torch.cat(steps).cumsum(0, dtype=torch.int32) - 1,
    )
    labels = torch.cat((ids[1:].masked_fill(~predicted[1:], IGNORE), torch.tensor([IGNORE])))
    return ChatRow(ids, labels, block, media)


def fit_context(
    messages: Sequence[Mapping[str, Any]],
    encode: Callable[[Sequence[Mapping[str, Any]]], ChatRow],
    context: int | None,
) -> ChatRow:
    """Encodes a conversation in at most `context` tokens by dropping its oldest messages whole, so no medium is cut.

    A leading system message stays, and the remaining messages do not begin with an answer.

    Raises:
        InputError: the last question alone is too long.
    """
    row = encode(messages)
    if context is None or len(row.ids) <= context:
        return row
    head = int(messages[0]["role"] == "system")
    for i in range(head + 1, len(messages)):
        if messages[i]["role"] != "assistant":
            row = encode([*messages[:head], *messages[i:]])
            if len(row.ids) <= context:
                return row
    sizes = ", ".join(f"{m.column} {m.size}" for _, m in row.media) or "none"
    raise InputError(
        f"the last question has {len(row.ids)} tokens (of media: {sizes}), more than the context of {context}: shorten "
        "it, send fewer media, or reduce their tokens (a Resampler with fewer latents)"
    )


def collate_rows(rows: Sequence[ChatRow], pad: int, tokenizers: Mapping[str, Any]) -> Batch:
    """Collates rows into one batch.

    Returns:
        `ids`, `labels` (B, N) int64, `block` (B, N) int32, `lengths` (B ints), `text_only` (True if no row has media),
        `media` (column -> its tokenizer's batch), `positions` (column -> flat indices of its tokens in the B * N, in
        order) and `sizes` (column -> number of tokens of each medium).

    Raises:
        InputError: a row without a token, or media that cannot be collated.
    """
    lengths = tuple(len(row.ids) for row in rows)
    if not all(lengths):
        raise InputError(
            f"conversation {lengths.index(0)} has no tokens: add text, or use a chat template that does"
        )
    shape = len(rows), max(lengths)
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
    block = torch.zeros(shape, dtype=torch.int32)
    found: dict[str, list[tuple[int, Medium]]] = {}
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        ids[i, :n], labels[i, :n], block[i, :n] = row.ids, row.labels, row.block
        for at, medium in row.media:
            found.setdefault(medium.column, []).append((i * shape[1] + at, medium))
    media, positions, sizes = Batch(), Batch(), Batch()
    for column, placed in found.items():
        media[column] = tokenizers[column].collate([m.raw for _, m in placed])
        positions[column] = torch.cat([torch.arange(at, at + m.size) for at, m in placed])
        sizes[column] = tuple(m.size for _, m in placed)
    batch = Batch(ids=ids, labels=labels, block=block, lengths=lengths, text_only=not found)
    return Batch({**batch, "media": media, "positions": positions, "sizes": sizes})


def count_tokens(tokenizer: Tokenizer, raw: Tensor) -> int:
    """Number of tokens of a raw sample, computed on the CPU whatever the device of the tokenizer's weights."""
    # zeros replace the weights: a worker may not touch an accelerator, and only the count matters
    state = {**dict(tokenizer.named_parameters()), **dict(tokenizer.named_buffers())}
    state = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}
    with torch.no_grad():
        return int(functional_call(tokenizer, state, (tokenizer.collate([raw]),)).valid.sum())


def reference_answer(row: Mapping[str, Any]) -> str:
    """The reference answer: the text of the row's last message, which has to be the assistant's.

    Raises:
        InputError: the last message is not a text of the assistant.
    """
    last = row["messages"][-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise InputError(f"the last message of a row is {last!r:.80}, expected text of the assistant")
    return last["content"]


def equal_answers(a: str, b: str) -> bool:
    """Whether two answers are equal, ignoring case and surrounding white space."""
    return a.strip().casefold() == b.strip().casefold()
