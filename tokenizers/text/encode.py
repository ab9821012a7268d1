"""Texts to ids: normalisation, byte-pair encoding in Rust, and special tokens.

Text that spells a special token stays plain text unless special tokens are asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import models

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.batching import flatten
from worldtokens.tokenizers.text.clip_bpe import WordCache
from worldtokens.tokenizers.text.normalize import NORMALIZERS
from worldtokens.tokenizers.text.read import read_text


class IdEncoder:
    """Encodes texts with one vocabulary. Safe to share between threads.

    Args:
        backend: the vocabulary. The named tokens are added to its special tokens here, once: changing a Rust object
            that threads share makes them fail with "already borrowed".
        named: ids of the start, end and padding token.
        normalize: a key of `NORMALIZERS`, or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, named: set[int], normalize: str | None) -> None:
        self.backend, self.normalize = backend, normalize
        added = backend.get_added_tokens_decoder()
        self.special_ids = {i for i, t in added.items() if t.special} | named
        backend.add_special_tokens(
            [backend.id_to_token(i) for i in sorted(named) if i not in added or not added[i].special]
        )
        backend.encode_special_tokens = True
        self.special_tokens = {str(backend.id_to_token(i)): i for i in self.special_ids}
        # added tokens that are not special may span white space, which the cache of whole words cannot handle
        plain_added = any(not t.special and i not in named for i, t in added.items())
        fits = normalize == "clip" and not plain_added and WordCache.supports(backend)
        self.words = WordCache(backend) if fits else None

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "special_pattern"}

    def encode(
        self, texts: Sequence[str], head: list[int], tail: list[int], special: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts -> all ids as one array, and the length of each text.

        Args:
            texts: at least one str.
            head, tail: one id or none before and after every text.
            special: text that spells a special token becomes it.
        """
        if self.words is not None and not special:
            return self.words.encode(texts, head, tail)
        rows = [self.with_special(t) for t in texts] if special else self.plain(texts)
        return flatten([head + ids + tail for ids in rows])

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids without special tokens.

        Raises:
            InputError: a text cannot be encoded, or spells a special token of a vocabulary that looks whole words up.
        """
        if self.normalize is not None:
            texts = [NORMALIZERS[self.normalize](t) for t in texts]
        try:
            rows = [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as e:  # Rust raises a plain one; for a lone surrogate only a TypeError
            for i, t in enumerate(texts):
                read_text(t, f"text {i} of the batch")
            raise InputError(f"the vocabulary cannot encode these texts ({e}): {texts[0]!r:.40} ...") from e
        if self._reachable:
            for i, row in enumerate(rows):
                if not self._reachable.isdisjoint(row):
                    raise InputError(
                        f"text {i} of the batch spells a special token that this {type(self.backend.model).__name__} "
                        f"vocabulary cannot encode as plain text: remove it, or give special=True if it is meant"
                    )
        return rows

    def with_special(self, text: str) -> list[int]:
        """Ids of a text in which special tokens count."""
        ids: list[int] = []
        at = 0
        for match in self.special_pattern.finditer(text):
            ids += self.one(text[at : match.start()])
            ids.append(self.special_tokens[match[0]])
            at = match.end()
        return ids + self.one(text[at:])

    def one(self, text: str) -> list[int]:
        """Ids of one plain text, [] for an empty one."""
        if not text:
            return []
        return (
            self.words.encode([text], [], [])[0].tolist() if self.words is not None else self.plain([text])[0]
        )

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """Matches the spelling of any special token."""
        # the longest first, so that a prefix does not hide it; with no special tokens nothing matches
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @functools.cached_property
    def _reachable(self) -> set[int]:
        """Special ids that plain text could still reach: not by byte pairs, but by models that look whole words up."""
        model = self.backend.model
        if isinstance(model, models.BPE) and not model.ignore_merges:
            return set()
        unknown = getattr(model, "unk_token", None)
        unk_id = getattr(model, "unk_id", None)
        return self.special_ids - {unk_id, self.backend.token_to_id(unknown) if unknown else None}
