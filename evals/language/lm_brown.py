"""A small language model of the Brown corpus, beside a Kneser-Ney 5-gram on the same pieces and an LSTM."""

from __future__ import annotations

from pathlib import Path

from worldtokens.evals.base import Result
from worldtokens.evals.language.base import beside

ABOUT = "a language model of the Brown corpus, beside a Kneser-Ney 5-gram and an LSTM of as many parameters"


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Two lines: against the 5-gram and against the LSTM, in bits per byte."""
    return beside("brown", "Brown corpus, whole texts held out", out, scale)
