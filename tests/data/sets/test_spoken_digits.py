"""Spoken digits: what is said, by whom, and that no voice is on two sides."""

import io
import os
import subprocess
import wave

import numpy as np
import pytest

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.data.sets import spoken_digits as spoken


@pytest.fixture(scope="module")
def rows():
    try:
        return samples.open("spoken_digits")
    except wt.InputError as error:
        pytest.skip(f"espeak-ng can't be had here: {error}")


def sound(wav: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_every_voice_says_every_digit(rows):
    names = set(rows.column("voice"))
    assert len(names) >= 90
    assert len(rows) == len(names) * 10 * spoken.TAKES == len(set(rows.column("id")))
    assert {(r["text"], r["class"]) for r in rows[:40]} == set(zip(spoken.WORDS, "0123456789", strict=True))
    assert len(set(rows.column("accent"))) == len(spoken.ACCENTS)


def test_no_voice_is_on_two_sides(rows):
    sides = {side: set(rows.split(side).column("voice")) for side in ("train", "validation", "test")}
    assert sum(map(len, sides.values())) == len(set.union(*sides.values()))
    families = {side: {spoken.family(v) for v in names} for side, names in sides.items()}
    assert not families["train"] & families["test"] and not families["train"] & families["validation"]
    assert min(map(len, sides.values())) >= 5
    assert spoken.family("robosoft7") == spoken.family("robosoft") and spoken.family("f1") != spoken.family(
        "f2"
    )


def test_a_row_is_a_sound_that_can_be_said_again(rows):
    row = rows[len(rows) // 2]
    wave_ = sound(row["audio"])
    assert 0.15 < len(wave_) / 22050 < 3 and np.abs(wave_.astype(int)).max() > 1000
    again = spoken.say(row["text"], f"{row['accent']}+{row['voice']}", row["speed"], row["pitch"])
    assert again == row["audio"]
    assert len(sound(spoken.say("seven", speed=100))) > 1.4 * len(sound(spoken.say("seven", speed=220)))
    read = wt.AudioTokenizer(8, sample_rate=22050, positions="none").read(row["audio"])
    assert np.abs(read.numpy() * 32768 - wave_).max() < 1


def test_what_cant_be_said(rows):
    with pytest.raises(wt.InputError, match=r"voice 'nobody'"):
        spoken.say("seven", "nobody")
    assert sound(spoken.say("--help")).size, "a text is never an option"


def test_without_the_program_the_error_says_what_to_install(tmp_path, monkeypatch):
    spoken._program.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path / "cache"))
    try:
        with pytest.raises(wt.InputError, match=r"apt-get.*Debian"):
            spoken.say("seven")
    finally:
        spoken._program.cache_clear()
    assert os.environ["PATH"] == str(tmp_path) and not list(tmp_path.glob("cache/*"))


def test_a_program_that_doesnt_start_is_told(tmp_path, monkeypatch):
    (tmp_path / "espeak-ng/usr/bin").mkdir(parents=True)
    (tmp_path / "espeak-ng/usr/lib/x").mkdir(parents=True)
    (tmp_path / "espeak-ng/usr/lib/x/libespeak-ng.so.1").write_bytes(b"")
    program = tmp_path / "espeak-ng/usr/bin/espeak-ng"
    program.write_text("#!/bin/sh\necho no libpulse >&2; exit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    monkeypatch.setattr(spoken.shutil, "which", lambda name: None)
    spoken._program.cache_clear()
    try:
        with pytest.raises(wt.InputError, match=r"no libpulse.*apt-get install espeak-ng"):
            spoken.say("seven")
    finally:
        spoken._program.cache_clear()
    assert subprocess.run([program], capture_output=True, check=False).returncode == 127
