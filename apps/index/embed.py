"""From files to vectors: hashing and reading in threads, then batches through the model."""

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

FRESH_NS = (
    2_000_000_000  # a file this young may change again within its time stamp's grain: trust its hash only
)


@dataclasses.dataclass
class Job:
    """Files with the same bytes, and what was read from them; `raw` is None if the vector is known already."""

    files: list[File]
    hash: str
    raw: Any = None


def columns_by_modality(model: Part) -> dict[str, str]:
    """Modality of a file -> the model's column that reads it."""
    columns: dict[str, str] = {}
    for name, tokenizer in model.tokenizers.items():
        if tokenizer.modality in EXTENSIONS and (
            name == tokenizer.modality or tokenizer.modality not in columns
        ):
            columns[tokenizer.modality] = name
    return columns


def wanted_modalities(columns: dict[str, str], asked: Sequence[str] | None) -> list[str]:
    """The kinds of files to index: those asked for, else all that the model reads but text.

    Raises:
        InputError: the model does not read what was asked for.
    """
    if asked:
        lacking = [m for m in asked if m not in columns]
        if lacking:
            raise InputError(f"the model does not read {', '.join(lacking)}; it reads {', '.join(columns)}")
        return list(dict.fromkeys(asked))
    wanted = [m for m in columns if m != "text"] or list(columns)
    if not wanted:
        raise InputError(
            f"the model reads none of {', '.join(EXTENSIONS)}: there are no files to index for it"
        )
    return wanted


def prepared(
    root, files, old, known, model, columns, workers
) -> Iterator[tuple[File, Job | Exception | None]]:
    """Hash and read files in threads, a few ahead of their use; in the files' order.

    Args:
        root: the folder that the files' paths begin at.
        files: to look at.
        old: the index's rows by path.
        known: (modality, hash) of bytes whose vector is there already: they are not decoded.
        model: its front-ends read the files.
        columns: modality -> column.
        workers: threads.

    Yields:
        A file with its job, with None if it has not changed, or with the error that its reading raised: an OSError
        if the bytes could not be had at all.
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
            return InputError(str(e).removeprefix(f"{path}: "))  # the list of skipped files names it already
        except Exception as e:
            # decoders raise anything for hostile bytes: it is reported, and the rest goes on
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
    """What a front-end reads: the file itself, or for text what is written in it."""
    if modality != "text":
        return path
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise InputError(f"not UTF-8 text ({e.reason} at byte {e.start})") from e


def embedded(
    model: Part, column: str, jobs: list[Job], skipped: list[Skipped]
) -> Iterator[tuple[Job, np.ndarray]]:
    """Each job with its vector, (dim,) float32 of unit length.

    A batch that the model refuses is tried file by file; a file that it refuses, or gives no finite vector for,
    is added to `skipped`.
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
                yield from embedded(model, column, [job], skipped)
        else:
            skipped += [Skipped(f.path, str(e)) for f in jobs[0].files]
        return
    for job, vector in zip(jobs, vectors, strict=True):
        if np.isfinite(vector).all():
            yield job, vector
        else:
            skipped += [Skipped(f.path, "the model gave a vector that is not finite") for f in job.files]
