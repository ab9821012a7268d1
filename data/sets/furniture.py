"""Furniture meshes: Sweet Home 3D's libraries, downloaded into the cache on first use."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, split_of
from worldtokens.errors import InputError

LIBRARIES = {  # name -> licence
    "BlendSwap-CC-0": "CC0",
    "BlendSwap-CC-BY": "CC-BY-3.0",
    "KatorLegaz": "CC-BY-3.0",
    "Reallusion": "CC-BY-3.0",
    "Scopia": "CC-BY-3.0",
}


def open_furniture(split: str | None = None, languages: Sequence[str] = ("en",)) -> Rows:
    """820 meshes with rendered icons, names and keywords, from Sweet Home 3D's libraries.

    Each row: `id` ("Scopia/12"), `points` (OBJ path), `image` (PNG path), `text` (a list: the names in `languages`, then
    "name: keyword, keyword"), `class` (one of 12 categories), `licence`, `creator`, `size` (width, depth, height in cm),
    `split`. The split is by a hash of the English name, about 80 / 8 / 12.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: of the names: en, fr, de, es, ja, ru, zh_CN ... (22).
    """
    folder = fetch.cached("furniture", _fill)
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    records = [r for name in LIBRARIES for r in _library(folder / name, LIBRARIES[name], languages)]
    rows = Rows(records, name="furniture")
    return rows if split is None else rows.split(split)


def _fill(folder: Path) -> None:
    fetch.deb("sweethome3d-furniture", folder / "package")
    for library in (folder / "package/usr/share/sweethome3d/furniture").glob("*.sh3f"):
        with zipfile.ZipFile(library) as archive:
            members = [name for name in archive.namelist() if name.endswith((".obj", ".png", ".properties"))]
            archive.extractall(folder / library.stem, members)
    shutil.rmtree(folder / "package")


def _library(root: Path, licence: str, languages: Sequence[str]) -> Iterator[dict]:
    catalogs = {language: _catalog(root, language) for language in ("en", *languages)}
    for number, entry in catalogs["en"].items():
        texts = []
        for language in languages:
            local = catalogs[language].get(number, {})
            # the first keyword is the library's own name in two of the five
            tags = [
                t.strip() for t in local.get("tags", "").split(",") if t.strip() not in ("", "Blend Swap")
            ]
            name = local.get("name", "").strip()
            texts += ([name] if name else []) + ([f"{name}: {', '.join(tags)}"] if name and tags else [])
        record = {
            "id": f"{root.name}/{number}",
            "points": str(root / entry["model"].lstrip("/")),
            "image": str(root / entry["icon"].lstrip("/")),
            "class": entry["category"],
            "licence": licence,
            "creator": entry.get("creator", ""),
            "size": [float(entry[side]) for side in ("width", "depth", "height")],
        }
        if texts:
            record["text"] = texts
        record["split"] = split_of(entry["name"].casefold())
        yield record


def _catalog(root: Path, language: str) -> dict[int, dict[str, str]]:
    if language == "en":
        return read_catalog(root / "PluginFurnitureCatalog.properties")
    path = root / f"PluginFurnitureCatalog_{language}.properties"
    if not path.is_file():
        found = sorted(each.stem.split("_", 1)[1] for each in root.glob("*Catalog_*.properties"))
        raise InputError(f"furniture: language {language!r}; expected en or one of {', '.join(found)}")
    return read_catalog(path)


def read_catalog(path: Path) -> dict[int, dict[str, str]]:
    """The numbered entries of a Java properties file ("name#12=Lamp"): number -> key -> value."""
    entries: dict[int, dict[str, str]] = {}
    try:
        text = path.read_text("latin-1")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}. Remove the set's folder from the cache and open the set again"
        ) from error
    for key, number, value in re.findall(r"^\s*(\w+)#(\d+)\s*=[ \t]*(.*?)\s*$", text, re.MULTILINE):
        value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), value)
        entries.setdefault(int(number), {})[key] = value
    return entries
