"""Visual question answering: questions and answers from the annotations of the emoji and of Tux Paint's stamps.

The kinds of questions:

- ``"what"``: "What is this?" The answer is the image's name: the label of an emoji, or the first sentence of a stamp's
  English caption without its article.
- ``"group"``: "Which group is this in?" The emoji's group, or the top folder of a stamp.
- ``"colour"``: "What colour is it?" if the name contains one of `COLOURS`.
- ``"tone"``: "What skin tone is it?" if the name of an emoji contains one.
- ``"which"``: "Which one is of the group G?" and two images of one split, one of them of that group; "the first" or "the
  second". One question per image.

Skin-tone variants have only the question about the tone; the other questions would repeat those of the base emoji. A
question is in the split of its image.
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
QUESTIONS = {
    "what": "What is this?",
    "group": "Which group is this in?",
    "colour": "What colour is it?",
    "tone": "What skin tone is it?",
    "which": "Which one is of the group {}?",
}
_COLOUR = re.compile(rf"\b({'|'.join(COLOURS)})\b", re.I)
_TONE = re.compile(r"\b(light|medium-light|medium|medium-dark|dark) skin tone\b")


def open_emoji_questions(split: str | None = None, kinds: Sequence[str] = KINDS) -> Rows:
    """Questions about emoji, or about one of the fixed splits.

    Each row: `id`, `kind`, `messages` (a question with its image or images, and its answer), `text` (question and answer,
    to train a text tokenizer), `split`.

    Args:
        split: "train", "validation" or "test"; None for all.
        kinds: some of `KINDS`.
    """
    return _open("emoji_questions", open_emoji(), _emoji, split, kinds)


def open_stamp_questions(split: str | None = None, kinds: Sequence[str] = KINDS) -> Rows:
    """Questions about Tux Paint's stamps; see `open_emoji_questions`."""
    return _open("stamp_questions", open_stamps(), _stamp, split, kinds)


def _emoji(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": record["labels"]["en"],
        "group": record["group"],
        "skin_tone": record["id"] != record["base"],
    }


def _stamp(record: Mapping[str, Any]) -> dict[str, Any]:
    name = re.split(r"[.!,;]", record["captions"].get("en", ""))[0].strip()
    name = re.sub(r"^(A|An|The)\s+", "", name)
    return {"name": name, "group": record["class"].partition("/")[0], "skin_tone": False}


def _open(name: str, images: Rows, annotate: Any, split: str | None, kinds: Sequence[str]) -> Rows:
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"{name}: kinds {unknown}; expected some of {', '.join(KINDS)}")
    columns = {c: images.column(c) for c in ("id", "image", "split")}
    annotated = [
        {c: values[i] for c, values in columns.items()} | annotate(images._records[i])
        for i in range(len(images))
    ]
    records = [q for image in annotated for q in _about_one(image)]
    for each_split in dict.fromkeys(columns["split"]):
        records += _about_two([i for i in annotated if i["split"] == each_split and not i["skin_tone"]])
    rows = Rows([r for r in records if r["kind"] in kinds], name=name)
    return rows if split is None else rows.split(split)


def _about_one(image: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The questions about one image."""
    tones, colours = set(_TONE.findall(image["name"])), set(_COLOUR.findall(image["name"].lower()))
    if not image["skin_tone"]:
        if image["name"]:
            yield _question(image, "what", image["name"])
        yield _question(image, "group", image["group"])
        if len(colours) == 1:
            yield _question(image, "colour", *colours)
    elif len(tones) == 1:
        yield _question(image, "tone", *tones)


def _about_two(images: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pairs of every image and the next one of another group, in the order of a hash of their ids."""
    order = sorted(images, key=lambda p: _hash(p["id"]))
    for i, image in enumerate(order):
        others = (order[(i + k) % len(order)] for k in range(1, len(order)))
        other = next((p for p in others if p["group"] != image["group"]), None)
        if other is None:
            continue
        first = _hash(f"{image['id']} first") % 2 == 0
        pair = [image, other] if first else [other, image]
        question = QUESTIONS["which"].format(image["group"])
        content = [question, {"image": pair[0]["image"]}, "or", {"image": pair[1]["image"]}]
        yield _row(image, "which", content, "the first" if first else "the second")


def _question(image: Mapping[str, Any], kind: str, answer: str) -> dict[str, Any]:
    return _row(image, kind, [{"image": image["image"]}, QUESTIONS[kind]], answer)


def _row(image: Mapping[str, Any], kind: str, content: list[Any], answer: str) -> dict[str, Any]:
    question = " ".join(part for part in content if isinstance(part, str))
    return {
        "id": f"{image['id']} {kind}",
        "kind": kind,
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
        "text": [f"Q: {question}", f"A: {answer}"],
        "split": image["split"],
    }


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
