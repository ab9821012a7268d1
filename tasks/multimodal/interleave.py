"""Conversations with media -> rows of tokens: text and images (sounds, clips) in the order in which they are said.

Everything that a forward pass must know is settled here on the CPU: where each medium's tokens stand, in which order
tokens are read, and what is to be predicted.

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
    """An image, sound, ... in a conversation."""

    column: str  # whose front-end reads it
    raw: Any
    size: int  # tokens that it becomes


class Line(NamedTuple):
    """A conversation as one row."""

    ids: Tensor  # (N,) int64, padding where a medium's tokens stand
    labels: Tensor  # (N,) int64, what follows each token, IGNORE where it is not to be predicted
    block: Tensor  # (N,) int32: text counts on, a medium's tokens share one number
    media: list[tuple[int, Medium]]  # with the place of the first token


def asked(chat: Chat, pad: int) -> Line:
    """A conversation that ends in a question: the template asks for the answer."""
    return _line([(part, None) for part in chat.parts(reply=True)], pad)


def taught(chat: Chat, ends: Collection[int], pad: int) -> Line:
    """A conversation with its answers: what the assistant says is predicted, up to and with the first of `ends`.

    Raises:
        InputError: the template writes a question otherwise once it is answered, so the answer's place cannot be told.
    """
    whole, media, at, parts = chat.text(), [m for ms in chat.media for m in ms], 0, []

    def read(end: int, answer: bool) -> None:
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
                f"the chat template writes what stands before message {i} otherwise once the answer is there: found "
                f"{answered[-80:]!r}, expected it to begin with {question[-80:]!r}"
            )
        read(len(question), False)
        read(len(answered), True)
    read(len(whole), False)
    line = _line(parts, pad)
    predicted = (line.labels != IGNORE).nonzero()
    if not len(predicted):
        return line
    n = int(predicted[-1]) + 1  # what stands behind the last answer teaches nothing
    return Line(line.ids[:n], line.labels[:n], line.block[:n], [m for m in line.media if m[0] < n])


def _until(ids: Tensor, ends: Collection[int]) -> Tensor:
    """(n,) bool: up to and with the first end."""
    stops = torch.isin(ids, torch.tensor(sorted(ends), dtype=torch.int64)).long().cumsum(0)
    return torch.cat((stops.new_zeros(1), stops[:-1])) == 0


def _line(parts: Sequence[tuple[Any, Tensor | None]], pad: int) -> Line:
    """Ids and media in order, each with which of its ids are to be predicted."""
    ids, learnt, steps, media, at = [], [], [], [], 0
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
        learnt.append(torch.zeros(n, dtype=torch.bool) if answer is None else answer)
        at += n
    if not at:
        return Line(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0), [])
    ids, learnt, block = torch.cat(ids), torch.cat(learnt), torch.cat(steps).cumsum(0, dtype=torch.int32) - 1
    following = torch.cat((ids[1:].masked_fill(~learnt[1:], IGNORE), torch.tensor([IGNORE])))
    return Line(ids, following, block, media)


def fitted(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[Mapping[str, Any]]], Line],
    context: int | None,
) -> Line:
    """A conversation as a row of at most `context` tokens: its oldest messages are left out whole, so that no medium is cut.

    What a system says at the beginning stays, and what is left begins with a message that is not an answer.

    Raises:
        InputError: the last question alone is too long.
    """
    line = write(messages)
    if context is None or len(line.ids) <= context:
        return line
    head = int(messages[0]["role"] == "system")
    for i in range(head + 1, len(messages)):
        if messages[i]["role"] != "assistant":
            line = write([*messages[:head], *messages[i:]])
            if len(line.ids) <= context:
                return line
    sizes = ", ".join(f"{m.column} {m.size}" for _, m in line.media) or "none"
    raise InputError(
        f"the last question has {len(line.ids)} tokens (of media: {sizes}) and the context takes {context}: ask shorter, "
        "show less, or make the media's front-ends give fewer tokens (a Resampler with fewer latents)"
    )


def rows_of(lines: Sequence[Line], pad: int, fronts: Mapping[str, Any]) -> Batch:
    """Rows -> one batch.

    Returns:
        `ids`, `labels` (B, N) int64, `block` (B, N) int32, `lengths` (B ints), `plain` (True where no row holds media),
        `media` (column -> its front-end's batch), `places` (column -> flat places of its tokens in order, in the B * N)
        and `sizes` (column -> tokens of each).

    Raises:
        InputError: a row without a token, or media that cannot be collated.
    """
    lengths = tuple(len(line.ids) for line in lines)
    if not all(lengths):
        raise InputError(f"conversation {lengths.index(0)} has no token: give a word or a template that does")
    shape = len(lines), max(lengths)
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
    block = torch.zeros(shape, dtype=torch.int32)
    held: dict[str, list[tuple[int, Medium]]] = {}
    for row, (line, n) in enumerate(zip(lines, lengths, strict=True)):
        ids[row, :n], labels[row, :n], block[row, :n] = line.ids, line.labels, line.block
        for at, medium in line.media:
            held.setdefault(medium.column, []).append((row * shape[1] + at, medium))
    media, places, sizes = Batch(), Batch(), Batch()
    for column, found in held.items():
        media[column] = fronts[column].collate([m.raw for _, m in found])
        places[column] = torch.cat([torch.arange(at, at + m.size) for at, m in found])
        sizes[column] = tuple(m.size for _, m in found)
    batch = Batch(ids=ids, labels=labels, block=block, lengths=lengths, plain=not held)
    return Batch({**batch, "media": media, "places": places, "sizes": sizes})


def tokens_of(front: Tokenizer, raw: Tensor) -> int:
    """How many tokens a front-end makes of a raw sample, found on the CPU wherever its weights are."""
    # zeros in the weights' place: a worker may not touch an accelerator, and only the count matters
    state = {**dict(front.named_parameters()), **dict(front.named_buffers())}
    state = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}
    with torch.no_grad():
        return int(functional_call(front, state, (front.collate([raw]),)).valid.sum())


def gold(row: Mapping[str, Any]) -> str:
    """The answer that a row ends in.

    Raises:
        InputError: it ends in something else.
    """
    last = row["messages"][-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise InputError(f"a row ends in {last!r:.80}, expected the assistant's words")
    return last["content"]


def same(a: str, b: str) -> bool:
    """The same answer, but for case and white space around it."""
    return a.strip().casefold() == b.strip().casefold()
