"""Beam search over a step function.

The search is independent of the model: it calls `step` for the logits of the next token and `select` to reorder the
model's cache, so any trunk with a cache works. Hypotheses, length penalty and stopping follow Hugging Face's
`generate(num_beams=...)`, so the same model gives the same outputs. Rows are independent: a batch gives the same
outputs as single rows, and finished rows leave the batch.

Shapes: B rows, R = B x beams active rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor


class Hypothesis(NamedTuple):
    """One output of the search: its ids after the prefix, without the end token, and its score."""

    ids: list[int]
    score: float


Step = Callable[
    [Tensor], Tensor
]  # (R, n) int64, the next ids of each row -> (R, V) logits of the token after them
Select = Callable[
    [Tensor], object
]  # (R',) int64: keep these rows of the cache, in this order, possibly repeated


@torch.no_grad()
def beam_search(
    step: Step,
    select: Select,
    prefix: Tensor,
    *,
    beams: int,
    max_new_tokens: int,
    end_id: int,
    length_penalty: float = 1.0,
    suppress: Collection[int] = (),
    suppress_first: Collection[int] = (),
) -> list[list[Hypothesis]]:
    """The best hypotheses of every row, best first.

    Args:
        step: called first with the prefix, then with one id per row; caches what it gets.
        select: reorders the cache of `step`.
        prefix: (B, P) int64, the first ids of the decoder, P >= 1.
        beams: beams per row, 1 or more. 1 is greedy search.
        max_new_tokens: the most ids of an output, including the end token.
        end_id: id of the end token.
        length_penalty: exponent p of the score, the summed log-probability / length ** p. 0 prefers short outputs, 1
            takes the mean per token, larger values prefer long outputs.
        suppress: ids that are never chosen; the other probabilities do not change.
        suppress_first: the same for the first id only.

    Returns:
        B lists of at most `beams` hypotheses (fewer if fewer exist).

    Raises:
        ValueError: `beams` or `max_new_tokens` below 1.
    """
    if beams < 1 or max_new_tokens < 1:
        raise ValueError(f"beams={beams} and max_new_tokens={max_new_tokens}, expected 1 or more")
    device, done = prefix.device, [[] for _ in range(len(prefix))]
    active = list(range(len(prefix)))  # unfinished rows
    running: list[list[list[int]]] = [[[]] for _ in active]  # their ids by row and beam
    scores, width, ids = torch.zeros(len(active), 1, device=device), 1, prefix
    for length in range(1, max_new_tokens + 1):
        logp = step(ids).float().log_softmax(-1)
        suppressed = sorted({*suppress, *suppress_first} if length == 1 else suppress)
        if suppressed:
            logp = logp.index_fill(-1, torch.tensor(suppressed, device=device), -torch.inf)
        vocabulary = logp.shape[-1]
        total = (scores[:, :, None] + logp.view(len(active), width, vocabulary)).flatten(1)
        # 2 x beams candidates: up to `beams` of them may be end tokens, and `beams` must remain
        best, index = total.topk(min(2 * beams, total.shape[1]))
        rows, tokens, values, unfinished, alive = [], [], [], [], []
        for a, (value, position) in enumerate(zip(best.tolist(), index.tolist(), strict=True)):
            row = active[a]
            finished, going = _split_candidates(
                running[a],
                value,
                position,
                vocabulary,
                beams,
                end_id,
                length == max_new_tokens,
                length_penalty,
            )
            done[row] = sorted(done[row] + finished, key=lambda h: -h.score)[:beams]
            if not going or _is_done(done[row], going[0][2], length, beams, length_penalty):
                continue
            alive.append([running[a][beam] + [token] for beam, token, _ in going])
            going += [(going[-1][0], going[-1][1], -torch.inf)] * (beams - len(going))
            alive[-1] += [alive[-1][-1]] * (beams - len(alive[-1]))
            rows += [a * width + beam for beam, _, _ in going]
            tokens += [token for _, token, _ in going]
            values += [value for _, _, value in going]
            unfinished.append(row)
        active, running, width = unfinished, alive, beams
        if not active:
            break
        if rows != list(range(len(ids))):  # greedy search keeps the order of rows: nothing to copy
            select(torch.tensor(rows, device=device))
        ids = torch.tensor(tokens, device=device)[:, None]
        scores = torch.tensor(values, device=device).view(len(active), beams)
    return done


def _split_candidates(
    running: list[list[int]],
    values: list[float],
    indices: list[int],
    vocabulary: int,
    beams: int,
    end_id: int,
    last: bool,
    length_penalty: float,
) -> tuple[list[Hypothesis], list[tuple[int, int, float]]]:
    """A row's candidates, best first -> finished hypotheses, and (beam, token, summed log-probability) of the others.

    A candidate ranked below the first `beams` may continue in place of a finished one, but does not finish itself.
    """
    finished, going = [], []
    for rank, (value, index) in enumerate(zip(values, indices, strict=True)):
        if value == -torch.inf:
            break
        beam, token = divmod(index, vocabulary)
        if token == end_id or last:
            if rank < beams:
                ids = running[beam] + ([] if token == end_id else [token])
                finished.append(Hypothesis(ids, value / (len(running[beam]) + 1) ** length_penalty))
        elif len(going) < beams:
            going.append((beam, token, value))
    return finished, going


def _is_done(done: list[Hypothesis], best: float, length: int, beams: int, length_penalty: float) -> bool:
    """Whether the best running beam, scored at its present length, is no better than the worst finished hypothesis."""
    return len(done) == beams and best / length**length_penalty <= done[-1].score
