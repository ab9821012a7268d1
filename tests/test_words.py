"""Names, docstrings, messages and docs use the words of timm, open_clip, transformers and torch."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

import worldtokens as wt

ROOT = Path(wt.__file__).parent
SELF = "tests/test_words.py"

# what is not said -> what is said instead
PHRASES = {
    r"\bby heart\b": "memorise, overfit",
    r"\blearnt\b": "learned",
    r"\bnats an?\b": "nats per token",
    r"\bbits a\b": "bits per byte",
    r"\b(?:rows|pairs|images|strings|tokens) a second\b": "samples/s, images/s, tokens/s",
    r"\bwords (?:find|to) (?:an? )?(?:picture|image)s?\b": "text-to-image",
    r"\b(?:a|the) person(?:'s)? (?:asks|says|wants|sees|calls)\b": "the user",
    r"\bmedian place\b": "median rank",
    r"\bunheard\b": "held-out",
    r"\bfilms?\b(?! grain)": "video",
    r"\bbatch mates?\b": "other samples of the batch",
    r"\b\d+ wide, \d+ deep\b": "dim 192, depth 4",
    r"\bpictures?\b": "image",
}
CONTRACTION = re.compile(
    r"\b(?:is|are|was|were|do|does|did|has|have|had|can|could|would|should|need|must|wo)n't\b", re.I
)
OLD_NAMES = re.compile(
    r"\b(?:PictureLM|resize_pictures|read_picture|read_sound|read_clip|read_shape|SoundJitter|CloudJitter|trained_codes|"
    r"draw_confusion|rows_per_second|caption_pictures|clip_pictures|pictures_by_words|picture_questions|smollm2_pictures|"
    r"speech_to_text|furniture_classes|codes_emoji)\b"
)


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [f for f in done.stdout.split() if f != SELF and (ROOT / f).exists()]


def prose(file: str) -> list[tuple[int, str]]:
    """(line, text) of everything that a reader reads: comments and strings of code, all of a page."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if not file.endswith(".py"):
        return list(enumerate(text.splitlines(), 1))
    kinds = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (t.start[0] + i, line)
        for t in tokens
        if t.type in kinds
        for i, line in enumerate(t.string.splitlines())
    ]


# a picture is what a page shows its reader; the packed set keeps the name of its member; texts that tests encode are data
ALLOWED = re.compile(
    r"pictures\.bin|~/Pictures|!\[|screenshot\|untitled|emoji pictures with captions|Pictures: Twemoji"
)
PAGES = [f for f in tracked("*.md", "recipes/*.yaml") if f not in ("docs/LOG.md", "CHANGELOG.md")]
CODE = [f for f in tracked("*.py") if not f.startswith("tests/")]


@pytest.mark.parametrize("phrase", PHRASES)
def test_prose_uses_the_fields_words(phrase):
    files = CODE + [f for f in PAGES if phrase != r"\bpictures?\b" or not f.startswith("docs/")]
    rx = re.compile(phrase, re.IGNORECASE)
    found = [
        f"{f}:{n}: {line.strip()[:90]}"
        for f in files
        for n, line in prose(f)
        if rx.search(line) and not ALLOWED.search(line)
    ]
    assert not found, f"say {PHRASES[phrase]!r}:\n" + "\n".join(found[:20])


def test_no_contractions_hide_a_not():
    found = [
        f"{f}:{n}: {line.strip()[:90]}"
        for f in CODE + PAGES
        for n, line in prose(f)
        if CONTRACTION.search(line)
    ]
    assert not found, "\n".join(found[:20])


def test_no_name_of_an_earlier_version_is_left():
    files = [
        f for f in tracked("*.py", "*.md", "*.yaml", "*.json") if f not in ("docs/LOG.md", "CHANGELOG.md")
    ]
    found = [f for f in files if OLD_NAMES.search((ROOT / f).read_text(encoding="utf-8"))]
    assert found == []


def test_names_say_image_audio_and_video():
    """No function, class, argument or attribute of the package is named after a picture, a sound or a film."""
    rx = re.compile(r"(?:^|_)(?:pictures?|sounds?|films?|learnt|told)(?:_|$)", re.IGNORECASE)
    found = []
    for file in CODE:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            name = node.id if isinstance(node, ast.Name) else name
            if isinstance(name, str) and rx.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)):
                found.append(f"{file}:{getattr(node, 'lineno', 0)}: {name}")
    assert not found, "\n".join(found[:20])
