"""Language model of the Brown corpus; baselines: a Kneser-Ney 5-gram on the same tokens, and an LSTM."""

from __future__ import annotations

from pathlib import Path

from worldtokens.evals.base import Result
from worldtokens.evals.language.base import compare

ABOUT = "language model of the Brown corpus, compared with a Kneser-Ney 5-gram and an LSTM of the same size"


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Bits per byte, compared with the 5-gram and with the LSTM."""
    return compare("brown", "Brown corpus, whole texts held out", out, scale)
