"""The update of an index: embeds new and changed files, drops the rows of deleted ones, and maintains the table."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from worldtokens.apps.index.embed import Job, embed_jobs, read_jobs
from worldtokens.apps.index.store import Writer, quoted
from worldtokens.data.files import Skipped, Walk
from worldtokens.errors import InputError
from worldtokens.parts import Part

ANN_ABOVE = 50_000  # rows; below this an exact search takes a few tens of milliseconds


class IndexTable(Protocol):
    """What an update needs of an `Index`: its table, and how to open one."""

    table: Any

    def __len__(self) -> int: ...
    def rows(self) -> dict[str, dict]: ...
    def connect(self) -> Any: ...


@dataclasses.dataclass
class Report:
    """Result of `Index.update`, in numbers of files.

    `added` and `changed` were embedded, `reused` are new paths of bytes already embedded, `unchanged` were not read,
    `removed` were dropped from the index.
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


def update_rows(
    index: IndexTable,
    root: Path,
    found: Walk,
    model: Part,
    columns: dict[str, str],
    batch_size: int,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> Report:
    """Bring the table's rows up to date with the files found in `root`.

    Args:
        index: its table is written.
        root: folder that the files' paths are relative to.
        found: the files, from `walk`.
        model: embeds the files.
        columns: modality -> the model's column.
        batch_size: files per forward pass.
        workers: threads that read files.
        progress: called with (files done, files in all).
    """
    report, old = Report(skipped=list(found.skipped)), index.rows()
    writer, unread = Writer(index.connect, index.table, old.values()), set()
    jobs: dict[str, list[Job]] = {modality: [] for modality in columns}
    waiting: dict[tuple[str, str], Job] = {}  # (modality, hash) -> the queued job with these bytes

    def embed(modality: str) -> None:
        batch, jobs[modality] = jobs[modality], []
        for job, vector in embed_jobs(model, columns[modality], batch, report.skipped):
            for file in job.files:
                writer.add(file, job.hash, vector)
            report.changed += job.files[0].path in old
            report.added += job.files[0].path not in old
            report.reused += len(job.files) - 1
        for job in batch:
            waiting.pop((modality, job.hash))

    reading = read_jobs(root, found.files, old, writer.known, model, columns, workers)
    try:
        for done, (file, job) in enumerate(reading, 1):
            if isinstance(job, OSError):  # the bytes are unknown, the file is not deleted: its row stays
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
        writer.flush()  # an interrupted update keeps the rows embedded so far
        index.table = writer.table
    invalid = {s.path for s in report.skipped} - unread
    report.removed = remove_rows(index, old, {f.path for f in found.files} - invalid, found.unreadable)
    optimise(index)
    report.total = len(index)
    return report


def remove_rows(index: IndexTable, old: dict[str, dict], keep: set[str], unreadable: Sequence[str]) -> int:
    """Drop the rows of deleted files; files in unreadable folders may still exist, so their rows stay."""
    prefixes = tuple(f"{folder}/" for folder in unreadable)
    gone = [row["id"] for path, row in old.items() if path not in keep and not path.startswith(prefixes)]
    for start in range(0, len(gone), 1000):
        index.table.delete(f"id IN ({quoted(gone[start : start + 1000])})")
    return len(gone)


def optimise(index: IndexTable) -> None:
    """Compact the fragments that batches left, and build an ANN index above `ANN_ABOVE` rows."""
    if index.table is None:
        return
    # recent versions stay, since a search in progress may read them
    index.table.optimize(cleanup_older_than=timedelta(minutes=10))
    if len(index) > ANN_ABOVE and not index.table.list_indices():
        with warnings.catch_warnings():
            # newer releases prefer config=, older ones lack it
            warnings.simplefilter("ignore", DeprecationWarning)
            index.table.create_index(metric="cosine", vector_column_name="vector", index_type="IVF_HNSW_SQ")


@contextlib.contextmanager
def locked(db: Path) -> Iterator[None]:
    """Exclusive lock of writers; a search takes no lock.

    Raises:
        InputError: another process updates the index.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl: concurrent updates are not detected there
        yield
        return
    with open(db / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another `worldtokens index` is updating {db}: wait until it has finished"
            ) from None
        yield
