"""Files of a folder, sorted by what they hold: the walk under `worldtokens index`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection
from pathlib import Path

EXTENSIONS = {
    "image": ".jpg .jpeg .jpe .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm .avif .heic .tga",
    "audio": ".wav .flac .mp3 .ogg .oga .opus .m4a .aac .aif .aiff .wma",
    "video": ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .ogv .wmv .3gp",
    "points": ".obj .ply .off .stl .glb .gltf .xyz .pts .npz .npy",
    "series": ".csv .tsv",
    "text": ".txt .md",
}
_MODALITY = {ext: modality for modality, exts in EXTENSIONS.items() for ext in exts.split()}


@dataclasses.dataclass(frozen=True)
class File:
    """A file that was found: its path relative to the walked folder, with "/" between the parts."""

    path: str
    modality: str
    size: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    path: str
    reason: str


@dataclasses.dataclass
class Walk:
    """What `walk` found.

    `blocked` holds folders that could not be looked into: what lies in them is unknown, not gone.
    `other` counts the files left out because of their extension.
    """

    files: list[File] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    blocked: list[str] = dataclasses.field(default_factory=list)
    other: Counter = dataclasses.field(default_factory=Counter)


def modality_of(path: str | os.PathLike) -> str | None:
    """What a file holds, told by its extension; None for one that is not known."""
    return _MODALITY.get(os.path.splitext(os.fspath(path))[1].lower())


def walk(
    folder: str | os.PathLike,
    modalities: Collection[str],
    leave_out: Collection[Path] = (),
    follow_links: bool = False,
) -> Walk:
    """All files of the wanted modalities under a folder, in sorted order.

    Hidden files and folders (a leading dot) are passed over. Links to files count as files. Links to folders
    are followed only if asked for, and no real folder is entered twice, so that circles end.

    Args:
        folder: where to begin.
        modalities: which kinds of files to keep, keys of `EXTENSIONS`.
        leave_out: folders not to enter.
        follow_links: enter links to folders.
    """
    out, root = Walk(), os.fspath(folder)
    closed = {os.path.realpath(p) for p in leave_out}
    entered = {_place(root)}

    def relative(path: str) -> str:
        return os.path.relpath(path, root).replace(os.sep, "/")

    def cannot_enter(error: OSError) -> None:
        out.blocked.append(relative(error.filename))
        out.skipped.append(Skipped(relative(error.filename), f"folder cannot be read: {error.strerror}"))

    for here, folders, names in os.walk(root, followlinks=follow_links, onerror=cannot_enter):
        enter = []
        for name in sorted(folders):
            path = os.path.join(here, name)
            if name.startswith(".") or os.path.realpath(path) in closed:
                continue
            if os.path.islink(path) and not follow_links:
                out.skipped.append(Skipped(relative(path), "a link to a folder (--follow-links enters it)"))
                continue
            place = _place(path)
            if place is None or place not in entered:
                entered.add(place)
                enter.append(name)
        folders[:] = enter
        for name in sorted(names):
            if name.startswith("."):
                continue
            modality = modality_of(name)
            if modality not in modalities:
                out.other[os.path.splitext(name)[1].lower() or "no extension"] += 1
                continue
            path = os.path.join(here, name)
            try:
                info = os.stat(path)
            except OSError as e:
                reason = "a link to nothing" if os.path.islink(path) else str(e.strerror)
                out.skipped.append(Skipped(relative(path), reason))
                continue
            if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
                out.skipped.append(Skipped(relative(path), "not a regular file"))
                continue
            out.files.append(File(relative(path), modality, info.st_size, info.st_mtime_ns))
    out.files.sort(key=lambda f: f.path)
    return out


def _place(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def content_hash(path: str | os.PathLike) -> str:
    """A 128-bit BLAKE2b of a file's bytes, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def shown(path: str | os.PathLike) -> str:
    """A file name fit for a line of text: control characters and bytes that are not UTF-8 are escaped."""
    text = os.fspath(path)
    text = text if isinstance(text, str) else os.fsdecode(text)
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in os.fsencode(text).decode("utf-8", "backslashreplace")
    )
