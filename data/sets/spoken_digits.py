"""The ten digits, spoken in English by a hundred synthetic voices: espeak-ng (Duddington and others) says them.

The program is taken from the path where it is installed, else its Debian packages are unpacked into the cache. What
it says is kept there as one file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Packed, Rows, side_of
from worldtokens.errors import InputError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
TAKES = 4  # of each word by each voice
PACKAGES = ("espeak-ng", "libespeak-ng1", "espeak-ng-data", "libpcaudio0", "libsonic0")
# libpcaudio0's own, which a machine without sound lacks
LIBRARIES = "libpulse0 libasound2 libasyncns0 libsndfile1 libdbus-1-3 libx11-6 libx11-xcb1 libxcb1 libxau6 libxdmcp6 libbsd0"
LIBRARIES += " libmd0 libflac12 libvorbis0a libvorbisenc2 libogg0 libopus0 libmp3lame0 libmpg123-0"
_WAY_OUT = "Install espeak-ng (on Debian or Ubuntu: apt-get install espeak-ng) and open the set again."


def open_spoken_digits(split: str | None = None) -> Rows:
    """The digits zero to nine, four takes of each by each of espeak-ng's voices, 22,050 Hz.

    Each row: `id` ("f3/7/0": voice, digit, take), `audio` (WAV bytes), `text` ("seven"), `class` ("7"), `voice`, `accent`,
    `split`. Takes differ in accent, speed (120 to 230 words a minute) and pitch, drawn from the row's id. A voice, with
    those that are named as its variants, is on one side of the split, by hash, about 80 / 8 / 12: the test rows' voices
    are not heard in training.

    Args:
        split: "train", "validation" or "test"; None for all.

    Raises:
        InputError: espeak-ng is not there and cannot be fetched.
    """
    records = held(fetch.cached("spoken_digits", _fill))
    for record in records:
        record["split"] = side_of(family(record["voice"]))
    rows = Rows(records, name="spoken_digits")
    return rows if split is None else rows.split(split)


def held(folder: Path) -> list[dict]:
    """The rows that `keep` wrote, each with its `audio`."""
    records, start = [], 0
    for record in json.loads((folder / "rows.json").read_text()):
        size = record.pop("bytes")
        record["audio"] = Packed(str(folder / "spoken.bin"), start, size)
        records.append(record)
        start += size
    return records


def keep(folder: Path, rows: list[dict]) -> None:
    """Say the `text` of every row by its `voice`, `accent`, `speed` and `pitch`; one file of sounds and one of rows."""

    def spoken(row: dict) -> bytes:
        return say(row["text"], f"{row['accent']}+{row['voice']}", row["speed"], row["pitch"])

    with open(folder / "spoken.bin", "wb") as file, ThreadPoolExecutor(2) as pool:
        for row, wav in zip(rows, pool.map(spoken, rows), strict=True):
            row["bytes"] = file.write(wav)
    (folder / "rows.json").write_text(json.dumps(rows))


def family(voice: str) -> str:
    """What alike voices share: "robosoft7" and "robosoft" are one family; "f1" and "f2" are different speakers."""
    return voice if len(voice) == 2 else re.sub(r"(Robot|\d+)$", "", voice)


def say(text: str, voice: str = "en-us", speed: int = 165, pitch: int = 50) -> bytes:
    """A sentence as speech.

    Args:
        text: what to say.
        voice: espeak-ng's name, with a variant where wanted: "en-us+f3".
        speed: words a minute, 80 to 450.
        pitch: 0 to 99.

    Returns:
        The bytes of a WAV file, mono, 22,050 Hz.

    Raises:
        InputError: espeak-ng is not there, or does not know the voice.
    """
    program, environment = _program()
    command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", "--", text]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    if done.returncode or len(done.stdout) <= 44:
        said = done.stderr.decode("utf-8", "replace").strip() or "it said nothing"
        raise InputError(f"espeak-ng cannot say {text!r} with the voice {voice!r}: {said}")
    return _with_length(done.stdout)


def _with_length(wav: bytes) -> bytes:
    """A WAV that was written to a pipe, its two lengths set right: there they are the largest possible."""
    at = wav.index(b"data") + 4
    size = (len(wav) - at - 4).to_bytes(4, "little")
    return wav[:4] + (len(wav) - 8).to_bytes(4, "little") + wav[8:at] + size + wav[at + 4 :]


def voices() -> Sequence[str]:
    """The names of espeak-ng's voice variants, of which each goes with every language: "f1", "m3", "Alex" ..."""
    program, environment = _program()
    done = subprocess.run([program, "--voices=variant"], capture_output=True, env=environment, check=False)
    files = [line.split()[-1] for line in done.stdout.decode("utf-8", "replace").splitlines()[1:]]
    # names with a space cannot be asked for on the command line
    return sorted({f.partition("/")[2] for f in files if f.startswith("!v/")})


@functools.lru_cache(maxsize=1)
def _program() -> tuple[str, dict[str, str] | None]:
    """The program's path and the environment that it needs."""
    if installed := shutil.which("espeak-ng"):
        return installed, None
    root = fetch.cached("espeak-ng", lambda work: [fetch.deb(p, work) for p in PACKAGES])
    program = root / "usr/bin/espeak-ng"
    library = next(root.glob("usr/lib/*/libespeak-ng.so.1"), None)
    if library is None or not program.is_file():
        raise InputError(f"{root} holds no espeak-ng; remove that folder. {_WAY_OUT}")
    folders, data = [library.parent], str(library.parent)
    environment, said = _starts(program, folders, data)
    if "shared librar" in said:
        more = fetch.cached("espeak-ng-sound", lambda work: [fetch.deb(p, work) for p in LIBRARIES.split()])
        folders += sorted({f.parent for f in more.rglob("*.so*")})
        environment, said = _starts(program, folders, data)
    if said:
        raise InputError(f"{program} does not start: {said}. {_WAY_OUT}")
    return str(program), environment


def _starts(program: Path, folders: Sequence[Path], data: str) -> tuple[dict[str, str], str]:
    """The environment with these libraries' folders, and what the program complains of in it."""
    given = os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join([*map(str, folders), *([given] if given else [])])
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "ESPEAK_DATA_PATH": data}
    done = subprocess.run(
        [program, "--version"], capture_output=True, env=environment, text=True, check=False
    )
    return environment, (done.stderr.strip() or "it failed") if done.returncode else ""


def _fill(folder: Path) -> None:
    rows = []
    for voice in voices():
        for digit, word in enumerate(WORDS):
            for take in range(TAKES):
                name = f"{voice}/{digit}/{take}"
                draw = hashlib.sha256(name.encode()).digest()
                rows.append(
                    {
                        "id": name,
                        "text": word,
                        "class": str(digit),
                        "voice": voice,
                        "accent": ACCENTS[draw[0] % len(ACCENTS)],
                        "speed": 120 + draw[1] * 111 // 256,
                        "pitch": 20 + draw[2] * 61 // 256,
                    }
                )
    keep(folder, rows)
