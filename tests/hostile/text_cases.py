"""Hostile texts."""

from __future__ import annotations

from cases import case
from image_cases import encode, noise

START, END = 49406, 49407


def plain(raw) -> bool:
    """One start token, one end token, and no control token in between."""
    return raw[0] == START and raw[-1] == END and not ((raw[1:-1] == START) | (raw[1:-1] == END)).any()


T = "text"  # CLIP's tokens, context 77
case(T, "cat.txt", 4, lambda: b"\xef\xbb\xbfa cat\r\n", lambda raw: raw.tolist() == [START, 320, 2368, END])
case(T, "control-token.txt", 10, lambda: b"a<|endoftext|>b", plain)
case(T, "image-tag.txt", 5, lambda: b"<image>", plain)
case(T, "long.txt", 77, lambda: b"a photo of a cat " * 100, plain)
case(T, "joined-emoji.txt", 11, lambda: "👩‍👩‍👧‍👦 猫".encode(), plain)
case(T, "nothing.txt", "empty", lambda: b"")
case(T, "blank.txt", 2, lambda: b" \n\t ")
case(T, "one-word-of-a-megabyte.txt", 77, lambda: b"a" * (1 << 20), plain)
case(T, "a-megabyte-of-punctuation.txt", 77, lambda: b"&" * (1 << 20), plain)
case(T, "combining-accents.txt", 77, lambda: ("e" + "\u0301" * 100_000).encode(), plain)
case(T, "zero-byte.txt", 3, lambda: b"a\0b", plain)  # as CLIP cleans it: "ab"
case(T, "windows-1252.txt", "byte 0x92 at 2", lambda: b"it\x92s")
case(T, "utf-16.txt", "is not UTF-8", lambda: "a cat".encode("utf-16"))
case(T, "image.txt", "is not UTF-8", lambda: encode(noise(4, 4, 3)))
case(T, "surrogate.txt", "is not UTF-8", lambda: b"a \xed\xa0\x80")
case(T, "missing.txt", "no such file", lambda path: None)
