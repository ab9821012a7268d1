"""Speech synthesis with espeak-ng (Duddington and others), for the spoken sets.

An installed program is used if there is one; else its Debian packages are unpacked into the cache. Synthesised audio is
stored as one file per set.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Packed
from worldtokens.errors import InputError

ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
PACKAGES = ("espeak-ng", "libespeak-ng1", "espeak-ng-data", "libpcaudio0", "libsonic0")
# dependencies of libpcaudio0, which a machine without audio output lacks
LIBRARIES = "libpulse0 libasound2 libasyncns0 libsndfile1 libdbus-1-3 libx11-6 libx11-xcb1 libxcb1 libxau6 libxdmcp6 libbsd0"
LIBRARIES += " libmd0 libflac12 libvorbis0a libvorbisenc2 libogg0 libopus0 libmp3lame0 libmpg123-0"
_HINT = "Install espeak-ng (on Debian or Ubuntu: apt-get install espeak-ng) and open the set again."


def synthesize(text: str, voice: str = "en-us", speed: int = 165, pitch: int = 50) -> bytes:
    """Text to speech.

    Args:
        text: the text.
        voice: espeak-ng's name, optionally with a variant: "en-us+f3".
        speed: words per minute, 80 to 450.
        pitch: 0 to 99.

    Returns:
        The bytes of a WAV file, mono, 22,050 Hz.

    Raises:
        InputError: espeak-ng is not available, or has no such voice.
    """
    program, environment = _program()
    command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", "--", text]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    if done.returncode or len(done.stdout) <= 44:
        message = done.stderr.decode("utf-8", "replace").strip() or "no output"
        raise InputError(f"espeak-ng cannot synthesise {text!r} with the voice {voice!r}: {message}")
    return _with_length(done.stdout)


def _with_length(wav: bytes) -> bytes:
    """Sets the two lengths in the header of a WAV file; one written to a pipe has the largest possible values."""
    at = wav.index(b"data") + 4
    size = (len(wav) - at - 4).to_bytes(4, "little")
    return wav[:4] + (len(wav) - 8).to_bytes(4, "little") + wav[8:at] + size + wav[at + 4 :]


def voices() -> Sequence[str]:
    """Names of espeak-ng's voice variants, each usable with every language: "f1", "m3", "Alex" ..."""
    program, environment = _program()
    done = subprocess.run([program, "--voices=variant"], capture_output=True, env=environment, check=False)
    files = [line.split()[-1] for line in done.stdout.decode("utf-8", "replace").splitlines()[1:]]
    # names with a space do not work on the command line
    return sorted({f.partition("/")[2] for f in files if f.startswith("!v/")})


def voice_family(voice: str) -> str:
    """The family of similar voices: "robosoft7" and "robosoft" are one family; "f1" and "f2" are different speakers."""
    return voice if len(voice) == 2 else re.sub(r"(Robot|\d+)$", "", voice)


def write_recordings(folder: Path, rows: list[dict]) -> None:
    """Synthesises the `text` of every row with its `voice`, `accent`, `speed` and `pitch`; writes one audio file and one
    file of rows."""

    def audio(row: dict) -> bytes:
        return synthesize(row["text"], f"{row['accent']}+{row['voice']}", row["speed"], row["pitch"])

    with open(folder / "spoken.bin", "wb") as file, ThreadPoolExecutor(2) as pool:
        for row, wav in zip(rows, pool.map(audio, rows), strict=True):
            row["bytes"] = file.write(wav)
    (folder / "rows.json").write_text(json.dumps(rows))


def read_recordings(folder: Path) -> list[dict]:
    """The rows from `write_recordings`, each with its `audio`."""
    records, start = [], 0
    for record in json.loads((folder / "rows.json").read_text()):
        size = record.pop("bytes")
        record["audio"] = Packed(str(folder / "spoken.bin"), start, size)
        records.append(record)
        start += size
    return records


@functools.lru_cache(maxsize=1)
def _program() -> tuple[str, dict[str, str] | None]:
    """The program's path and its environment."""
    if installed := shutil.which("espeak-ng"):
        return installed, None
    root = fetch.cached("espeak-ng", lambda work: [fetch.deb(p, work) for p in PACKAGES])
    program = root / "usr/bin/espeak-ng"
    library = next(root.glob("usr/lib/*/libespeak-ng.so.1"), None)
    if library is None or not program.is_file():
        raise InputError(f"{root} has no espeak-ng; remove that folder. {_HINT}")
    folders, data = [library.parent], str(library.parent)
    environment, error = _start(program, folders, data)
    if "shared librar" in error:
        more = fetch.cached("espeak-ng-sound", lambda work: [fetch.deb(p, work) for p in LIBRARIES.split()])
        folders += sorted({f.parent for f in more.rglob("*.so*")})
        environment, error = _start(program, folders, data)
    if error:
        raise InputError(f"{program} does not start: {error}. {_HINT}")
    return str(program), environment


def _start(program: Path, folders: Sequence[Path], data: str) -> tuple[dict[str, str], str]:
    """The environment with these library folders, and the program's error message in it, "" if it starts."""
    given = os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join([*map(str, folders), *([given] if given else [])])
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "ESPEAK_DATA_PATH": data}
    done = subprocess.run(
        [program, "--version"], capture_output=True, env=environment, text=True, check=False
    )
    return environment, (done.stderr.strip() or "no message") if done.returncode else ""
