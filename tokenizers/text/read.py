"""Reader of text: what `TextTokenizer.read` takes -> a str that UTF-8 can encode."""

from __future__ import annotations

from collections.abc import Sequence

from worldtokens.errors import InputError


def read_text(source: object, name: str) -> str:
    """One text, checked.

    Args:
        source: a str.
        name: of the text, for error messages.

    Raises:
        InputError: not a str, or it holds a lone surrogate.
    """
    if not isinstance(source, str):
        raise InputError(
            f"{name} is a {type(source).__name__} ({source!r:.40}), expected a str"
            + (
                ": decode it first, as in raw.decode('utf-8')"
                if isinstance(source, bytes | bytearray)
                else ""
            )
        )
    try:
        source.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"{name} holds the lone surrogate {source[e.start]!r} at character {e.start}, which UTF-8 cannot encode: "
            "read its file with errors='replace'"
        ) from e
    return str(source)


def read_texts(texts: Sequence[str]) -> Sequence[str]:
    """Texts of a batch. Lone surrogates of plain str objects are found later, by the encoder.

    Raises:
        InputError: one str instead of a list of them, or a text that is not a str; names its index.
    """
    if isinstance(texts, str | bytes):
        raise InputError(f"texts is one {type(texts).__name__}, expected a list of str: give [text]")
    if set(map(type, texts)) <= {str}:
        return texts
    return [read_text(t, f"text {i} of the batch") for i, t in enumerate(texts)]
