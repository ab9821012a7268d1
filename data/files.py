"""File kinds by extension, and the folder walk of `worldtokens index`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection
from pathlib import Path

# the one list of file kinds: modality -> extensions
EXTENSIONS = {
    "image": ".jpg .jpeg .jpe .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm .avif .heic .tga",
    "audio": ".wav .flac .mp3 .ogg .oga .opus .m4a .aac .aif .aiff .wma",
    "video": ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .ogv .wmv .3gp",
    "points": ".obj .ply .off .stl .glb .gltf .xyz .pts .npz .npy",
    "series": ".csv .tsv",
    "text": ".txt .md",
}
MODALITY = {ext: modality for modality, exts in EXTENSIONS.items() for ext in exts.split()}


@dataclasses.dataclass(frozen=True)
class File:
    """A file found by `walk`: its path relative to the folder, with "/" as separator."""

    path: str
    modality: str
    size: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A skipped file and the reason."""

    path: str
    reason: str


@dataclasses.dataclass
class Walk:
    """Result of `walk`.

    `unreadable` lists folders that could not be read, whose files are unknown, not deleted. `other` counts files skipped
    for their extension.
    """

    files: list[File] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    unreadable: list[str] = dataclasses.field(default_factory=list)
    other: Counter = dataclasses.field(default_factory=Counter)


def modality_of(path: str | os.PathLike) -> str | None:
    """Modality of a file by its extension; None if unknown."""
    return MODALITY.get(os.path.splitext(os.fspath(path))[1].lower())


def walk(
    folder: str | os.PathLike,
    modalities: Collection[str],
    exclude: Collection[Path] = (),
    follow_links: bool = False,
) -> Walk:
    """All files of the given modalities under a folder, sorted by path.

    Hidden files and folders (with a leading dot) are skipped. Links to files count as files. Links to folders are
    followed only with `follow_links`; no folder is entered twice, so cyclic links end.

    Args:
        folder: the root of the walk.
        modalities: keys of `EXTENSIONS`.
        exclude: folders not to enter.
        follow_links: follow links to folders.
    """
    out, root = Walk(), os.fspath(folder)
    excluded = {os.path.realpath(p) for p in exclude}
    entered = {_inode(root)}

    def relative(path: str) -> str:
        return os.path.relpath(path, root).replace(os.sep, "/")

    def on_error(error: OSError) -> None:
        out.unreadable.append(relative(error.filename))
        out.skipped.append(Skipped(relative(error.filename), f"folder cannot be read: {error.strerror}"))

    for here, folders, names in os.walk(root, followlinks=follow_links, onerror=on_error):
        enter = []
        for name in sorted(folders):
            path = os.path.join(here, name)
            if name.startswith(".") or os.path.realpath(path) in excluded:
                continue
            if os.path.islink(path) and not follow_links:
                out.skipped.append(Skipped(relative(path), "a link to a folder (--follow-links follows it)"))
                continue
            inode = _inode(path)
            if inode is None or inode not in entered:
                entered.add(inode)
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
                reason = "a broken link" if os.path.islink(path) else str(e.strerror)
                out.skipped.append(Skipped(relative(path), reason))
                continue
            if not stat.S_ISREG(info.st_mode):  # opening a pipe would block
                out.skipped.append(Skipped(relative(path), "not a regular file"))
                continue
            out.files.append(File(relative(path), modality, info.st_size, info.st_mtime_ns))
    out.files.sort(key=lambda f: f.path)
    return out


def _inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def content_hash(path: str | os.PathLike) -> str:
    """128-bit BLAKE2b of a file's bytes, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def printable(path: str | os.PathLike) -> str:
    """A file name that is safe to print: control characters and bytes that are not UTF-8 are escaped."""
    text = os.fspath(path)
    text = text if isinstance(text, str) else os.fsdecode(text)
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in os.fsencode(text).decode("utf-8", "backslashreplace")
    )
