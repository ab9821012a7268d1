"""The hostile corpus: small files on which readers of this kind go wrong, each with what is right.

    python tests/hostile/make.py FOLDER        # writes them all, with expected.json beside them

Nothing is kept in the repository but these scripts; the tests write the files anew. A case is a kind (a front-end of
`worker.py`), a path, what is right (a number of tokens, or a pattern of the complaint) and the bytes. Where the count alone
could hide a wrong reading, `check` looks at the raw sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import clips  # noqa: F401
import pictures  # noqa: F401
import shapes  # noqa: F401
import sounds  # noqa: F401
import words  # noqa: F401
from cases import CASES, Case


def write(folder: Path) -> list[Case]:
    """All files of the corpus below `folder`."""
    for c in CASES:
        path = c.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = c.make(path) if c.make.__code__.co_argcount > len(c.make.__defaults__ or ()) else c.make()
        if isinstance(data, bytes):
            path.write_bytes(data)
        elif isinstance(data, dict):
            for name, part in data.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(part)
    return CASES


if __name__ == "__main__":
    out = Path(sys.argv[1])
    told = [{"kind": c.kind, "name": c.name, "right": c.right} for c in write(out)]
    (out / "expected.json").write_text(json.dumps(told, indent=1))
    print(f"{len(told)} files in {out}")
