"""Text -> Tokens: byte-pair ids from Hugging Face's `tokenizers` (Rust), an embedding, learned positions.

One class for CLIP's vocabulary, a vocabulary trained here, and any `tokenizer.json`. Notable:

- Text that spells a special token stays plain text, unless `special=True` is given.
- A text truncated to the context keeps the end token as its last id.
- The Rust object does not change after construction, so threads may share a tokenizer, and a process that has encoded
  may fork DataLoader workers without warnings or hangs.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.layout import Layout, modality_id
from worldtokens.parts import OnClass, write_whole
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text import clip_bpe
from worldtokens.tokenizers.text.batching import check_ids, flatten, pad, padded_lengths, truncate
from worldtokens.tokenizers.text.decode import IdDecoder, StreamDecoder
from worldtokens.tokenizers.text.encode import IdEncoder
from worldtokens.tokenizers.text.normalize import NORMALIZERS
from worldtokens.tokenizers.text.read import read_texts
from worldtokens.tokenizers.text.vocabulary import (
    open_vocabulary,
    save_into,
    start_and_end,
    token_id,
    train_bpe,
)
from worldtokens.tokens import Tokens


class TextTokenizer(Tokenizer):
    """Text to byte-pair tokens with embeddings.

    Args:
        vocabulary: a `tokenizers.Tokenizer`, the path of a `tokenizer.json`, or ``"clip"``.
        dim: width of a token.
        context: maximum number of ids of a text, start and end token included. None: no limit (only with
            ``positions="none"``).
        causal: causal attention if True, bidirectional if False.
        positions: ``"learned"`` adds one vector per position, as CLIP does; ``"none"`` leaves positions to the trunk.
        start: token before a text, e.g. ``"<|startoftext|>"``, or None.
        end: token after a text, or None.
        pad: token for padding, or None for id 0. Padding is masked: no valid token attends to it.
        normalize: ``"clip"`` (ftfy, HTML entities, white space, lower case), ``"whitespace"`` (the same, case kept),
            ``"canonicalize"`` (lower case without punctuation, SigLIP's) or None, no normalisation.
        pad_to_context: pad every text to the context and treat padding as valid tokens, as SigLIP's text tower was
            trained.

    `embedding.weight` (vocabulary, dim) is initialised normal with std 0.02, `pos_embed` (context, dim) with std 0.01,
    as in CLIP (Radford et al., 2021).

    Raises:
        InputError: the vocabulary cannot be read or lacks a named token, or a setting is out of range.
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
        normalize: Literal["clip", "whitespace", "canonicalize"] | None = None,
        pad_to_context: bool = False,
    ) -> None:
        super().__init__()
        if positions not in ("learned", "none"):
            raise InputError(f"positions is {positions!r}, expected 'learned' or 'none'")
        if normalize is not None and normalize not in NORMALIZERS:
            raise InputError(f"normalize is {normalize!r}, expected None or one of {', '.join(NORMALIZERS)}")
        if pad_to_context and context is None:
            raise InputError("pad_to_context=True needs a maximum length: give context=")
        if context is None and positions == "learned":
            raise InputError("learned positions need a maximum length: give context=, or positions='none'")
        wrapping = (start is not None) + (end is not None)
        if context is not None and context <= wrapping:
            raise InputError(
                f"context={context} leaves no room for text beside {wrapping} start and end tokens"
            )
        self.dim, self.context, self.causal = dim, context, causal
        self.normalize, self.pad_to_context = normalize, pad_to_context
        clip = isinstance(vocabulary, str) and vocabulary == "clip"
        self.backend = clip_bpe.vocabulary() if clip else open_vocabulary(vocabulary)
        self.start_id = token_id(self.backend, "start", start)
        self.end_id = token_id(self.backend, "end", end)
        pad_id = token_id(self.backend, "pad", pad)
        self.pad_id = pad_id or 0
        self.vocab_size: int = max(max(self.backend.get_vocab().values()) + 1, 1)
        named = {i for i in (self.start_id, self.end_id, pad_id) if i is not None}
        self.encoder = IdEncoder(self.backend, named, normalize)
        self._warned = False

        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.pos_embed = (
            nn.Parameter(torch.empty(context, dim)) if positions == "learned" and context else None
        )
        nn.init.normal_(self.embedding.weight, std=0.02)
        if self.pos_embed is not None:
            nn.init.normal_(self.pos_embed, std=0.01)

    # ---- constructors ------------------------------------------------------------------------------------

    @classmethod
    def clip(
        cls,
        dim: int = 512,
        context: int = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
    ) -> TextTokenizer:
        """CLIP's 49,408 tokens; ids equal `open_clip.get_tokenizer("ViT-B-32")`.

        One intended difference: text that spells open_clip's ``<start_of_text>`` or ``<end_of_text>`` is a special
        token there and plain text here.
        """
        start, end = clip_bpe.START, clip_bpe.END
        return cls("clip", dim, context, causal, positions, start, end, normalize="clip")

    @OnClass
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
        """Train a byte-level BPE (as GPT-2's); the same texts give the same vocabulary.

        Called on the class. On an instance, `train(mode=True)` is PyTorch's, as on any module.

        Args:
            texts: the training texts.
            vocab_size: maximum number of tokens, special tokens and the 256 bytes included; little text gives fewer.
            start, end, specials: special tokens; they get the first ids, the end token id 0.
            min_frequency: minimum count of a pair to become a token.

        Raises:
            InputError: `vocab_size` is too small, or a text is not a str.
        """
        backend = train_bpe(texts, vocab_size, start, end, specials, min_frequency)
        return cls(backend, dim, context, causal, positions, start, end, pad=end)

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
        normalize: Literal["clip"] | None = None,
    ) -> TextTokenizer:
        """From any `tokenizer.json`.

        Without `start` and `end`, the file's post-processor defines which tokens surround a text. A vocabulary file
        does not contain `normalize` and `context`: `save` stores them, `save_vocabulary` does not.
        """
        backend = open_vocabulary(path)
        if start is None and end is None:
            start, end = start_and_end(backend)
        return cls(backend, dim, context, causal, positions, start, end, pad, normalize)

    # ---- read, collate, forward --------------------------------------------------------------------------

    def read(self, source: str, *, special: bool = False, end: bool = True) -> Tensor:
        """One text -> its ids, (N,) int64, with start and end token, not padded.

        Args:
            source: the text.
            special: text that spells a special token becomes it: for templates, not for users' input.
            end: False omits the end token, for a prompt to be continued.

        Raises:
            InputError: not a str, or it cannot be encoded as UTF-8.
        """
        return torch.tensor(self.encode_batch([source], special=special, end=end)[0], dtype=torch.int64)

    def encode_batch(
        self, texts: Sequence[str], *, context: int | None = None, special: bool = False, end: bool = True
    ) -> list[list[int]]:
        """Many texts -> their ids, equal to `read` and much faster.

        Args:
            texts: a list of str.
            context: truncate to this many ids instead of `self.context`.
            special, end: as in `read`.
        """
        flat, lengths = self._encode(texts, context, special, end)
        # all rows share the same int objects: creating new ones would cost as much as the rest
        ids, at = self._ints[flat].tolist(), [0, *np.cumsum(lengths).tolist()]
        return [ids[a:b] for a, b in pairwise(at)]

    def batch(self, texts: Sequence[str], *, context: int | None = None, special: bool = False) -> Batch:
        """Many texts -> what `collate` returns for their ids, without lists in between."""
        if not len(texts):
            raise InputError("no text to collate: a batch needs at least one")
        return self._padded_batch(*self._encode(texts, context, special, True))

    def collate(self, raws: Sequence[Tensor | Sequence[int]]) -> Batch:
        """Ids of several texts -> `ids` (B, N) int64 padded to the longest, and `lengths`, B ints.

        Raises:
            InputError: no text at all, or one that is longer than the context.
        """
        if not len(raws):
            raise InputError("no text to collate: a batch needs at least one")
        return self._padded_batch(*flatten(raws))

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """Ids -> tokens, (B, N, dim).

        Args:
            batch: from `collate`, or (B, N) integers padded after the end token, as open_clip's tokenizer returns.
                The lengths of a plain tensor are found on the CPU; on a GPU that synchronises once.

        Raises:
            InputError: a row has no end token, an id is outside the vocabulary, or N is larger than the context.
        """
        if isinstance(batch, Tensor):
            batch = self._from_padded(batch)
        ids = batch["ids"]
        order = "causal" if self.causal else "bidirectional"
        if "positions" in batch:
            return self._forward_packed(batch, order)
        return self.wrap(self.embed(ids), batch["lengths"], order, ids=ids)

    def _forward_packed(self, batch: Batch, order: str) -> Tokens:
        """Rows of several texts each, from `tasks.language.documents`."""
        ids, positions = batch["ids"], batch["positions"]
        ends = torch.tensor([sum(row) for row in batch["lengths"]], device=ids.device)
        valid = torch.arange(ids.shape[1], device=ids.device) < ends[:, None]
        pos = F.pad(positions[..., None].float(), (0, 2))
        modality = torch.full(ids.shape, modality_id(self.modality), dtype=torch.int16, device=ids.device)
        layout, x = Layout(batch["lengths"], order), self.embed(ids, positions)
        tokens = Tokens(x, valid, pos, batch["segment"], modality=modality, ids=ids, layout=layout)
        return tokens.causal() if order == "causal" else tokens

    def embed(self, ids: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Ids (B, N) -> embeddings (B, N, dim).

        Args:
            offset: position of the first id of every row, or (B, N) int64 positions.
        """
        x = self.embedding(ids)
        if isinstance(offset, Tensor):
            return x if self.pos_embed is None else x + self.pos_embed[offset]
        self._check_length(offset + ids.shape[1])
        return x if self.pos_embed is None else x + self.pos_embed[offset : offset + ids.shape[1]]

    def tokens(self, sources: Sequence[str]) -> Tokens:
        """Texts -> Tokens on the module's device."""
        return self(self.batch(sources).to(self.embedding.weight.device))

    # ---- ids to text -------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = False) -> str:
        """Ids -> text; for byte-level vocabularies exactly the text before normalisation and truncation.

        Args:
            ids: (N,) integers.
            special: True includes special tokens, False skips them.
        """
        return self._decoder.decode(ids, special)

    def stream(self, ids: Iterable[int] | Tensor, *, special: bool = False) -> Iterator[str]:
        """Text of ids as they arrive, one by one. Bytes of an incomplete character are held back."""
        return self._decoder.stream(ids, special)

    def stream_decoder(self, *, special: bool = False) -> StreamDecoder:
        """`stream` for ids that are still being generated: `push(id)` returns text, `end()` the rest."""
        return StreamDecoder(self._decoder, special)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one id, possibly part of a character; of a special token its name.

        Raises:
            InputError: the id is outside the vocabulary.
        """
        return self._decoder.token_bytes(id)

    @functools.cached_property
    def _decoder(self) -> IdDecoder:
        return IdDecoder(self.backend, self.vocab_size, self.encoder.special_ids)

    # ---- saving ------------------------------------------------------------------------------------------

    def save_vocabulary(self, path: str | os.PathLike) -> Path:
        """Write the vocabulary as a `tokenizer.json` for `from_file` and Hugging Face's tools."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.backend.to_str().encode())
        return path

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"vocabulary": {"file": save_into(self.backend, folder)}}

    def __getstate__(self) -> dict:
        # cached properties are recomputed
        return {k: v for k, v in self.__dict__.items() if k not in ("_decoder", "_ints")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.backend.encode_special_tokens = True  # the one setting that the Rust object does not pickle

    # ---- inside ------------------------------------------------------------------------------------------

    def _check_length(self, n: int) -> None:
        if self.context is not None and n > self.context:
            raise InputError(
                f"{n} ids in a row, but context={self.context}: truncate with read(), or build with a larger one"
            )

    def _warn_truncated(self, length: int, limit: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a text of {length} ids was cut to context={limit}, its end token kept; build the tokenizer with "
                f"context={length} or give shorter texts (shown once)",
                stacklevel=3,
            )

    @functools.cached_property
    def _ints(self) -> np.ndarray:
        return np.array(range(self.vocab_size), dtype=object)

    def _encode(
        self, texts: Sequence[str], context: int | None, special: bool, end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts -> all their ids as one array, and the length of each, truncated to the context."""
        texts = read_texts(texts)
        head = [self.start_id] if self.start_id is not None else []
        tail = [self.end_id] if end and self.end_id is not None else []
        limit = self.context if context is None else context
        if limit is not None and limit <= len(head) + len(tail):
            raise InputError(f"context={limit} leaves no room for text beside the start and end token")
        if not len(texts):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        flat, lengths = self.encoder.encode(texts, head, tail, special)
        longest = int(lengths.max())
        if limit is not None and longest > limit:
            self._warn_truncated(longest, limit)
            flat, lengths = truncate(flat, lengths, limit, self.end_id if tail else None)
        return flat, lengths

    def _padded_batch(self, flat: np.ndarray, lengths: np.ndarray) -> Batch:
        longest = int(lengths.max())
        self._check_length(longest)
        if len(flat):
            check_ids(int(flat.min()), int(flat.max()), self.vocab_size)
        width = self.context if self.pad_to_context and self.context else longest
        ids = pad(flat, lengths, width, self.pad_id)
        if self.pad_to_context:
            lengths = np.full_like(lengths, width)
        return Batch(ids=ids, lengths=tuple(lengths.tolist()))

    def _from_padded(self, ids: Tensor) -> Batch:
        """A batch from ids that were padded elsewhere."""
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected integers of shape (B, N)")
        ids = ids.long()
        on_cpu = ids.cpu()
        if on_cpu.numel():
            check_ids(int(on_cpu.min()), int(on_cpu.max()), self.vocab_size)
        if self.end_id is None or self.pad_to_context:  # padding cannot be told from text, or it is valid too
            return Batch(ids=ids, lengths=(ids.shape[1],) * len(ids))
        return Batch(ids=ids, lengths=padded_lengths(on_cpu, self.end_id))
