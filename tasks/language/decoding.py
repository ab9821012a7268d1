"""Choosing the next token, and the loop around it that every task with words to say shares.

`decode` knows no model: a task hands it the logits after the prompt and a step function, ids in and logits out, which
keeps its own cache. Notable:

- Every row draws from a generator of its own, so a row says the same alone and in a batch.
- Rows stop one by one, by the end token, a stop string or the length, and finished ones leave the batch where the task
  can drop them from its cache.
- Text is handed out as it comes, but never half a character, and never the beginning of what may become a stop string.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Cuts act in the order of the fields, as in Hugging Face's `generate`.

    Args:
        repetition_penalty: logits of tokens that the prompt or the continuation holds are divided by this where they are
            positive and multiplied where negative (CTRL, Keskar et al. 2019). 1: off.
        temperature: logits are divided by it. 0: the likeliest token, always.
        top_k: only the k likeliest, or None.
        top_p: only the likeliest that together reach this probability, 0 to 1, or None (Holtzman et al. 2020).
        min_p: only those with at least this share of the likeliest one's probability, 0 to 1, or None (Nguyen et al. 2024).
        seed: of the draws: one number, from which every row gets a stream of its own by its place, or one for each row.
            None: torch's global generator.

    Raises:
        InputError: a setting out of its range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.repetition_penalty <= 0:
            raise InputError(
                f"temperature={self.temperature} and repetition_penalty={self.repetition_penalty}: expected 0 or more, "
                "and more than 0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k}, expected 1 or more, or None for all")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name}={value}, expected 0 to 1, or None")

    def penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """(B, V) with the logits of what was said before lowered; `seen` is (B, V) bool."""
        if seen is None or self.repetition_penalty == 1:
            return logits
        less = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
        return torch.where(seen, less, logits)

    def filtered(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> the same over the temperature, with -inf for what is cut. At least one token stays."""
        logits = logits.float() / (self.temperature or 1.0)
        cut_k = self.top_k is not None and self.top_k < logits.shape[-1]
        nucleus = self.top_p is not None and self.top_p < 1
        if cut_k or nucleus:
            best, at = logits.topk(self.top_k) if cut_k else logits.sort(-1, descending=True)
            if nucleus:
                p = best.softmax(-1)
                over = p.cumsum(-1) - p >= self.top_p  # what stands before it reaches the share already
                over[:, 0] = False
                best = best.masked_fill(over, -torch.inf)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, at, best)
        if self.min_p:
            # p >= min_p p_max, told by logits
            floor = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(self.min_p))
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return logits


class TokenSampler:
    """Draws one id for each row, row after row from streams of their own.

    Args:
        sampling: the settings.
        rows: B.
    """

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self.sampling, self.generators = sampling, None
        seed = sampling.seed
        if seed is None or sampling.temperature == 0:
            return
        if not isinstance(seed, int):
            seeds = [int(s) for s in seed]
            if len(seeds) != rows:
                raise InputError(
                    f"seed holds {len(seeds)} numbers for {rows} rows: give one each, or one number"
                )
        else:
            seeds = [(seed + 0x9E3779B97F4A7C15 * row) % 2**63 for row in range(rows)]
        self.generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __call__(self, logits: Tensor, rows: Sequence[int], seen: Tensor | None = None) -> Tensor:
        """(len(rows), V) -> (len(rows),) int64; `rows` are the places that they had in the full batch."""
        logits = self.sampling.penalised(logits, seen)
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        p = self.sampling.filtered(logits).softmax(-1)
        if self.generators is None:
            return torch.multinomial(p, 1)[:, 0]
        # the inverse of the distribution function: one number a row decides, on whatever device
        u = torch.stack([torch.rand(1, generator=self.generators[row]) for row in rows])
        sums = p.cumsum(-1)
        place = torch.searchsorted(sums, u.to(p.device) * sums[:, -1:], right=True)
        return place.clamp(max=p.shape[-1] - 1)[:, 0]


class Continuation(NamedTuple):
    """What one row said."""

    text: str
    ids: list[int]  # without the end token
    finish: str  # "end" (an end token), "stop" (a stop string), "length"


class _Row:
    """One row's words so far, and what of them may be shown."""

    def __init__(self, front: TextTokenizer | None, limit: int, stop: Sequence[str]) -> None:
        self.ids, self.shown, self.finish = [], [], "length" if limit < 1 else None
        self.limit, self.stop, self.held = limit, stop, ""
        self.spelling = front.stream_decoder() if front is not None else None

    def push(self, i: int, ends: Collection[int]) -> str:
        """One more id; gives the text that it lets be shown."""
        if i in ends:
            self.finish = "end"
        else:
            self.ids.append(i)
            if self.spelling is not None:
                self.held += self.spelling.push(i)
            if len(self.ids) == self.limit:
                self.finish = "length"
        if self.finish and self.spelling is not None:
            # a character that the length cut in two is not shown at all
            self.held += self.spelling.end().rstrip("\ufffd")
        return self._release()

    def _release(self) -> str:
        found = [at for at in (self.held.find(s) for s in self.stop) if at >= 0]
        if found:
            self.finish, keep = "stop", min(found)
        elif self.finish:
            keep = len(self.held)
        else:
            keep = len(self.held) - _begun(self.held, self.stop)
        piece, self.held = self.held[:keep], self.held[keep:]
        if piece:
            self.shown.append(piece)
        return piece


def _begun(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = min(len(text), max((len(s) for s in stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)


Stream = Callable[[int, str], None]


def decode(
    step: Callable[[Tensor], Tensor],
    logits: Tensor,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    *,
    front: TextTokenizer | None = None,
    ends: Collection[int] = (),
    stop: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] | None = None,
    select: Callable[[Tensor], object] | None = None,
    stream: Stream | None = None,
) -> list[Continuation]:
    """Continue B rows token by token.

    Args:
        step: (B,) int64 ids, one more for each row -> (B, V) logits of what follows them.
        logits: (B, V), what follows the prompts.
        max_new_tokens: the most tokens to add, for all rows or for each.
        sampling: how they are drawn.
        front: spells them; None: no text and no stop strings.
        ends: ids that end a row, such as ``{front.end_id}``.
        stop: strings that end a row; they and what follows are not part of its text.
        prompts: ids before, for the repetition penalty.
        select: keeps these rows (1-D int64) of the step function's memory, e.g. ``cache.select``; finished rows then
            leave the batch. None: they are fed on, unheard.
        stream: called with (row, piece of text) as text comes.

    Returns:
        A `Continuation` for each row.

    Raises:
        InputError: stop strings without a front-end, or an empty one.
    """
    pieces = decode_stream(
        step,
        logits,
        max_new_tokens,
        sampling,
        front=front,
        ends=ends,
        stop=stop,
        prompts=prompts,
        select=select,
    )
    while True:
        try:
            row, piece = next(pieces)
        except StopIteration as done:
            return done.value
        if stream is not None:
            stream(row, piece)


@torch.inference_mode()
def decode_stream(
    step: Callable[[Tensor], Tensor],
    logits: Tensor,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    *,
    front: TextTokenizer | None = None,
    ends: Collection[int] = (),
    stop: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] | None = None,
    select: Callable[[Tensor], object] | None = None,
) -> Iterator[tuple[int, str]]:
    """`decode` as an iterator over (row, piece of text); its return value is the list of continuations."""
    if isinstance(stop, str) or not all(stop):
        raise InputError(f"stop={stop!r}, expected a list of strings that are not empty")
    if stop and front is None:
        raise InputError("stop strings need a front-end that spells the ids")
    b, v = logits.shape
    limits = [max_new_tokens] * b if isinstance(max_new_tokens, int) else list(max_new_tokens)
    rows, draw = [_Row(front, n, stop) for n in limits], TokenSampler(sampling, b)
    seen = _seen(prompts, b, v, logits.device) if sampling.repetition_penalty != 1 else None
    here = list(range(b))  # which row each place of the batch holds
    while any(row.finish is None for row in rows):
        ids = draw(logits, here, seen)
        if seen is not None:
            seen.scatter_(1, ids[:, None], True)
        for row, i in zip(here, ids.tolist(), strict=True):
            if rows[row].finish is None and (piece := rows[row].push(i, ends)):
                yield row, piece
        alive = [k for k, row in enumerate(here) if rows[row].finish is None]
        if alive and len(alive) < len(here) and select is not None:
            kept = torch.tensor(alive, device=logits.device)
            select(kept)
            ids, seen = ids[kept], None if seen is None else seen[kept]
            here = [here[k] for k in alive]
        if alive:
            logits = step(ids)
    return [Continuation("".join(r.shown), r.ids, r.finish) for r in rows]


def _seen(prompts: Sequence[Sequence[int]] | None, b: int, v: int, device: torch.device) -> Tensor:
    """(B, V) bool: what the prompts hold."""
    seen = torch.zeros(b, v, dtype=torch.bool)
    for row, ids in enumerate(prompts or ()):
        seen[row, list(ids)] = True
    return seen.to(device)
