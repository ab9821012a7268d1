"""`Index`: the vectors of a folder's files on disk, kept up to date and searched.

LanceDB holds one row a file; `index.json` beside it says which folder and which model they belong to. A file
is embedded once for its bytes: one that was renamed, copied or touched costs a hash, no forward pass. Rows
are written every few seconds, so a run that is stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from worldtokens.apps.index.embed import Job, columns_by_modality, embedded, prepared, wanted_modalities
from worldtokens.apps.index.fingerprint import model_identity
from worldtokens.apps.index.store import TABLE, Writer, quoted
from worldtokens.data.files import EXTENSIONS, Skipped, Walk, shown, walk
from worldtokens.errors import InputError
from worldtokens.parts import Part, write_whole

DEFAULT_DB = ".worldtokens"
ANN_ABOVE = 50_000  # rows; below this the exact search takes a few tens of milliseconds

_META, _FORMAT = "index.json", 1


@dataclasses.dataclass(frozen=True)
class Hit:
    """One answer: the file, its cosine to the query (-1 to 1), and what it holds."""

    path: str
    score: float
    modality: str


@dataclasses.dataclass
class Report:
    """What `Index.update` did, in files.

    `added` and `changed` were embedded, `reused` are new names for bytes already known, `unchanged` were left
    as they were, `removed` have left the index.
    """

    added: int = 0
    changed: int = 0
    reused: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    total: int = 0
    seconds: float = 0.0

    @property
    def embedded(self) -> int:
        return self.added + self.changed


class Index:
    """A searchable index in the folder `db`; nothing is written before `update`.

    Args:
        db: its folder. `Index.default(folder)` is the usual place for the files of `folder`.

    Raises:
        InputError: lancedb is not installed, or the folder holds something else.
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
                    f"{self.db} is not an index: it holds something else and no {_META}; name another place (--db)"
                ) from None
            return
        try:
            self.meta = json.loads(text)
            known = self.meta["format"] == _FORMAT
        except (json.JSONDecodeError, TypeError, KeyError) as e:
            raise InputError(f"{self.db / _META} is damaged ({e}): delete {self.db} and index again") from e
        if not known:
            raise InputError(
                f"{self.db} has index format {self.meta['format']}, this worldtokens reads {_FORMAT}: index again"
            )

    @staticmethod
    def default(folder: str | os.PathLike) -> Path:
        """Where the index of a folder lies unless another place is named."""
        return Path(folder) / DEFAULT_DB

    @classmethod
    def find(cls, place: str | os.PathLike | None = None) -> Index:
        """Open an existing index: a db folder, an indexed folder, or the nearest one above the working folder.

        Raises:
            InputError: there is none.
        """
        if place is not None:
            tried = [Path(place), cls.default(place)]
        else:
            here = Path.cwd()
            tried = [cls.default(p) for p in (here, *here.parents)]
        for db in tried:
            if (db / _META).is_file():
                return cls(db)
        where = f"in {place}" if place is not None else f"in {Path.cwd()} or above it"
        raise InputError(
            f"no index {where}: make one with `worldtokens index FOLDER --model M`, or name it with --db"
        )

    # ---- what it knows -----------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """The folder whose files are indexed; an index in its default place may be moved with its folder."""
        return (self.db / self._known()["root"]).resolve()

    @property
    def model(self) -> dict[str, str]:
        """The model that made the vectors: its `folder`, `identity` and `class`."""
        return self._known()["model"]

    def _known(self) -> dict[str, Any]:
        if self.meta is None:
            raise InputError(f"{self.db} holds no index yet: run `worldtokens index FOLDER --model M`")
        return self.meta

    @property
    def table(self):
        """The LanceDB table, or None while it has no rows; for those who want more than `search`."""
        if self._table is None and (self.db / f"{TABLE}.lance").is_dir():
            self._table = self._connect().open_table(TABLE)
        return self._table

    def _connect(self):
        return self._lance.connect(str(self.db))

    def __len__(self) -> int:
        return self.table.count_rows() if self.table is not None else 0

    def paths(self) -> list[str]:
        """The indexed files, relative to `root`, in sorted order."""
        return sorted(self._rows())

    def _rows(self) -> dict[str, dict]:
        if self.table is None:
            return {}
        columns = ["id", "path", "hash", "size", "mtime_ns", "modality"]
        rows = self.table.search().select(columns).limit(max(len(self), 1)).to_arrow().to_pylist()
        return {os.fsdecode(row["path"]): row for row in rows}

    def check_model(self, identity: str, name: str) -> None:
        """Raise InputError unless the model with this identity made the index."""
        made = self.model
        if identity != made["identity"]:
            raise InputError(
                f"the index {self.db} was made with the model {made['folder']} ({made['identity']}), not with "
                f"{name} ({identity}): their vectors cannot be compared. Search with --model {made['folder']}, or "
                f"index again: `worldtokens index {self.root} --model {name} --rebuild`"
            )

    # ---- searching ---------------------------------------------------------------------------------------

    def search(self, vector: Any, k: int = 12, modality: str | None = None) -> list[Hit]:
        """The `k` files nearest to a vector by cosine, best first; exact up to `ANN_ABOVE` rows.

        Args:
            vector: (dim,) numbers, of any length but zero.
            k: how many answers, at least 1.
            modality: only files of this kind ("image", "audio", ...).

        Raises:
            InputError: the index is empty, or the vector does not fit it.
        """
        if k < 1:
            raise InputError(f"k={k}: ask for at least 1 answer")
        if modality is not None and modality not in EXTENSIONS:
            raise InputError(f"modality {modality!r}: expected one of {', '.join(EXTENSIONS)}")
        if self.table is None or not len(self):
            raise InputError(f"the index {self.db} is empty: run `worldtokens index FOLDER --model M`")
        vector = np.asarray(vector, dtype=np.float64)
        dim = self.table.schema.field("vector").type.list_size
        if vector.shape != (dim,):
            raise InputError(
                f"the query has shape {vector.shape}, the index {self.db} holds vectors of {dim} numbers"
            )
        length = np.linalg.norm(vector)
        if not np.isfinite(length) or length == 0:
            raise InputError("the query's vector is zero or not finite: there is no direction to search in")
        query = self.table.search((vector / length).astype(np.float32), vector_column_name="vector")
        query = query.distance_type("cosine").select(["path", "modality", "_distance"]).limit(k)
        if self.table.list_indices():
            # the index's own distances are rounded: take four times as many and measure those exactly
            query = query.nprobes(32).refine_factor(4)
        if modality is not None:
            query = query.where(f"modality = '{modality}'", prefilter=True)
        hits = [
            Hit(os.path.join(self.root, os.fsdecode(r["path"])), 1.0 - r["_distance"], r["modality"])
            for r in query.to_arrow().to_pylist()
        ]
        return sorted(hits, key=lambda h: (-h.score, h.path))

    # ---- keeping up to date ------------------------------------------------------------------------------

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
        """Bring the index up to date with a folder: embed what is new or changed, drop what is gone.

        Args:
            folder: whose files, with all folders below it.
            model: with `tokenizers` by column and `embed(column, raws) -> (B, dim)`.
            model_folder: where the model was loaded from, kept so that a search can find it.
            identity: `model_identity(model)`, if it's already known.
            modalities: which kinds of files. Default: those of the last update; at first all that the model
                reads, text files left out unless the model reads nothing else (between words and words the
                cosine is higher than between words and images, so that text files would come first).
            batch_size: files in one forward pass.
            workers: threads that read files.
            rebuild: throw the present rows away first.
            follow_links: enter links to folders.
            progress: called with (files done, files to look at).

        Raises:
            InputError: no folder, nothing in it that the model reads, another model or folder than before.
        """
        start, root = time.monotonic(), Path(folder)
        if not root.is_dir():
            raise InputError(f"{shown(root)} is not a folder")
        identity = identity or model_identity(model)
        name = os.path.abspath(model_folder) if model_folder else type(model).__name__
        if self.meta is not None and not rebuild:
            self.check_model(identity, name)
            if self.root != root.resolve():
                raise InputError(
                    f"{self.db} is the index of {self.root}, not of {root.resolve()}: name another place with --db, "
                    "or throw the old one away with --rebuild"
                )
        columns = columns_by_modality(model)
        before = self.meta["modalities"] if self.meta is not None and not rebuild else None
        wanted = wanted_modalities(columns, modalities or before)
        found = walk(root, wanted, leave_out=[self.db], follow_links=follow_links)
        if not found.files:
            raise InputError(self._nothing(root, found, wanted, rebuild))
        self.db.mkdir(parents=True, exist_ok=True)
        with _locked(self.db):
            if rebuild and self.table is not None:
                self._table = None
                shutil.rmtree(self.db / f"{TABLE}.lance")
            self._write_meta(
                root, {"folder": name, "identity": identity, "class": type(model).__name__}, wanted
            )
            report = self._bring_up(root, found, model, columns, batch_size, workers, progress)
        report.seconds = time.monotonic() - start
        return report

    def _nothing(self, root: Path, found: Walk, wanted: Sequence[str], rebuild: bool) -> str:
        kinds = "; ".join(f"{m}: {EXTENSIONS[m]}" for m in wanted)
        there = ", ".join(f"{n} {ext}" for ext, n in found.other.most_common(6)) or "no files"
        text = f"nothing to index in {shown(root)}: found {there}; expected files of {kinds}"
        if found.skipped:
            text += f"; {len(found.skipped)} skipped, such as {shown(found.skipped[0].path)} ({found.skipped[0].reason})"
        if len(self) and not rebuild:
            text += (
                f". The index's {len(self)} rows are kept; if the files are gone for good, delete {self.db}"
            )
        return text

    def _write_meta(self, root: Path, model: dict[str, str], wanted: Sequence[str]) -> None:
        inside = self.db.resolve().parent == root.resolve()
        self.meta = {
            "format": _FORMAT,
            "root": os.pardir if inside else str(root.resolve()),
            "model": model,
            "modalities": list(wanted),
        }
        write_whole(self.db / _META, (json.dumps(self.meta, indent=2) + "\n").encode())

    def _bring_up(self, root, found, model, columns, batch_size, workers, progress) -> Report:
        report, old = Report(skipped=list(found.skipped)), self._rows()
        writer, unread = Writer(self._connect, self.table, old.values()), set()
        jobs: dict[str, list[Job]] = {modality: [] for modality in columns}
        waiting: dict[tuple[str, str], Job] = {}  # (modality, hash) -> the job whose bytes these are

        def embed(modality: str) -> None:
            batch, jobs[modality] = jobs[modality], []
            for job, vector in embedded(model, columns[modality], batch, report.skipped):
                for file in job.files:
                    writer.add(file, job.hash, vector)
                report.changed += job.files[0].path in old
                report.added += job.files[0].path not in old
                report.reused += len(job.files) - 1
            for job in batch:
                waiting.pop((modality, job.hash))

        reading = prepared(root, found.files, old, writer.known, model, columns, workers)
        try:
            for done, (file, job) in enumerate(reading, 1):
                if isinstance(job, OSError):  # its bytes are unknown, not gone: the row stays
                    report.skipped.append(Skipped(file.path, job.strerror or str(job)))
                    unread.add(file.path)
                elif isinstance(job, Exception):
                    report.skipped.append(Skipped(file.path, str(job)))
                elif job is None:
                    report.unchanged += 1
                elif (key := (file.modality, job.hash)) in waiting:
                    waiting[key].files += job.files
                elif key in writer.known:
                    writer.reuse(job.files[0], job.hash)
                    same = file.path in old and old[file.path]["hash"] == job.hash
                    report.unchanged += same
                    report.reused += not same
                else:
                    waiting[key] = job
                    jobs[file.modality].append(job)
                    if len(jobs[file.modality]) >= batch_size:
                        embed(file.modality)
                if progress is not None:
                    progress(done, len(found.files))
            for modality in columns:
                embed(modality)
        finally:
            reading.close()
            writer.flush()  # an interrupt keeps all that is embedded
            self._table = writer.table
        lost = {s.path for s in report.skipped} - unread
        report.removed = self._remove(old, {f.path for f in found.files} - lost, found.blocked)
        self._tidy()
        report.total = len(self)
        return report

    def _remove(self, old: dict[str, dict], keep: set[str], blocked: Sequence[str]) -> int:
        """Drop the rows of files that are gone; what lies in folders that cannot be read may still be there."""
        behind = tuple(f"{folder}/" for folder in blocked)
        gone = [row["id"] for path, row in old.items() if path not in keep and not path.startswith(behind)]
        for at in range(0, len(gone), 1000):
            self.table.delete(f"id IN ({quoted(gone[at : at + 1000])})")
        return len(gone)

    def _tidy(self) -> None:
        """Join the many small pieces that batches left, and index the vectors when there are many."""
        from datetime import timedelta

        if self.table is None:
            return
        self.table.optimize(
            cleanup_older_than=timedelta(minutes=10)
        )  # a search in progress keeps its version
        if len(self) > ANN_ABOVE and not self.table.list_indices():
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # newer releases want config=, older lack it
                self.table.create_index(
                    metric="cosine", vector_column_name="vector", index_type="IVF_HNSW_SQ"
                )


@contextlib.contextmanager
def _locked(db: Path) -> Iterator[None]:
    """One writer at a time; a search needs no lock."""
    try:
        import fcntl
    except ImportError:  # not on Windows, where two runs at once remain the user's care
        yield
        return
    with open(db / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another `worldtokens index` is at work on {db}: wait until it has ended"
            ) from None
        yield


def lancedb_or_error():
    try:
        import lancedb
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise InputError(
            f"an index needs LanceDB ({e.name} is missing): pip install 'worldtokens[search]'"
        ) from e
    return lancedb
