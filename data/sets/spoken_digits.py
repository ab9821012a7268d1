"""The ten digits, spoken in English by a hundred synthetic voices of espeak-ng (see `data.espeak`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from worldtokens.data import espeak, fetch
from worldtokens.data.rows import Rows, split_of

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TAKES = 4  # recordings of each word by each voice


def open_spoken_digits(split: str | None = None) -> Rows:
    """The digits zero to nine, four recordings of each by each of espeak-ng's voices, 22,050 Hz.

    Each row: `id` ("f3/7/0": voice, digit, take), `audio` (WAV bytes), `text` ("seven"), `class` ("7"), `voice`, `accent`,
    `split`. Recordings differ in accent, speed (120 to 230 words per minute) and pitch, drawn from the row's id. Each
    family of voices is in one split, by hash, about 80 / 8 / 12: the voices of test rows are not in training.

    Args:
        split: "train", "validation" or "test"; None for all.

    Raises:
        InputError: espeak-ng is not installed and cannot be downloaded.
    """
    records = espeak.read_recordings(fetch.cached("spoken_digits", _fill))
    for record in records:
        record["split"] = split_of(espeak.voice_family(record["voice"]))
    rows = Rows(records, name="spoken_digits")
    return rows if split is None else rows.split(split)


def _fill(folder: Path) -> None:
    rows = []
    for voice in espeak.voices():
        for digit, word in enumerate(WORDS):
            for take in range(TAKES):
                name = f"{voice}/{digit}/{take}"
                random = hashlib.sha256(name.encode()).digest()
                rows.append(
                    {
                        "id": name,
                        "text": word,
                        "class": str(digit),
                        "voice": voice,
                        "accent": espeak.ACCENTS[random[0] % len(espeak.ACCENTS)],
                        "speed": 120 + random[1] * 111 // 256,
                        "pitch": 20 + random[2] * 61 // 256,
                    }
                )
    espeak.write_recordings(folder, rows)
