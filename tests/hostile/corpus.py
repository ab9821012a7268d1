"""The hostile corpus: small files that break typical readers, each with its expected result.

    python tests/hostile/corpus.py FOLDER        # writes all files, and expected.json

The repository has only these scripts; the tests generate the files. A case is a kind (a front-end of `worker.py`), a path,
the expected result (a number of tokens, or a pattern of the error) and the bytes. If the count alone could hide a wrong
result, `check` tests the raw sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import audio_cases  # noqa: F401
import image_cases  # noqa: F401
import latents_cases  # noqa: F401
import manifest_cases  # noqa: F401
import points_cases  # noqa: F401
import series_cases  # noqa: F401
import text_cases  # noqa: F401
import video_cases  # noqa: F401
import views_cases  # noqa: F401
from cases import CASES, Case


def write(folder: Path) -> list[Case]:
    """Writes all files of the corpus into `folder`."""
    for c in CASES:
        path = c.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = c.make(path) if c.make.__code__.co_argcount > len(c.make.__defaults__ or ()) else c.make()
        if isinstance(data, bytes):
            path.write_bytes(data)
        elif isinstance(data, dict):
            for name, content in data.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(content)
    return CASES


if __name__ == "__main__":
    out = Path(sys.argv[1])
    expected = [{"kind": c.kind, "name": c.name, "expected": c.expected} for c in write(out)]
    (out / "expected.json").write_text(json.dumps(expected, indent=1))
    print(f"{len(expected)} files in {out}")
