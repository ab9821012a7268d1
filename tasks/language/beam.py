"""Beam search over a step function: the likeliest continuations, several kept alive at a time.

The search knows no model: it asks `step` for the scores of the next token and tells `select` which rows go on, so any
trunk with a cache will do. What is kept, how lengths are weighed and when a row is done follow Hugging Face's
`generate(num_beams=...)`, so the same model gives the same answers. Rows do not touch each other: a batch gives what one
by one gives, and a row that is done is taken out of the batch.

Shapes: B rows, R = B x beams rows at work, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor


class Hypothesis(NamedTuple):
    """One answer of a search: its ids after the prefix, without the end token, and its score."""

    ids: list[int]
    score: float


Step = Callable[[Tensor], Tensor]  # (R, n) int64, the next ids of each row -> (R, V) logits after them
Select = Callable[[Tensor], object]  # (R',) int64: from now on these rows, in this order, as often as named


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
    ban: Collection[int] = (),
    ban_first: Collection[int] = (),
) -> list[list[Hypothesis]]:
    """The best continuations of every row, best first.

    Args:
        step: called first with the prefix, then with one id a row; it remembers what it was given.
        select: changes what `step` remembers.
        prefix: (B, P) int64, what stands before the answer, P >= 1.
        beams: continuations kept alive for each row, 1 or more. 1 is the greedy search.
        max_new_tokens: the most ids of an answer, the end token counted.
        end_id: ends an answer.
        length_penalty: a score is the summed log-probability divided by length ** this: 0 prefers short answers,
            1 the mean over tokens, more prefers long ones.
        ban: ids that are never chosen; the other probabilities stay as they are.
        ban_first: the same for the first id alone.

    Returns:
        B lists of at most `beams` hypotheses (fewer where there are no more).

    Raises:
        ValueError: `beams` or `max_new_tokens` below 1.
    """
    if beams < 1 or max_new_tokens < 1:
        raise ValueError(f"beams={beams} and max_new_tokens={max_new_tokens}, expected 1 or more")
    device, done = prefix.device, [[] for _ in range(len(prefix))]
    active = list(range(len(prefix)))  # rows still searched
    running: list[list[list[int]]] = [[[]] for _ in active]  # their ids, by row and beam
    scores, width, ids = torch.zeros(len(active), 1, device=device), 1, prefix
    for length in range(1, max_new_tokens + 1):
        logp = step(ids).float().log_softmax(-1)
        banned = sorted({*ban, *ban_first} if length == 1 else ban)
        if banned:
            logp = logp.index_fill(-1, torch.tensor(banned, device=device), -torch.inf)
        vocabulary = logp.shape[-1]
        total = (scores[:, :, None] + logp.view(len(active), width, vocabulary)).flatten(1)
        # twice as many as are kept: half of them may be ends, and as many must be left to go on with
        best, index = total.topk(min(2 * beams, total.shape[1]))
        rows, tokens, values, still, alive = [], [], [], [], []
        for a, (value, place) in enumerate(zip(best.tolist(), index.tolist(), strict=True)):
            row = active[a]
            finished, going = _sort_out(
                running[a], value, place, vocabulary, beams, end_id, length == max_new_tokens, length_penalty
            )
            done[row] = sorted(done[row] + finished, key=lambda h: -h.score)[:beams]
            if not going or _settled(done[row], going[0][2], length, beams, length_penalty):
                continue
            alive.append([running[a][beam] + [token] for beam, token, _ in going])
            going += [(going[-1][0], going[-1][1], -torch.inf)] * (beams - len(going))
            alive[-1] += [alive[-1][-1]] * (beams - len(alive[-1]))
            rows += [a * width + beam for beam, _, _ in going]
            tokens += [token for _, token, _ in going]
            values += [value for _, _, value in going]
            still.append(row)
        active, running, width = still, alive, beams
        if not active:
            break
        if rows != list(range(len(ids))):  # a greedy search keeps its rows where they are: nothing to copy
            select(torch.tensor(rows, device=device))
        ids = torch.tensor(tokens, device=device)[:, None]
        scores = torch.tensor(values, device=device).view(len(active), beams)
    return done


def _sort_out(
    running: list[list[int]],
    values: list[float],
    places: list[int],
    vocabulary: int,
    beams: int,
    end_id: int,
    last: bool,
    length_penalty: float,
) -> tuple[list[Hypothesis], list[tuple[int, int, float]]]:
    """A row's candidates, best first -> those that end, and (beam, token, summed log-probability) of those that go on.

    A candidate below the first `beams` may take a place that an end leaves free, but is no answer itself.
    """
    finished, going = [], []
    for rank, (value, place) in enumerate(zip(values, places, strict=True)):
        if value == -torch.inf:
            break
        beam, token = divmod(place, vocabulary)
        if token == end_id or last:
            if rank < beams:
                ids = running[beam] + ([] if token == end_id else [token])
                finished.append(Hypothesis(ids, value / (len(running[beam]) + 1) ** length_penalty))
        elif len(going) < beams:
            going.append((beam, token, value))
    return finished, going


def _settled(done: list[Hypothesis], best: float, length: int, beams: int, length_penalty: float) -> bool:
    """Is the best that still runs, scored at its present length, no better than the worst answer kept?"""
    return len(done) == beams and best / length**length_penalty <= done[-1].score
