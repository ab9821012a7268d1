"""Speech synthesis with espeak-ng: reproducible audio, and errors that say what to install."""

import io
import os
import subprocess
import wave

import numpy as np
import pytest

import worldtokens as wt
from worldtokens.data import espeak


def waveform(wav: bytes) -> np.ndarray:
    """int16 (T,)."""
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Skips the module if espeak-ng is neither installed nor downloadable."""
    try:
        espeak.voices()
    except wt.InputError as error:
        pytest.skip(f"no espeak-ng: {error}")


def test_speed_and_duration():
    slow, fast = (len(waveform(espeak.synthesize("seven", speed=s))) for s in (100, 220))
    assert slow > 1.4 * fast


def test_voices_of_one_family():
    assert espeak.voice_family("robosoft7") == espeak.voice_family("robosoft")
    assert espeak.voice_family("f1") != espeak.voice_family("f2")


def test_unknown_voices_raise_and_text_is_never_an_option():
    with pytest.raises(wt.InputError, match=r"voice 'nobody'"):
        espeak.synthesize("seven", "nobody")
    assert waveform(espeak.synthesize("--help")).size


def test_a_missing_program_raises_with_what_to_install(tmp_path, monkeypatch):
    espeak._program.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path / "cache"))
    try:
        with pytest.raises(wt.InputError, match=r"apt-get.*Debian"):
            espeak.synthesize("seven")
    finally:
        espeak._program.cache_clear()
    assert os.environ["PATH"] == str(tmp_path) and not list(tmp_path.glob("cache/*"))


def test_a_program_that_does_not_start_raises(tmp_path, monkeypatch):
    (tmp_path / "espeak-ng/usr/bin").mkdir(parents=True)
    (tmp_path / "espeak-ng/usr/lib/x").mkdir(parents=True)
    (tmp_path / "espeak-ng/usr/lib/x/libespeak-ng.so.1").write_bytes(b"")
    program = tmp_path / "espeak-ng/usr/bin/espeak-ng"
    program.write_text("#!/bin/sh\necho no libpulse >&2; exit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    monkeypatch.setattr(espeak.shutil, "which", lambda name: None)
    espeak._program.cache_clear()
    try:
        with pytest.raises(wt.InputError, match=r"no libpulse.*apt-get install espeak-ng"):
            espeak.synthesize("seven")
    finally:
        espeak._program.cache_clear()
    assert subprocess.run([program], capture_output=True, check=False).returncode == 127
