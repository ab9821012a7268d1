"""Buffered writing of an index's rows."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time

import numpy as np

from worldtokens.data.files import File

TABLE = "items"
WRITE_ROWS, WRITE_SECONDS = 256, 5.0


class Writer:
    """Buffers rows and writes them every few seconds, each batch in one transaction.

    Args:
        connect: returns a LanceDB connection to the index's folder.
        table: the table, or None before the first row.
        rows: its rows, without their vectors.
    """

    def __init__(self, connect, table, rows) -> None:
        self.connect, self.table = connect, table
        self.pending: list[dict] = []
        self.reuses: list[tuple[File, str]] = []
        self.written = time.monotonic()
        # known vectors are read from the present version of the table, since their rows may be overwritten
        self.before = None
        if table is not None:
            self.before = connect().open_table(TABLE)
            self.before.checkout(self.before.version)
        # (modality, hash) -> id of the row with the vector, and whether it is in the present version
        self.known = {(row["modality"], row["hash"]): (row["id"], True) for row in rows}

    def add(self, file: File, digest: str, vector: np.ndarray) -> None:
        """Add a file with a new vector."""
        self._append(file, digest, vector)
        self.known.setdefault((file.modality, digest), (row_id(file.path), False))
        self._flush_when_due()

    def reuse(self, file: File, digest: str) -> None:
        """Add a file whose bytes are `known`."""
        self.reuses.append((file, digest))
        self._flush_when_due()

    def _append(self, file: File, digest: str, vector: np.ndarray) -> None:
        row = dataclasses.asdict(file) | {"id": row_id(file.path), "hash": digest, "vector": vector}
        self.pending.append(row | {"path": os.fsencode(file.path)})

    def _flush_when_due(self) -> None:
        late = time.monotonic() - self.written > WRITE_SECONDS
        if late or len(self.pending) + len(self.reuses) >= WRITE_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write all buffered rows."""
        self._write()  # first, since a file may reuse a vector of this run
        for was_before in (True, False):
            pairs = [(f, d) for f, d in self.reuses if self.known[f.modality, d][1] == was_before]
            if not pairs:
                continue
            ids = {self.known[f.modality, d][0] for f, d in pairs}
            table = self.before if was_before else self.table
            query = table.search().where(f"id IN ({quoted(ids)})").select(["id", "vector"]).limit(len(ids))
            vectors = {row["id"]: np.float32(row["vector"]) for row in query.to_arrow().to_pylist()}
            for file, digest in pairs:
                self._append(file, digest, vectors[self.known[file.modality, digest][0]])
        self.reuses = []
        self._write()

    def _write(self) -> None:
        import pyarrow as pa

        self.written = time.monotonic()
        if not self.pending:
            return
        rows = self.pending
        dim = len(rows[0]["vector"])
        schema = pa.schema(
            [
                ("id", pa.string()),
                ("path", pa.binary()),  # bytes, since paths need not be UTF-8
                ("modality", pa.string()),
                ("size", pa.int64()),
                ("mtime_ns", pa.int64()),
                ("hash", pa.string()),
                ("vector", pa.list_(pa.float32(), dim)),
            ]
        )
        columns = {f.name: [row[f.name] for row in rows] for f in schema if f.name != "vector"}
        flat = pa.array(np.concatenate([row["vector"] for row in rows]).astype(np.float32))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, dim)
        data = pa.table(columns, schema=schema)
        if self.table is None:
            self.table = self.connect().create_table(TABLE, data)
        else:
            merge = self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(data)
        self.pending = []


def row_id(path: str) -> str:
    """Key of a file in the table: hex digits, which need no quoting in a filter."""
    return hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()


def quoted(ids) -> str:
    """Row ids as a list for SQL ``IN``."""
    return ", ".join(f"'{i}'" for i in ids)
