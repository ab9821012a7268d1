"""The download cache: complete or absent, filled once; errors say what to install."""

import pytest

from worldtokens.data import fetch, samples
from worldtokens.errors import InputError


def test_a_missing_program_raises_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs the program 'apt-get'.*Debian"):
        samples.open("stamps")
    assert not list((tmp_path / "cache").iterdir())  # no temporary folder is left


def test_the_cache_is_filled_once_and_completely(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "x").write_text("x")
        if len(calls) == 1:
            raise InputError("the connection broke")

    with pytest.raises(InputError, match="connection broke"):
        fetch.cached("set", fill)
    assert not list(tmp_path.iterdir())
    assert fetch.cached("set", fill) == fetch.cached("set", fill) == tmp_path / "set"
    assert len(calls) == 2 and (tmp_path / "set/x").read_text() == "x"
