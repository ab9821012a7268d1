"""Text -> tokens: byte-pair ids from Hugging Face's `tokenizers` (Rust), an embedding, learned positions.

One class reads CLIP's vocabulary, one trained here, and anybody's `tokenizer.json`. Notable:

- Text never becomes a control token by spelling it, unless `special=True` is asked for.
- A text cut to the context keeps the end token as its last id.
- Nothing in the Rust object changes after construction, so threads may share a tokenizer, and a process that has
  encoded may fork DataLoader workers without warnings or hangs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.layout import Layout, modality_id
from worldtokens.parts import write_whole
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text import clip_bpe
from worldtokens.tokenizers.text.decode import Speller, Spelling
from worldtokens.tokenizers.text.normalize import CLEANINGS
from worldtokens.tokenizers.text.vocabulary import around, checked_text, open_vocabulary, train_bpe
from worldtokens.tokens import Tokens


class _OnClass:
    """A class method whose name means something else on an instance: the base class's method of that name."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.other = getattr(owner.__base__, name)

    def __get__(self, instance: Any, owner: type) -> Callable:
        return self.function.__get__(owner) if instance is None else self.other.__get__(instance)


class TextTokenizer(Tokenizer):
    """Text to byte-pair tokens with embeddings.

    Args:
        vocabulary: a `tokenizers.Tokenizer`, the path of a `tokenizer.json`, or ``"clip"``.
        dim: width of a token.
        context: the most ids that a text may have, start and end token included. None: no limit (only with
            ``positions="none"``).
        causal: True reads left to right, False all together.
        positions: ``"learned"`` adds one vector per place, as CLIP does; ``"none"`` leaves positions to the trunk.
        start: token put before a text, e.g. ``"<|startoftext|>"``, or None.
        end: token put after a text, or None.
        pad: token that fills short rows of a batch, or None for id 0. No real token ever reads padding.
        cleaning: ``"clip"`` (ftfy, HTML entities, white space, lower case), ``"whitespace"`` (the same, keeps the case),
            ``"canonicalize"`` (lower case without punctuation, SigLIP's) or None, text as it is.
        fill: every text is filled up with the pad token to the context, and these count as tokens that are read, as
            SigLIP's text tower was trained.

    `embedding.weight` (vocabulary, dim) starts normal with std 0.02, `position` (context, dim) with std 0.01, as in
    CLIP (Radford et al., 2021).

    Raises:
        InputError: the vocabulary cannot be read or lacks a token that was named, or a setting is out of range.
    """

    modality = "text"

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | str | os.PathLike,
        dim: int = 512,
        context: int | None = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        cleaning: Literal["clip", "whitespace", "canonicalize"] | None = None,
        fill: bool = False,
    ) -> None:
        super().__init__()
        if positions not in ("learned", "none"):
            raise InputError(f"positions is {positions!r}, expected 'learned' or 'none'")
        if cleaning is not None and cleaning not in CLEANINGS:
            raise InputError(f"cleaning is {cleaning!r}, expected None or one of {', '.join(CLEANINGS)}")
        if fill and context is None:
            raise InputError("fill=True needs a number of places to fill: give context=")
        if context is None and positions == "learned":
            raise InputError("learned positions need a number of places: give context=, or positions='none'")
        wrapping = (start is not None) + (end is not None)
        if context is not None and context <= wrapping:
            raise InputError(
                f"context={context} leaves no room for text beside {wrapping} start and end tokens"
            )
        self.dim, self.context, self.causal, self.cleaning, self.fill = dim, context, causal, cleaning, fill
        clip = isinstance(vocabulary, str) and vocabulary == "clip"
        self._rust = clip_bpe.vocabulary() if clip else open_vocabulary(vocabulary)
        self.start_id, self.end_id = self._named("start", start), self._named("end", end)
        self.pad_id = self._named("pad", pad) or 0
        named = {i for i in (self.start_id, self.end_id, self._named("pad", pad)) if i is not None}
        added = self._rust.get_added_tokens_decoder()
        self._specials = {i for i, t in added.items() if t.special} | named
        self.vocab_size = max(max(self._rust.get_vocab().values()) + 1, 1)
        # fixed from here on: changing a shared Rust object is what makes threads fail with "already borrowed"
        self._rust.add_special_tokens(
            [self._rust.id_to_token(i) for i in sorted(named) if i not in added or not added[i].special]
        )
        self._rust.encode_special_tokens = True
        # added words that are not special cut across white space, which the table of whole words does not know
        plain = any(not t.special and i not in named for i, t in added.items())
        fits = cleaning == "clip" and not plain and clip_bpe.Words.fits(self._rust)
        self._words = clip_bpe.Words(self._rust) if fits else None
        self._told = False

        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.position = nn.Parameter(torch.empty(context, dim)) if positions == "learned" else None
        nn.init.normal_(self.embedding.weight, std=0.02)
        if self.position is not None:
            nn.init.normal_(self.position, std=0.01)

    # ---- making one --------------------------------------------------------------------------------------

    @classmethod
    def clip(
        cls,
        dim: int = 512,
        context: int = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
    ) -> TextTokenizer:
        """CLIP's 49,408 tokens; ids equal `open_clip.get_tokenizer("ViT-B-32")`.

        One difference, on purpose: text that spells open_clip's ``<start_of_text>`` or ``<end_of_text>`` is a
        control token there and plain text here.
        """
        start, end = clip_bpe.START, clip_bpe.END
        return cls("clip", dim, context, causal, positions, start, end, cleaning="clip")

    @_OnClass
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int = 8000,
        dim: int = 512,
        context: int | None = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
        start: str | None = None,
        end: str = "<|endoftext|>",
        specials: Sequence[str] = (),
        min_frequency: int = 2,
    ) -> TextTokenizer:
        """Learn a byte-level BPE (as GPT-2's); the same texts give the same vocabulary.

        Called on the class. On an instance, `train(mode=True)` is PyTorch's, as on any module.

        Args:
            texts: what to learn from.
            vocab_size: the most tokens, specials and the 256 bytes included; little text gives fewer.
            start, end, specials: control tokens; they get the first ids, the end token id 0.
            min_frequency: how often a pair must be seen to become a token.

        Raises:
            InputError: `vocab_size` is too small, or a text is not a str.
        """
        rust = train_bpe(texts, vocab_size, start, end, specials, min_frequency)
        return cls(rust, dim, context, causal, positions, start, end, pad=end)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike,
        dim: int = 512,
        context: int | None = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        cleaning: Literal["clip"] | None = None,
    ) -> TextTokenizer:
        """Anybody's `tokenizer.json`.

        Where neither `start` nor `end` is named, the file's own post-processor tells which tokens stand around a
        text. A vocabulary file knows nothing of cleaning and context: `save` keeps those, `save_vocabulary` does not.
        """
        rust = open_vocabulary(path)
        if start is None and end is None:
            start, end = around(rust)
        return cls(rust, dim, context, causal, positions, start, end, pad, cleaning)

    # ---- the three verbs ---------------------------------------------------------------------------------

    def read(self, source: str, *, special: bool = False, end: bool = True) -> Tensor:
        """One text -> its ids, (N,) int64, with start and end token, not padded.

        Args:
            source: the text.
            special: True lets text that spells a special token become it: for templates, not for users' words.
            end: False leaves the end token out, as a prompt to be continued needs it.

        Raises:
            InputError: not a str, or not to be written as UTF-8.
        """
        return torch.tensor(self.encode_batch([source], special=special, end=end)[0], dtype=torch.int64)

    def encode_batch(
        self, texts: Sequence[str], *, context: int | None = None, special: bool = False, end: bool = True
    ) -> list[list[int]]:
        """Many texts -> their ids, as `read` gives them, much faster.

        Args:
            texts: a list of str.
            context: cut to this many ids instead of `self.context`.
            special, end: as in `read`.
        """
        flat, lengths = self._flat(texts, context, special, end)
        # the same few thousand int objects serve all rows: making new ones would cost as much as the rest
        ids, at = self._numbers[flat].tolist(), [0, *np.cumsum(lengths).tolist()]
        return [ids[a:b] for a, b in pairwise(at)]

    def batch(self, texts: Sequence[str], *, context: int | None = None, special: bool = False) -> Batch:
        """Many texts -> what `collate` makes of their ids, without the lists between."""
        if not len(texts):
            raise InputError("no text to collate: a batch needs at least one")
        return self._rows(*self._flat(texts, context, special, True))

    def collate(self, raws: Sequence[Tensor | Sequence[int]]) -> Batch:
        """Ids of several texts -> `ids` (B, N) int64 padded to the longest, and `lengths`, B ints.

        Raises:
            InputError: no text at all, or one that is longer than the context.
        """
        if not len(raws):
            raise InputError("no text to collate: a batch needs at least one")
        lengths = np.fromiter(map(len, raws), np.int64, len(raws))
        if isinstance(raws[0], Tensor):
            flat = torch.cat(list(raws)).numpy()
        else:
            flat = np.fromiter(chain.from_iterable(raws), np.int64, lengths.sum())
        return self._rows(flat, lengths)

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """Ids -> tokens, (B, N, dim).

        Args:
            batch: from `collate`, or (B, N) whole numbers padded after the end token, as open_clip's tokenizer gives
                them. A plain tensor must be looked into for its lengths; on a GPU that waits for the device once.

        Raises:
            InputError: a row has no end token, an id is outside the vocabulary, or N is larger than the context.
        """
        if isinstance(batch, Tensor):
            batch = self._padded(batch)
        ids = batch["ids"]
        order = "causal" if self.causal else "bidirectional"
        if "place" in batch:
            return self._packed(batch, order)
        return self.wrap(self.embed(ids), batch["lengths"], order, ids=ids)

    def _packed(self, batch: Batch, order: str) -> Tokens:
        """Rows that hold several texts each, as `tasks.documents.pack_pieces` makes them."""
        ids, place = batch["ids"], batch["place"]
        ends = torch.tensor([sum(row) for row in batch["lengths"]], device=ids.device)
        valid = torch.arange(ids.shape[1], device=ids.device) < ends[:, None]
        pos = F.pad(place[..., None].float(), (0, 2))
        modality = torch.full(ids.shape, modality_id(self.modality), dtype=torch.int16, device=ids.device)
        layout = Layout(batch["lengths"], order)
        tokens = Tokens(
            self.embed(ids, place), valid, pos, batch["segment"], modality=modality, ids=ids, layout=layout
        )
        return tokens.causal() if order == "causal" else tokens

    def embed(self, ids: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Ids (B, N) -> embeddings (B, N, dim).

        Args:
            offset: the place where the first one of every row stands, or (B, N) int64 where each one does.
        """
        x = self.embedding(ids)
        if isinstance(offset, Tensor):
            return x if self.position is None else x + self.position[offset]
        self._fits(offset + ids.shape[1])
        return x if self.position is None else x + self.position[offset : offset + ids.shape[1]]

    def tokens(self, sources: Sequence[str]) -> Tokens:
        """Texts straight to Tokens on the module's device."""
        return self(self.batch(sources).to(self.embedding.weight.device))

    # ---- back to text ------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = False) -> str:
        """Ids -> text, exactly the text for byte-level vocabularies (without cleaning and cutting).

        Args:
            ids: (N,) whole numbers.
            special: True spells the special tokens out, False drops them.
        """
        return self._speller.decode(ids, special)

    def stream(self, ids: Iterable[int] | Tensor, *, special: bool = False) -> Iterator[str]:
        """Text as its ids come in, one by one. Bytes of an unfinished character are held back until it is whole."""
        return self._speller.stream(ids, special)

    def spelling(self, *, special: bool = False) -> Spelling:
        """`stream` from the other side, for ids that are yet to be made: `push(id)` gives text, `end()` the rest."""
        return Spelling(self._speller, special)

    def spell(self, id: int) -> bytes:
        """The bytes that one id stands for, which may be a part of a character; a special token's are its name.

        Raises:
            InputError: it is outside the vocabulary.
        """
        return self._speller.spell(id)

    @functools.cached_property
    def _speller(self) -> Speller:
        return Speller(self._rust, self.vocab_size, self._specials)

    # ---- saving ------------------------------------------------------------------------------------------

    def save_vocabulary(self, path: str | os.PathLike) -> Path:
        """Write the vocabulary as a `tokenizer.json` that `from_file` and Hugging Face's tools read."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self._rust.to_str().encode())
        return path

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        args = super().config_args(folder)
        data = self._rust.to_str().encode()
        name = "tokenizer.json"
        if folder is not None:
            # another text front-end of this model, or an older save, may own the name: it is not overwritten
            if (folder / name).exists() and (folder / name).read_bytes() != data:
                name = f"tokenizer-{hashlib.sha256(data).hexdigest()[:12]}.json"
            if not (folder / name).exists():
                write_whole(folder / name, data)
        return args | {"vocabulary": {"file": name}}

    def __getstate__(self) -> dict:
        # what is derived is made again; the Rust object forgets its one setting on the way
        return {k: v for k, v in self.__dict__.items() if k not in ("_speller", "_marker", "_numbers")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._rust.encode_special_tokens = True

    # ---- inside ------------------------------------------------------------------------------------------

    def _named(self, what: str, token: str | None) -> int | None:
        if token is None:
            return None
        found = self._rust.token_to_id(token)
        if found is None:
            known = sorted(t.content for t in self._rust.get_added_tokens_decoder().values())
            raise InputError(
                f"{what}={token!r} is not in the vocabulary; its added tokens are {known[:10]}: name one of them"
            )
        return found

    def _fits(self, n: int) -> None:
        if self.context is not None and n > self.context:
            raise InputError(
                f"{n} ids in a row, but context={self.context}: cut with read(), or build with a larger one"
            )

    def _tell(self, length: int, limit: int) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"a text of {length} ids was cut to context={limit}, its end token kept; build the tokenizer with "
                f"context={length} or give shorter texts (said once)",
                stacklevel=3,
            )

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        return np.array(range(self.vocab_size), dtype=object)

    def _flat(
        self, texts: Sequence[str], context: int | None, special: bool, end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts -> all their ids one after another, and how many each has."""
        if isinstance(texts, str | bytes):
            raise InputError(f"texts is one {type(texts).__name__}, expected a list of str: give [text]")
        if not set(map(type, texts)) <= {str}:
            texts = [checked_text(t, f"text {i} of the batch") for i, t in enumerate(texts)]
        head = [self.start_id] if self.start_id is not None else []
        tail = [self.end_id] if end and self.end_id is not None else []
        limit = self.context if context is None else context
        if limit is not None and limit <= len(head) + len(tail):
            raise InputError(f"context={limit} leaves no room for text beside the start and end token")
        if not len(texts):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._words is not None and not special:
            flat, lengths = self._words.encode(texts, head, tail)
        else:
            plain = [self._marked(t) for t in texts] if special else self._plain(texts)
            rows = [head + ids + tail for ids in plain]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            flat = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
        longest = int(lengths.max())
        if limit is not None and longest > limit:
            self._tell(longest, limit)
            starts = np.cumsum(lengths) - lengths
            cut = lengths > limit
            place = np.arange(len(flat)) - np.repeat(starts, lengths)
            if tail:
                flat[starts[cut] + limit - 1] = self.end_id
            flat, lengths = flat[place < limit], np.minimum(lengths, limit)
        return flat, lengths

    def _rows(self, flat: np.ndarray, lengths: np.ndarray) -> Batch:
        longest = int(lengths.max())
        self._fits(longest)
        if len(flat) and not 0 <= flat.min() <= flat.max() < self.vocab_size:
            raise InputError(
                f"ids run from {flat.min()} to {flat.max()}, the vocabulary has {self.vocab_size} tokens: were they "
                "made by another tokenizer?"
            )
        width = self.context if self.fill else longest
        ids = np.full((len(lengths), width), self.pad_id, np.int64)
        ids[np.arange(width) < lengths[:, None]] = flat
        if self.fill:
            lengths = np.full_like(lengths, width)
        return Batch(ids=torch.from_numpy(ids), lengths=tuple(lengths.tolist()))

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        if self.cleaning is not None:
            texts = [CLEANINGS[self.cleaning](t) for t in texts]
        try:
            rows = [e.ids for e in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as e:  # a plain one from Rust; TypeError is all that it says of a lone surrogate
            for i, t in enumerate(texts):
                checked_text(t, f"text {i} of the batch")
            raise InputError(f"the vocabulary cannot write these texts ({e}): {texts[0]!r:.40} ...") from e
        if self._leaky:
            for i, row in enumerate(rows):
                if not self._leaky.isdisjoint(row):
                    raise InputError(
                        f"text {i} of the batch spells a special token that this {type(self._rust.model).__name__} "
                        f"vocabulary cannot read as plain text: take it out, or give special=True if it is meant"
                    )
        return rows

    @functools.cached_property
    def _leaky(self) -> set[int]:
        """Special ids that plain text could still reach: byte pairs cannot, models that look whole words up can."""
        model = self._rust.model
        if isinstance(model, models.BPE) and not model.ignore_merges:
            return set()
        unknown = getattr(model, "unk_token", None)
        unk_id = getattr(model, "unk_id", None)
        return self._specials - {unk_id, self._rust.token_to_id(unknown) if unknown else None}

    @functools.cached_property
    def _marker(self) -> re.Pattern:
        names = [self._rust.id_to_token(i) for i in self._specials]
        # the longest first, so that one that begins another does not hide it; no special at all matches nothing
        return re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) or r"(?!)")

    def _marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens count."""
        ids, at = [], 0
        for mark in self._marker.finditer(text):
            ids += self._unmarked(text[at : mark.start()])
            ids.append(self._rust.token_to_id(mark[0]))
            at = mark.end()
        return ids + self._unmarked(text[at:])

    def _unmarked(self, text: str) -> list[int]:
        if not text:
            return []
        return (
            self._words.encode([text], [], [])[0].tolist()
            if self._words is not None
            else self._plain([text])[0]
        )

    def _padded(self, ids: Tensor) -> Batch:
        """A batch from ids that were padded elsewhere. The end token is found by equality: its id need not be the
        largest, so argmax would be wrong for vocabularies with tokens added later."""
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(
                f"ids are {ids.dtype} {tuple(ids.shape)}, expected whole numbers of shape (B, N)"
            )
        ids = ids.long()
        here = ids.cpu()
        if here.numel() and not 0 <= int(here.min()) <= int(here.max()) < self.vocab_size:
            raise InputError(
                f"ids run from {int(here.min())} to {int(here.max())}, the vocabulary has {self.vocab_size} tokens: "
                "were they made by another tokenizer?"
            )
        if self.end_id is None or self.fill:  # nothing tells padding from text, or it is read too
            return Batch(ids=ids, lengths=(ids.shape[1],) * len(ids))
        ends = here == self.end_id
        found = ends.any(1)
        if not bool(found.all()):
            raise InputError(
                f"row {int((~found).nonzero()[0])} of the ids has no end token ({self.end_id}): cut texts keep it as "
                "their last id; give what read() and collate() make"
            )
        # argmax of 0/1 gives the first 1: the first end token, where it is
        return Batch(ids=ids, lengths=tuple((ends.int().argmax(1) + 1).tolist()))
