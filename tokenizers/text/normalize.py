"""What is done to a text before it is cut into ids, by the names that open_clip gives these ways.

All mend with ftfy, undo HTML entities twice and make one space of any white space.
"""

from __future__ import annotations

import string

from worldtokens.tokenizers.text import clip_bpe

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def whitespace(text: str) -> str:
    """Mended, white space collapsed, letters as they are."""
    return " ".join(clip_bpe.mend(text).split())


def canonicalize(text: str) -> str:
    """Mended, ASCII punctuation taken out, lower case: SigLIP's (Zhai et al. 2023)."""
    text = clip_bpe.mend(text).replace("_", " ").translate(_NO_PUNCTUATION)
    return " ".join(text.lower().split())


CLEANINGS = {
    "clip": clip_bpe.clean,
    "whitespace": whitespace,
    "canonicalize": canonicalize,
}
