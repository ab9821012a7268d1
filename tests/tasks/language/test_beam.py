"""Beam search: exhaustive when wide enough, equal to Hugging Face's, independent rows."""

import itertools

import pytest
import torch

from worldtokens.tasks.language.beam import beam_search

END = 0


class Chain:
    """A trigram model: the next token's logits depend on the row number and the last two tokens."""

    def __init__(self, rows, vocabulary=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.table = 2 * torch.randn(rows, vocabulary, vocabulary, vocabulary, generator=g)
        self.ids, self.row = None, torch.arange(rows)

    def step(self, ids):
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        return self.table[self.row, self.ids[:, -2], self.ids[:, -1]]

    def select(self, rows):
        self.ids, self.row = self.ids[rows], self.row[rows]

    def search(self, prefix, **how):
        return beam_search(self.step, self.select, prefix, end_id=END, **how)


def all_sequences(table, prefix, longest, penalty):
    """All sequences that end or reach the maximum length, scored one by one, best first."""
    vocabulary, found = len(table), []
    logp = table.log_softmax(-1)
    for n in range(1, longest + 1):
        for ids in itertools.product(range(vocabulary), repeat=n):
            if END in ids[:-1] or (ids[-1] != END and n < longest):
                continue
            whole, score = [*prefix, *ids], 0.0
            for i in range(n):
                score += float(logp[whole[i], whole[i + 1], whole[i + 2]])
            found.append((score / n**penalty, [t for t in ids if t != END]))
    return sorted(found, key=lambda f: -f[0])


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_search_finds_the_best_of_all_sequences(penalty):
    prefix, longest = torch.tensor([[1, 2], [3, 1], [2, 2]]), 4
    chain = Chain(3)
    found = chain.search(prefix, beams=300, max_new_tokens=longest, length_penalty=penalty)
    for row in range(3):
        best = all_sequences(chain.table[row], prefix[row].tolist(), longest, penalty)
        assert found[row][0].ids == best[0][1]
        assert [h.score for h in found[row][:20]] == pytest.approx([b[0] for b in best[:20]], abs=1e-4)


def test_more_beams_find_what_greedy_search_misses():
    """First token 0.6, then ten equal tokens, against first token 0.4, then a certain one."""
    logits = torch.full((12, 12), -30.0)
    logits[1, 2], logits[1, 3] = torch.tensor(0.6).log(), torch.tensor(0.4).log()
    logits[2, 2:] = 0.0
    logits[3, END] = 0.0
    state = {"last": None}

    def step(ids):
        state["last"] = ids[:, -1]
        return logits[state["last"]]

    how = {"max_new_tokens": 2, "end_id": END, "length_penalty": 0.0}
    greedy = beam_search(step, lambda rows: None, torch.tensor([[1]]), beams=1, **how)
    wide = beam_search(step, lambda rows: None, torch.tensor([[1]]), beams=2, **how)
    assert greedy[0][0].ids[0] == 2 and wide[0][0].ids == [3]
    assert wide[0][0].score == pytest.approx(torch.tensor(0.4).log().item(), abs=1e-4)


def test_one_beam_is_greedy_search():
    chain = Chain(6, 9)
    prefix = torch.randint(1, 9, (6, 2), generator=torch.Generator().manual_seed(1))
    found = chain.search(prefix, beams=1, max_new_tokens=12)
    for row in range(6):
        ids = prefix[row].tolist()
        while len(ids) < 14 and END not in ids:
            ids.append(int(chain.table[row, ids[-2], ids[-1]].argmax()))
        assert found[row][0].ids == [t for t in ids[2:] if t != END]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_gives_the_results_of_single_rows(beams):
    prefix = torch.randint(1, 7, (8, 2), generator=torch.Generator().manual_seed(2))
    whole = Chain(8, 7).search(prefix, beams=beams, max_new_tokens=8)
    for row in range(8):
        chain = Chain(8, 7)
        chain.row = torch.tensor([row])
        assert chain.search(prefix[row : row + 1], beams=beams, max_new_tokens=8)[0] == whole[row]


def test_suppressed_ids_are_never_generated_and_others_keep_their_probability():
    prefix = torch.tensor([[1, 1]] * 5)
    free = Chain(5, 6).search(prefix, beams=4, max_new_tokens=6)
    assert any(3 in h.ids for row in free for h in row)
    suppressed = Chain(5, 6).search(prefix, beams=4, max_new_tokens=6, suppress=[3], suppress_first=[END, 2])
    assert not any(3 in h.ids or h.ids[:1] in ([], [2]) for row in suppressed for h in row)
    chain = Chain(1, 6)
    (one,) = chain.search(prefix[:1], beams=1, max_new_tokens=1, suppress=[3])
    assert one[0].score == pytest.approx(float(chain.table[0, 1, 1].log_softmax(-1)[one[0].ids[0]]), abs=1e-5)


def test_settings_out_of_range_raise():
    with pytest.raises(ValueError, match="beams=0"):
        Chain(1).search(torch.tensor([[1, 1]]), beams=0, max_new_tokens=3)


@pytest.mark.parametrize("beams,penalty", [(1, 1.0), (2, 0.0), (4, 1.0), (5, 0.6), (3, 2.0)])
def test_hypotheses_equal_hugging_faces(beams, penalty):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    cfg = GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    cfg.eos_token_id = cfg.bos_token_id = cfg.pad_token_id = END
    model = GPT2LMHeadModel(cfg).eval()
    for p in model.parameters():
        p.data.mul_(6)  # far from uniform, so that lengths differ
    prefix = torch.randint(1, 23, (6, 3))
    state = {}

    def step(ids):
        state["ids"] = torch.cat([state["ids"], ids], 1) if state else ids
        return model(state["ids"]).logits[:, -1]

    def select(rows):
        state["ids"] = state["ids"][rows]

    how = {"max_new_tokens": 9, "length_penalty": penalty}
    ours = beam_search(step, select, prefix, beams=beams, end_id=END, **how)
    mask = torch.ones_like(prefix)
    how |= {"num_beams": beams, "num_return_sequences": beams, "do_sample": False, "output_scores": True}
    theirs = model.generate(prefix, attention_mask=mask, return_dict_in_generate=True, **how)
    ids = theirs.sequences[:, 3:].view(6, beams, -1).tolist()
    ids = [[s[: s.index(END)] if END in s else s for s in row] for row in ids]
    assert [[h.ids for h in row] for row in ours] == ids
    assert penalty > 1 or len({len(s) for row in ids for s in row}) > 1
    if beams > 1:
        scores = theirs.sequences_scores.view(6, beams)
        assert (torch.tensor([[h.score for h in row] for row in ours]) - scores).abs().max() < 1e-5
