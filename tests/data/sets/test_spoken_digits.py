"""Spoken digits: every voice and digit, disjoint voices per split, reproducible audio."""

import io
import wave

import numpy as np
import pytest

import worldtokens as wt
from worldtokens.data import espeak, samples
from worldtokens.data.sets import spoken_digits


@pytest.fixture(scope="module")
def rows():
    try:
        return samples.open("spoken_digits")
    except wt.InputError as error:
        pytest.skip(f"no espeak-ng: {error}")


def waveform(wav: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_every_voice_has_every_digit(rows):
    names = set(rows.column("voice"))
    assert len(names) >= 90
    assert len(rows) == len(names) * 10 * spoken_digits.TAKES == len(set(rows.column("id")))
    assert {(r["text"], r["class"]) for r in rows[:40]} == set(
        zip(spoken_digits.WORDS, "0123456789", strict=True)
    )
    assert len(set(rows.column("accent"))) == len(espeak.ACCENTS)


def test_no_voice_family_is_in_two_splits(rows):
    splits = {split: set(rows.split(split).column("voice")) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values()))
    families = {split: {espeak.voice_family(v) for v in names} for split, names in splits.items()}
    assert not families["train"] & families["test"] and not families["train"] & families["validation"]
    assert min(map(len, splits.values())) >= 5
    assert espeak.voice_family("robosoft7") == espeak.voice_family("robosoft") and espeak.voice_family(
        "f1"
    ) != espeak.voice_family("f2")


def test_a_row_is_reproducible_audio(rows):
    row = rows[len(rows) // 2]
    audio = waveform(row["audio"])
    assert 0.15 < len(audio) / 22050 < 3 and np.abs(audio.astype(int)).max() > 1000
    again = espeak.synthesize(row["text"], f"{row['accent']}+{row['voice']}", row["speed"], row["pitch"])
    assert again == row["audio"]
    assert len(waveform(espeak.synthesize("seven", speed=100))) > 1.4 * len(
        waveform(espeak.synthesize("seven", speed=220))
    )
    read = wt.AudioTokenizer(8, sample_rate=22050, positions="none").read(row["audio"])
    assert np.abs(read.numpy() * 32768 - audio).max() < 1
