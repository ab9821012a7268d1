"""`Index`: embeddings of a folder's files on disk, with incremental updates and search.

LanceDB holds one row per file; `index.json` beside it names the folder and the model. Files with the same bytes are
embedded once: a renamed, copied or touched file costs a hash, no forward pass. Rows are written every few seconds, so an
interrupted update can be resumed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from worldtokens.apps.index.embed import columns_by_modality, select_modalities
from worldtokens.apps.index.fingerprint import model_identity
from worldtokens.apps.index.store import TABLE
from worldtokens.apps.index.update import Report, locked, update_rows
from worldtokens.data.files import EXTENSIONS, Walk, printable, walk
from worldtokens.errors import InputError
from worldtokens.parts import Part, write_whole

DEFAULT_DB = ".worldtokens"

_META, _FORMAT = "index.json", 1


@dataclasses.dataclass(frozen=True)
class Hit:
    """A search result: path, cosine similarity to the query (-1 to 1), and modality."""

    path: str
    score: float
    modality: str


class Index:
    """A searchable index in the folder `db`; nothing is written before `update`.

    Args:
        db: folder of the index. `Index.default(folder)` is the default one for the files of `folder`.

    Raises:
        InputError: lancedb is not installed, or `db` holds other files.
    """

    def __init__(self, db: str | os.PathLike) -> None:
        self.db = Path(db)
        self._lance = lancedb_or_error()
        self._table = None
        self.meta: dict[str, Any] | None = None
        try:
            text = (self.db / _META).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            if self.db.exists() and (
                not self.db.is_dir() or any(p.name != "lock" for p in self.db.iterdir())
            ):
                raise InputError(
                    f"{self.db} is not an index: it holds other files and no {_META}; choose another folder with --db"
                ) from None
            return
        try:
            self.meta = json.loads(text)
            supported = self.meta["format"] == _FORMAT
        except (json.JSONDecodeError, TypeError, KeyError) as e:
            raise InputError(f"{self.db / _META} is damaged ({e}): delete {self.db} and index again") from e
        if not supported:
            raise InputError(
                f"{self.db} has index format {self.meta['format']}, this worldtokens reads {_FORMAT}: index again"
            )

    @staticmethod
    def default(folder: str | os.PathLike) -> Path:
        """Default folder of the index of `folder`."""
        return Path(folder) / DEFAULT_DB

    @classmethod
    def find(cls, path: str | os.PathLike | None = None) -> Index:
        """Open an existing index.

        Args:
            path: folder of an index, or an indexed folder. Default: the nearest index in or above the working directory.

        Raises:
            InputError: there is none.
        """
        if path is not None:
            candidates = [Path(path), cls.default(path)]
        else:
            here = Path.cwd()
            candidates = [cls.default(p) for p in (here, *here.parents)]
        for db in candidates:
            if (db / _META).is_file():
                return cls(db)
        where = f"in {path}" if path is not None else f"in {Path.cwd()} or above it"
        raise InputError(
            f"no index {where}: create one with `worldtokens index FOLDER --model M`, or pass its folder with --db"
        )

    # ---- contents ---------------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """The indexed folder; an index in its default folder may be moved together with the files."""
        return (self.db / self._metadata()["root"]).resolve()

    @property
    def model(self) -> dict[str, str]:
        """`folder`, `identity` and `class` of the model that embedded the files."""
        return self._metadata()["model"]

    def _metadata(self) -> dict[str, Any]:
        if self.meta is None:
            raise InputError(f"{self.db} has no index yet: run `worldtokens index FOLDER --model M`")
        return self.meta

    @property
    def table(self):
        """The LanceDB table, for queries beyond `search`; None while it has no rows."""
        if self._table is None and (self.db / f"{TABLE}.lance").is_dir():
            self._table = self.connect().open_table(TABLE)
        return self._table

    @table.setter
    def table(self, value) -> None:
        self._table = value

    def connect(self):
        """A LanceDB connection to the folder."""
        return self._lance.connect(str(self.db))

    def __len__(self) -> int:
        return self.table.count_rows() if self.table is not None else 0

    def paths(self) -> list[str]:
        """The indexed files, relative to `root`, sorted."""
        return sorted(self.rows())

    def rows(self) -> dict[str, dict]:
        """The rows by path, without their vectors."""
        if self.table is None:
            return {}
        columns = ["id", "path", "hash", "size", "mtime_ns", "modality"]
        rows = self.table.search().select(columns).limit(max(len(self), 1)).to_arrow().to_pylist()
        return {os.fsdecode(row["path"]): row for row in rows}

    def check_model(self, identity: str, name: str) -> None:
        """Raise InputError unless the index was built with the model of this identity."""
        model = self.model
        if identity != model["identity"]:
            raise InputError(
                f"the index {self.db} was built with the model {model['folder']} ({model['identity']}), not with "
                f"{name} ({identity}): their embeddings are not comparable. Search with --model {model['folder']}, or "
                f"index again: `worldtokens index {self.root} --model {name} --rebuild`"
            )

    # ---- search ------------------------------------------------------------------------------------------

    def search(self, vector: Any, k: int = 12, modality: str | None = None) -> list[Hit]:
        """The `k` files with the highest cosine similarity, best first; exact up to `update.ANN_ABOVE` rows.

        Args:
            vector: (dim,) query, of any non-zero length.
            k: number of results, at least 1.
            modality: search only files of this modality ("image", "audio", ...).

        Raises:
            InputError: the index is empty, or the vector has another dim.
        """
        if k < 1:
            raise InputError(f"k is {k}, expected at least 1")
        if modality is not None and modality not in EXTENSIONS:
            raise InputError(f"modality {modality!r}: expected one of {', '.join(EXTENSIONS)}")
        if self.table is None or not len(self):
            raise InputError(f"the index {self.db} is empty: run `worldtokens index FOLDER --model M`")
        vector = np.asarray(vector, dtype=np.float64)
        dim = self.table.schema.field("vector").type.list_size
        if vector.shape != (dim,):
            raise InputError(
                f"the query has shape {vector.shape}, expected ({dim},) as in the index {self.db}"
            )
        length = np.linalg.norm(vector)
        if not np.isfinite(length) or length == 0:
            raise InputError("the query vector is zero or not finite, so cosine similarity is undefined")
        query = self.table.search((vector / length).astype(np.float32), vector_column_name="vector")
        query = query.distance_type("cosine").select(["path", "modality", "_distance"]).limit(k)
        if self.table.list_indices():
            # distances of the ANN index are quantised: take four times as many and rescore them exactly
            query = query.nprobes(32).refine_factor(4)
        if modality is not None:
            query = query.where(f"modality = '{modality}'", prefilter=True)
        hits = [
            Hit(os.path.join(self.root, os.fsdecode(r["path"])), 1.0 - r["_distance"], r["modality"])
            for r in query.to_arrow().to_pylist()
        ]
        return sorted(hits, key=lambda h: (-h.score, h.path))

    # ---- update ----------------------------------------------------------------------------------------

    def update(
        self,
        folder: str | os.PathLike,
        model: Part,
        model_folder: str | os.PathLike = "",
        identity: str | None = None,
        modalities: Sequence[str] | None = None,
        batch_size: int = 32,
        workers: int = 2,
        rebuild: bool = False,
        follow_links: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Update the index from a folder: embed new and changed files, drop deleted ones.

        Args:
            folder: folder to index, with all folders below it.
            model: has `tokenizers` by column and `encode(column, batch) -> (B, dim)`.
            model_folder: folder that the model was loaded from, stored so that a search can load it.
            identity: `model_identity(model)`, if already computed.
            modalities: modalities to index. Default: those of the last update; for a new index all that the model
                embeds except text (text-to-text cosines exceed text-to-image ones, so text files would rank first).
            batch_size: files per forward pass.
            workers: threads that read files.
            rebuild: delete the existing rows first.
            follow_links: enter links to folders.
            progress: called with (files done, files in all).

        Raises:
            InputError: no folder, no files that the model embeds, or another model or folder than before.
        """
        start, root = time.monotonic(), Path(folder)
        if not root.is_dir():
            raise InputError(f"{printable(root)} is not a folder")
        identity = identity or model_identity(model)
        name = os.path.abspath(model_folder) if model_folder else type(model).__name__
        if self.meta is not None and not rebuild:
            self.check_model(identity, name)
            if self.root != root.resolve():
                raise InputError(
                    f"{self.db} is the index of {self.root}, not of {root.resolve()}: choose another folder with --db, "
                    "or replace the old index with --rebuild"
                )
        columns = columns_by_modality(model)
        before = self.meta["modalities"] if self.meta is not None and not rebuild else None
        selected = select_modalities(columns, modalities or before)
        found = walk(root, selected, exclude=[self.db], follow_links=follow_links)
        if not found.files:
            raise InputError(self._no_files(root, found, selected, rebuild))
        self.db.mkdir(parents=True, exist_ok=True)
        with locked(self.db):
            if rebuild and self.table is not None:
                self._table = None
                shutil.rmtree(self.db / f"{TABLE}.lance")
            self._write_meta(
                root, {"folder": name, "identity": identity, "class": type(model).__name__}, selected
            )
            report = update_rows(self, root, found, model, columns, batch_size, workers, progress)
        report.seconds = time.monotonic() - start
        return report

    def _no_files(self, root: Path, found: Walk, selected: Sequence[str], rebuild: bool) -> str:
        expected = "; ".join(f"{m}: {EXTENSIONS[m]}" for m in selected)
        present = ", ".join(f"{n} {ext}" for ext, n in found.other.most_common(6)) or "no files"
        text = f"no files to index in {printable(root)}: found {present}; expected files of {expected}"
        if found.skipped:
            text += f"; {len(found.skipped)} skipped, such as {printable(found.skipped[0].path)} ({found.skipped[0].reason})"
        if len(self) and not rebuild:
            text += (
                f". The index keeps its {len(self)} rows; if the files are deleted for good, delete {self.db}"
            )
        return text

    def _write_meta(self, root: Path, model: dict[str, str], modalities: Sequence[str]) -> None:
        inside = self.db.resolve().parent == root.resolve()
        self.meta = {
            "format": _FORMAT,
            "root": os.pardir if inside else str(root.resolve()),
            "model": model,
            "modalities": list(modalities),
        }
        write_whole(self.db / _META, (json.dumps(self.meta, indent=2) + "\n").encode())


def lancedb_or_error():
    """The lancedb module.

    Raises:
        InputError: lancedb or pyarrow is not installed.
    """
    try:
        import lancedb
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise InputError(
            f"an index needs LanceDB ({e.name} is missing): pip install 'worldtokens[search]'"
        ) from e
    return lancedb
