"""Questions about real images and their answers, made from the annotations of the emoji and of Tux Paint's stamps.

The rule, by kind of question:

- ``"what"``: "What is this?" The answer is the image's name: the label of an emoji, the first sentence of a stamp's
  English caption without its article.
- ``"group"``: "Which group is this in?" The emoji's group, or the first folder of a stamp.
- ``"colour"``: "What colour is it?" where the name says one of `COLOURS`.
- ``"tone"``: "What skin tone is it?" where the name of an emoji says one.
- ``"which"``: "Which one is of the group G?" and two images of one side of the split, one of them of that group;
  "the first" or "the second". Each image is asked after once.

A skin-tone twin is asked for its tone alone: all else its sibling is asked already. Images, and so questions, are on the
side of the split that their set gives them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worldtokens.data.rows import Rows
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.data.sets.stamps import open_stamps
from worldtokens.errors import InputError

COLOURS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "brown",
    "black",
    "white",
    "pink",
    "grey",
    "gold",
)
KINDS = ("what", "group", "colour", "tone", "which")
ASKED = {
    "what": "What is this?",
    "group": "Which group is this in?",
    "colour": "What colour is it?",
    "tone": "What skin tone is it?",
    "which": "Which one is of the group {}?",
}
_COLOUR = re.compile(rf"\b({'|'.join(COLOURS)})\b", re.I)
_TONE = re.compile(r"\b(light|medium-light|medium|medium-dark|dark) skin tone\b")


def open_emoji_questions(split: str | None = None, kinds: Sequence[str] = KINDS) -> Rows:
    """Questions about emoji, or about those of one side of the fixed split.

    Each row: `id`, `kind`, `messages` (a question with its image or images, and its answer), `text` (the question's
    words and the answer, what a vocabulary is learned from), `split`.

    Args:
        split: "train", "validation" or "test"; None for all.
        kinds: some of `KINDS`.
    """
    pictures = open_emoji()
    return _open("emoji_questions", pictures, _shown_emoji, split, kinds)


def open_stamp_questions(split: str | None = None, kinds: Sequence[str] = KINDS) -> Rows:
    """The same about Tux Paint's stamps; see `open_emoji_questions`."""
    return _open("stamp_questions", open_stamps(), _shown_stamp, split, kinds)


def _shown_emoji(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": record["labels"]["en"], "group": record["group"], "twin": record["id"] != record["base"]}


def _shown_stamp(record: Mapping[str, Any]) -> dict[str, Any]:
    name = re.split(r"[.!,;]", record["captions"].get("en", ""))[0].strip()
    name = re.sub(r"^(A|An|The)\s+", "", name)
    return {"name": name, "group": record["class"].partition("/")[0], "twin": False}


def _open(name: str, pictures: Rows, shown: Any, split: str | None, kinds: Sequence[str]) -> Rows:
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"{name}: kinds {unknown}; expected some of {', '.join(KINDS)}")
    columns = {c: pictures.column(c) for c in ("id", "image", "split")}
    known = [
        {c: values[i] for c, values in columns.items()} | shown(pictures._records[i])
        for i in range(len(pictures))
    ]
    records = [q for picture in known for q in _alone(picture)]
    for side in dict.fromkeys(columns["split"]):
        records += _pairs([p for p in known if p["split"] == side and not p["twin"]])
    rows = Rows([r for r in records if r["kind"] in kinds], name=name)
    return rows if split is None else rows.split(split)


def _alone(picture: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The questions about one image."""
    tones, colours = set(_TONE.findall(picture["name"])), set(_COLOUR.findall(picture["name"].lower()))
    if not picture["twin"]:
        if picture["name"]:
            yield _question(picture, "what", picture["name"])
        yield _question(picture, "group", picture["group"])
        if len(colours) == 1:
            yield _question(picture, "colour", *colours)
    elif len(tones) == 1:
        yield _question(picture, "tone", *tones)


def _pairs(pictures: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every image beside the next one of another group, in the order of a hash of their ids."""
    order = sorted(pictures, key=lambda p: _hash(p["id"]))
    for i, picture in enumerate(order):
        others = (order[(i + k) % len(order)] for k in range(1, len(order)))
        other = next((p for p in others if p["group"] != picture["group"]), None)
        if other is None:
            continue
        first = _hash(f"{picture['id']} first") % 2 == 0
        shown = [picture, other] if first else [other, picture]
        words = ASKED["which"].format(picture["group"])
        content = [words, {"image": shown[0]["image"]}, "or", {"image": shown[1]["image"]}]
        yield _row(picture, "which", content, "the first" if first else "the second")


def _question(picture: Mapping[str, Any], kind: str, answer: str) -> dict[str, Any]:
    return _row(picture, kind, [{"image": picture["image"]}, ASKED[kind]], answer)


def _row(picture: Mapping[str, Any], kind: str, content: list[Any], answer: str) -> dict[str, Any]:
    asked = " ".join(part for part in content if isinstance(part, str))
    return {
        "id": f"{picture['id']} {kind}",
        "kind": kind,
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
        "text": [f"Q: {asked}", f"A: {answer}"],
        "split": picture["split"],
    }


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
