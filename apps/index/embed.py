"""Embedding of files: hashing and reading in threads, then batches through the model."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from worldtokens.data.files import EXTENSIONS, File, Skipped, content_hash
from worldtokens.errors import InputError
from worldtokens.parts import Part

# a younger file may change again within the resolution of its time stamp, so its hash alone is compared
FRESH_NS = 2_000_000_000


@dataclasses.dataclass
class Job:
    """Files with the same bytes, and what `read` returned; `raw` is None if these bytes are already embedded."""

    files: list[File]
    hash: str
    raw: Any = None


def columns_by_modality(model: Part) -> dict[str, str]:
    """Modality of a file -> the column of the model that embeds it."""
    columns: dict[str, str] = {}
    for name, tokenizer in model.tokenizers.items():
        if tokenizer.modality in EXTENSIONS and (
            name == tokenizer.modality or tokenizer.modality not in columns
        ):
            columns[tokenizer.modality] = name
    return columns


def select_modalities(columns: dict[str, str], requested: Sequence[str] | None) -> list[str]:
    """The modalities to index: the requested ones, else all that the model embeds except text.

    Raises:
        InputError: the model does not embed a requested modality, or none of files.
    """
    if requested:
        unknown = [m for m in requested if m not in columns]
        if unknown:
            raise InputError(f"the model does not embed {', '.join(unknown)}; it embeds {', '.join(columns)}")
        return list(dict.fromkeys(requested))
    selected = [m for m in columns if m != "text"] or list(columns)
    if not selected:
        raise InputError(f"the model embeds none of {', '.join(EXTENSIONS)}: it cannot index files")
    return selected


def read_jobs(
    root, files, old, known, model, columns, workers
) -> Iterator[tuple[File, Job | Exception | None]]:
    """Hash and read files in threads, with prefetching; in the order of `files`.

    Args:
        root: folder that the files' paths are relative to.
        files: the files to read.
        old: rows of the index by path.
        known: (modality, hash) of bytes already embedded, which are not decoded again.
        model: its front-ends read the files.
        columns: modality -> column.
        workers: number of threads.

    Yields:
        A file with its job, with None if it is unchanged, or with the error of reading it: an OSError if its bytes
        could not be read.
    """

    def prepare(file: File) -> Job | Exception | None:
        row = old.get(file.path)
        if row is not None and (row["size"], row["mtime_ns"]) == (file.size, file.mtime_ns):
            return None
        path = os.path.join(root, file.path)
        try:
            digest = content_hash(path)
        except OSError as e:
            return e
        if time.time_ns() - file.mtime_ns < FRESH_NS:
            file = dataclasses.replace(file, mtime_ns=-1)
        job = Job([file], digest)
        if (file.modality, digest) in known:
            return job
        try:
            job.raw = model.tokenizers[columns[file.modality]].read(_source(path, file.modality))
        except InputError as e:
            return InputError(str(e).removeprefix(f"{path}: "))  # the list of skipped files has the path
        except Exception as e:
            # decoders raise any exception for malformed bytes: the file is reported as skipped
            return InputError(f"{type(e).__name__}: {e}")
        return job

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        ahead, files = deque(), iter(files)
        try:
            while True:
                while len(ahead) < 8 * max(workers, 1) and (file := next(files, None)) is not None:
                    ahead.append((file, pool.submit(prepare, file)))
                if not ahead:
                    return
                file, future = ahead.popleft()
                yield file, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _source(path: str, modality: str) -> str:
    """Source for a front-end's `read`: the path, or for text the content of the file."""
    if modality != "text":
        return path
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise InputError(f"not UTF-8 text ({e.reason} at byte {e.start})") from e


def embed_jobs(
    model: Part, column: str, jobs: list[Job], skipped: list[Skipped]
) -> Iterator[tuple[Job, np.ndarray]]:
    """Yield each job with its vector, (dim,) float32 of unit length.

    A batch that raises InputError is retried file by file; a file that raises, or has a vector that is not finite, is
    added to `skipped`.
    """
    if not jobs:
        return
    try:
        with torch.inference_mode():
            batch = model.tokenizers[column].collate([job.raw for job in jobs]).to(model.device)
            vectors = model.encode(column, batch).float().cpu().numpy()
    except InputError as e:
        if len(jobs) > 1:
            for job in jobs:
                yield from embed_jobs(model, column, [job], skipped)
        else:
            skipped += [Skipped(f.path, str(e)) for f in jobs[0].files]
        return
    for job, vector in zip(jobs, vectors, strict=True):
        if np.isfinite(vector).all():
            yield job, vector
        else:
            skipped += [Skipped(f.path, "its embedding is not finite") for f in job.files]
