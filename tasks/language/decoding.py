"""Sampling of the next token (temperature, top-k, top-p, min-p) and the decoding loop of all text-generating tasks.

`decode` is independent of the model: it takes the logits after the prompt and a step function from ids to logits, which
has its own cache. Notable:

- Every row has its own random generator, so that a row gives the same text alone and in a batch.
- Rows stop one by one, at the end token, a stop string or the maximum length. Finished rows leave the batch if the task
  can drop them from its cache.
- Text is streamed, but never an incomplete character, and never the beginning of a possible stop string.

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
    """Sampling settings, applied in the order of the fields, as in Hugging Face's `generate`.

    Args:
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in the prompt or the
            continuation (CTRL, Keskar et al. 2019). 1: off.
        temperature: divides the logits. 0: greedy decoding.
        top_k: keep the k most likely tokens. None: all.
        top_p: keep the most likely tokens that together reach this probability, 0 to 1 (Holtzman et al. 2020). None: all.
        min_p: keep tokens with at least this share of the highest probability, 0 to 1 (Nguyen et al. 2024). None: all.
        seed: one number, from which the generators of all rows are derived by row index, or one number per row. None:
            torch's global generator.

    Raises:
        InputError: a setting is out of its range.
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
        """(B, V) logits with the repetition penalty applied to the tokens in `seen`, (B, V) bool."""
        if seen is None or self.repetition_penalty == 1:
            return logits
        penalised = torch.where(
            logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty
        )
        return torch.where(seen, penalised, logits)

    def filtered(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> logits / temperature, -inf for filtered tokens. At least one token remains per row."""
        logits = logits.float() / (self.temperature or 1.0)
        cut_k = self.top_k is not None and self.top_k < logits.shape[-1]
        nucleus = self.top_p is not None and self.top_p < 1
        if cut_k or nucleus:
            best, index = logits.topk(self.top_k) if cut_k else logits.sort(-1, descending=True)
            if nucleus:
                p = best.softmax(-1)
                over = p.cumsum(-1) - p >= self.top_p  # the tokens before it already reach top_p
                over[:, 0] = False
                best = best.masked_fill(over, -torch.inf)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, index, best)
        if self.min_p:
            # p >= min_p * p_max, on logits
            floor = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(self.min_p))
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return logits


class TokenSampler:
    """Samples one id per row, with one random generator per row.

    Args:
        sampling: sampling settings.
        rows: number of rows of the full batch.

    Raises:
        InputError: `sampling.seed` is a list of another length than `rows`.
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
                    f"seed has {len(seeds)} numbers for {rows} rows: give one per row, or a single number"
                )
        else:
            seeds = [(seed + 0x9E3779B97F4A7C15 * row) % 2**63 for row in range(rows)]
        self.generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __call__(self, logits: Tensor, rows: Sequence[int], seen: Tensor | None = None) -> Tensor:
        """(len(rows), V) logits -> (len(rows),) int64 ids; `rows` are the row indices in the full batch."""
        logits = self.sampling.penalised(logits, seen)
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        p = self.sampling.filtered(logits).softmax(-1)
        if self.generators is None:
            return torch.multinomial(p, 1)[:, 0]
        # inverse transform sampling: one random number per row, the same on every device
        u = torch.stack([torch.rand(1, generator=self.generators[row]) for row in rows])
        sums = p.cumsum(-1)
        index = torch.searchsorted(sums, u.to(p.device) * sums[:, -1:], right=True)
        return index.clamp(max=p.shape[-1] - 1)[:, 0]


class Continuation(NamedTuple):
    """The generated text of one row."""

    text: str
    ids: list[int]  # without the end token
    finish: str  # "end" (an end token), "stop" (a stop string), "length"


class _Row:
    """State of one row: its ids, and the text that may be streamed so far."""

    def __init__(self, front: TextTokenizer | None, limit: int, stop: Sequence[str]) -> None:
        self.ids, self.texts, self.finish = [], [], "length" if limit < 1 else None
        self.limit, self.stop, self.pending = limit, stop, ""
        self.decoder = front.stream_decoder() if front is not None else None

    def push(self, i: int, end_ids: Collection[int]) -> str:
        """Add one id; returns the text that may be streamed now."""
        if i in end_ids:
            self.finish = "end"
        else:
            self.ids.append(i)
            if self.decoder is not None:
                self.pending += self.decoder.push(i)
            if len(self.ids) == self.limit:
                self.finish = "length"
        if self.finish and self.decoder is not None:
            # drop a character that is incomplete at the maximum length
            self.pending += self.decoder.end().rstrip("\ufffd")
        return self._release()

    def _release(self) -> str:
        found = [i for i in (self.pending.find(s) for s in self.stop) if i >= 0]
        if found:
            self.finish, keep = "stop", min(found)
        elif self.finish:
            keep = len(self.pending)
        else:
            keep = len(self.pending) - _stop_prefix_length(self.pending, self.stop)
        text, self.pending = self.pending[:keep], self.pending[keep:]
        if text:
            self.texts.append(text)
        return text


def _stop_prefix_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop string."""
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
    end_ids: Collection[int] = (),
    stop: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] | None = None,
    select: Callable[[Tensor], object] | None = None,
    stream: Stream | None = None,
) -> list[Continuation]:
    """Generate B continuations token by token.

    Args:
        step: (B,) int64, the next id of each row -> (B, V) logits of the token after it.
        logits: (B, V) logits of the first new token.
        max_new_tokens: the most tokens to generate, one number or one per row.
        sampling: sampling settings.
        front: tokenizer that decodes the ids; None: no text and no stop strings.
        end_ids: ids that end a row, such as ``{front.end_id}``.
        stop: strings that end a row; a row's text ends before them.
        prompts: ids of the prompts, for the repetition penalty.
        select: keeps the given rows (1-D int64) of the step function's cache, e.g. ``cache.select``, so that finished
            rows leave the batch. None: finished rows stay in the batch and their tokens are discarded.
        stream: called with (row, new text) during generation.

    Returns:
        A `Continuation` per row.

    Raises:
        InputError: stop strings without a tokenizer, or an empty stop string.
    """
    texts = decode_stream(
        step,
        logits,
        max_new_tokens,
        sampling,
        front=front,
        end_ids=end_ids,
        stop=stop,
        prompts=prompts,
        select=select,
    )
    while True:
        try:
            row, text = next(texts)
        except StopIteration as done:
            return done.value
        if stream is not None:
            stream(row, text)


@torch.inference_mode()
def decode_stream(
    step: Callable[[Tensor], Tensor],
    logits: Tensor,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    *,
    front: TextTokenizer | None = None,
    end_ids: Collection[int] = (),
    stop: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] | None = None,
    select: Callable[[Tensor], object] | None = None,
) -> Iterator[tuple[int, str]]:
    """`decode` as a generator of (row, new text); its return value is the list of continuations."""
    if isinstance(stop, str) or not all(stop):
        raise InputError(f"stop={stop!r}, expected a list of non-empty strings")
    if stop and front is None:
        raise InputError("stop strings need a tokenizer that decodes the ids")
    b, v = logits.shape
    limits = [max_new_tokens] * b if isinstance(max_new_tokens, int) else list(max_new_tokens)
    rows, sample = [_Row(front, n, stop) for n in limits], TokenSampler(sampling, b)
    seen = _seen(prompts, b, v, logits.device) if sampling.repetition_penalty != 1 else None
    active = list(range(b))  # row index of each batch element
    while any(row.finish is None for row in rows):
        ids = sample(logits, active, seen)
        if seen is not None:
            seen.scatter_(1, ids[:, None], True)
        for row, i in zip(active, ids.tolist(), strict=True):
            if rows[row].finish is None and (text := rows[row].push(i, end_ids)):
                yield row, text
        alive = [k for k, row in enumerate(active) if rows[row].finish is None]
        if alive and len(alive) < len(active) and select is not None:
            index = torch.tensor(alive, device=logits.device)
            select(index)
            ids, seen = ids[index], None if seen is None else seen[index]
            active = [active[k] for k in alive]
        if alive:
            logits = step(ids)
    return [Continuation("".join(r.texts), r.ids, r.finish) for r in rows]


def _seen(prompts: Sequence[Sequence[int]] | None, b: int, v: int, device: torch.device) -> Tensor:
    """(B, V) bool: ids that occur in the prompts."""
    seen = torch.zeros(b, v, dtype=torch.bool)
    for row, ids in enumerate(prompts or ()):
        seen[row, list(ids)] = True
    return seen.to(device)
