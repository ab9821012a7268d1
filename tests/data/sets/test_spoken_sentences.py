"""Spoken sentences: the grammar, and what the set promises of its split."""

import random

import pytest

from worldtokens.data import fetch, samples
from worldtokens.data.sets.spoken_digits import family
from worldtokens.data.sets.spoken_sentences import COUNTS, WORDS, sentence

made = pytest.mark.skipif(
    not (fetch.cache_folder() / "spoken_sentences").is_dir(),
    reason="the set isn't in the cache: samples.open('spoken_sentences') makes it with espeak-ng",
)


def test_sentences_are_of_the_grammar():
    rng = random.Random(0)
    texts = {sentence(rng) for _ in range(3000)}
    known = {w for words in WORDS.values() for w in words} | {"the", "and", "is", "where"}
    plural = known | {w + "s" for w in WORDS["thing"] + WORDS["place"]}
    assert all(set(t.split()) <= plural and 3 <= len(t.split()) <= 8 for t in texts)
    assert len(texts) > 2000
    doubled = [t for t in texts if len([w for w in t.split() if w in WORDS["number"]]) == 2]
    assert doubled and all(t.split()[0] != t.split()[3] for t in doubled)


@made
def test_test_rows_are_unseen_sentences_by_unheard_voices():
    sides = {side: samples.open("spoken_sentences", split=side) for side in COUNTS}
    assert {side: len(rows) for side, rows in sides.items()} == COUNTS
    texts = [set(rows.column("text")) for rows in sides.values()]
    heard = [{family(v) for v in rows.column("voice")} for rows in sides.values()]
    for sets in (texts, heard):
        assert sum(map(len, sets)) == len(set.union(*sets))
    assert min(map(len, heard)) >= 4


@made
def test_a_row_is_read_as_sound():
    import worldtokens as wt

    row = samples.open("spoken_sentences", split="test")[0]
    wave = wt.AudioTokenizer(dim=16, sample_rate=11025, n_mels=20).read(row["audio"])
    assert 0.5 < len(wave) / 11025 < 8 and wave.abs().max() > 0.05
