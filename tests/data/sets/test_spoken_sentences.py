"""Spoken sentences: the grammar, and splits with unseen sentences and unseen voices."""

import random

import pytest

from worldtokens.data import espeak, fetch, samples
from worldtokens.data.sets.spoken_sentences import COUNTS, WORDS, sentence

in_cache = pytest.mark.skipif(
    not (fetch.cache_folder() / "spoken_sentences").is_dir(),
    reason="the set is not in the cache: samples.open('spoken_sentences') synthesises it",
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


@in_cache
def test_splits_share_no_sentence_and_no_voice():
    splits = {split: samples.open("spoken_sentences", split=split) for split in COUNTS}
    assert {split: len(rows) for split, rows in splits.items()} == COUNTS
    texts = [set(rows.column("text")) for rows in splits.values()]
    voices = [{espeak.voice_family(v) for v in rows.column("voice")} for rows in splits.values()]
    for sets in (texts, voices):
        assert sum(map(len, sets)) == len(set.union(*sets))
    assert min(map(len, voices)) >= 4


@in_cache
def test_a_row_is_read_as_audio():
    import worldtokens as wt

    row = samples.open("spoken_sentences", split="test")[0]
    waveform = wt.AudioTokenizer(dim=16, sample_rate=11025, n_mels=20).read(row["audio"])
    assert 0.5 < len(waveform) / 11025 < 8 and waveform.abs().max() > 0.05
