"""A language model: text from left to right, each token from those before it.

One front-end for text, a trunk (Transformer or Recurrent), and a head over the vocabulary, which is the embedding itself
where it is tied (Press and Wolf 2017). Notable:

- Documents of a batch are cut in windows and packed side by side; none reads another.
- The loss is the mean over predicted tokens, and a batch weighs as many as it has, so that accumulation and
  processes give what one large batch gives. All logits are never held (`tasks/language/loss.py`).
- Prompts of different length are continued together, each as if alone, with the trunk's cache.

Shapes: B rows, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.prepacked import prepacked, prepacked_linear
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.language.decoding import Continuation, Sampling, Stream, decode, decode_stream
from worldtokens.tasks.language.documents import Window, pack_windows, split_windows
from worldtokens.tasks.language.loss import IGNORE, token_loss
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens

_ALL = 1 << 62  # ids of a text that is read whole


class LanguageModel(Task):
    """Predicts every token of a text from those before it.

    Args:
        tokenizer: a causal `TextTokenizer`; its column is ``"text"``, or give ``{"story": ...}``. With a start token the
            first word is predicted too, and an empty prompt can be continued.
        trunk: a Transformer or Recurrent of the front-end's width.
        tied: the head's weight is the embedding's. False: one of its own.
        bias: the head has a bias.
        context: the most tokens of a window; longer documents are cut. None: the front-end's own, which is no limit
            where that is None.

    Raises:
        ValueError: widths or settings that do not fit together.
    """

    metric = ("bits_per_byte", "min")
    ends: Sequence[int] = ()  # beside the front-end's own end token

    def __init__(
        self,
        tokenizer: TextTokenizer | dict[str, TextTokenizer],
        trunk: Part,
        tied: bool = True,
        bias: bool = False,
        context: int | None = None,
    ) -> None:
        super().__init__()
        given = tokenizer if isinstance(tokenizer, Mapping) else {tokenizer.modality: tokenizer}
        if len(given) != 1:
            raise ValueError(f"LanguageModel reads one column, got {sorted(given)}")
        ((self.column, front),) = given.items()
        if front.dim != trunk.dim:
            raise ValueError(f"the front-end gives tokens {front.dim} wide, the trunk takes {trunk.dim}")
        if not front.causal or front.pad_to_context:
            raise ValueError(
                "a language model reads left to right: its front-end needs causal=True, pad_to_context=False"
            )
        if context is not None and (context < 1 or context > (front.context or context)):
            raise ValueError(f"context={context}, expected 1 to the front-end's {front.context}")
        self.context = front.context if context is None else context
        self.tokenizers, self.trunk = nn.ModuleDict(given), trunk
        self.head = None if tied else nn.Linear(front.dim, front.vocab_size, bias=bias)
        self.bias = nn.Parameter(torch.zeros(front.vocab_size)) if tied and bias else None
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)
            if bias:
                nn.init.zeros_(self.head.bias)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"tokenizer": dict(self.tokenizers)}

    @property
    def front(self) -> TextTokenizer:
        return self.tokenizers[self.column]

    @property
    def head_weight(self) -> Tensor:
        """(V, D)."""
        return self.front.embedding.weight if self.head is None else self.head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """(V,) or None."""
        return self.bias if self.head is None else self.head.bias

    # ---- rows --------------------------------------------------------------------------------------------

    def read(
        self,
        row: Mapping[str, Any],
        rng: random.Random | None = None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """One row -> the ids of its whole text, however long, and in training where its first window ends.

        Raises:
            InputError: the row has no text, or it is not a str.
        """
        value = row.get(self.column)
        if isinstance(value, list) and value:
            value = rng.choice(value) if rng is not None else value[0]
        if value is None or isinstance(value, list):
            raise InputError(f"a row has the columns {sorted(row)}, expected text under {self.column!r}")
        ids = self._ids(value)
        if augment and self.column in augment:
            ids = augment[self.column](ids)
        raws = {self.column: ids}
        if rng is not None and self.context is not None and len(ids) > self.context + 1:
            raws["first"] = rng.randint(1, self.context)
        return raws

    def _ids(self, text: str, end: bool = True, special: bool = False) -> Tensor:
        """A text of any length -> (n,) ids."""
        ids = self.front.encode_batch([text], context=_ALL, special=special, end=end)[0]
        return torch.tensor(ids, dtype=torch.int64)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> ``batch[column]``, packed windows with their labels (see `tasks.documents`).

        ``batch["weight"]`` is how many tokens are predicted.
        """
        pieces = [
            piece for r in rows for piece in split_windows(r[self.column], self.context, first=r.get("first"))
        ] or [Window(torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE))]
        packed = pack_windows(pieces, self.context, self.front.pad_id)
        weight = int((packed["labels"] != IGNORE).sum())
        return Batch({"weight": weight, "has": {self.column: None}, self.column: packed})

    # ---- forward -----------------------------------------------------------------------------------------

    def hidden(self, batch: Mapping[str, Batch | Tensor] | Tokens, cache: Any = None) -> Tokens:
        """What the head reads, (B, N, D).

        Args:
            batch: the front-end's batch by column, or tokens already made.
            cache: of `trunk.cache`, to go on from.
        """
        if not isinstance(batch, Tokens):
            if self.column not in batch:
                raise InputError(f"the batch has {sorted(batch)}, expected the column {self.column!r}")
            batch = self.front(batch[self.column])
        return self.trunk(batch) if cache is None else self.trunk(batch, cache=cache)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return F.linear(x, self.head_weight, self.head_bias)

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """``{"text": ...}`` -> logits (B, N, V) of what follows each token; at padding they mean nothing."""
        return self.logits(self.hidden(batch).x)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats, the mean over the tokens predicted; 0 with a graph where there are none."""
        total, count = self._sum(batch)
        return {"loss": total / count.clamp(min=1)}

    def _sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.hidden(batch).x
        return token_loss(x, self.head_weight, batch[self.column]["labels"], self.head_bias)

    # ---- how good is it ----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, overlap: int | None = None
    ) -> dict[str, float]:
        """``loss`` (nats a token), ``perplexity`` (of a token), ``bits_per_byte`` and the counts ``tokens``, ``bytes``.

        Predicted, and counted, are all tokens of a text but its first id; where the front-end puts a start token, these
        are the whole text. The end token's bits count, and it has no bytes. A text's bytes are those of its UTF-8, after
        the tokenizer's own normalisation, less the first token's where that is not predicted. So bits per byte compare
        models of different vocabularies.

        Args:
            rows: with a text each.
            batch_size: windows worked on at a time.
            overlap: tokens that a window of a long text repeats from the one before as what it knows. None: half of it.

        Raises:
            InputError: no rows, or none with a token to predict.
        """
        overlap = (self.context or 2) // 2 if overlap is None else overlap
        front = self.front
        pieces, size = [], 0
        for row in rows:
            ids = self.read(row)[self.column]
            pieces += split_windows(ids, self.context, overlap)
            size += len(front.decode(ids).encode())
            if len(ids) and front.start_id is None:
                size -= len(front.token_bytes(int(ids[0]))) if int(ids[0]) != front.end_id else 0
        if not pieces:
            raise InputError(f"{len(rows)} rows hold no token to predict")
        total, count = 0.0, 0
        with evaluating(self):
            pieces.sort(key=lambda p: -len(p.ids))
            for i in range(0, len(pieces), batch_size):
                packed = pack_windows(pieces[i : i + batch_size], self.context, front.pad_id)
                part, n = self._sum(Batch({self.column: packed}).to(self.device))
                total, count = total + float(part), count + int(n)
        return {
            "loss": total / count,
            "perplexity": math.exp(min(700.0, total / count)),
            "bits_per_byte": total / math.log(2) / max(1, size),
            "tokens": count,
            "bytes": size,
        }

    # ---- going on ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | str,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        seed: int | Sequence[int] | None = None,
        special: bool = False,
    ) -> list[str]:
        """Continue prompts; gives the continuations alone.

        A row ends with the end token, before a stop string, after `max_new_tokens`, or when the context is full.

        Args:
            prompts: texts of any different lengths, continued together, each as if alone; or one.
            max_new_tokens: the most tokens to add.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; temperature 0 is greedy.
            stop: strings that end a continuation and are not part of it.
            stream: called with (row, piece of text) as the text comes, never with half a character.
            special: prompts may spell special tokens, as templates do.

        Raises:
            InputError: a prompt with no token (without a start token it needs a word), or longer than the context.
        """
        how = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        return [c.text for c in self.continuations(prompts, max_new_tokens, how, stop, stream, special)]

    def continuations(
        self,
        prompts: Sequence[str | Sequence[int]] | str,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        special: bool = False,
    ) -> list[Continuation]:
        """As `generate`, with the ids and the reason for the end; a prompt may also be its ids."""
        with evaluating(self), torch.inference_mode():
            step, logits, how = self._start(prompts, max_new_tokens, special)
            return decode(step, logits, sampling=sampling, stop=stop, stream=stream, **how)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(temperature=1.0),
        stop: Sequence[str] = (),
        special: bool = False,
    ) -> Iterator[str]:
        """One prompt's continuation, piece by piece as it comes."""
        with evaluating(self):
            with torch.inference_mode():
                step, logits, how = self._start([prompt], max_new_tokens, special)
            for _, piece in decode_stream(step, logits, sampling=sampling, stop=stop, **how):
                yield piece

    def _start(self, prompts: Sequence[str | Sequence[int]] | str, new: int, special: bool) -> tuple:
        """Read the prompts -> what `start_decoding` gives."""
        prompts, front = [prompts] if isinstance(prompts, str) else list(prompts), self.front
        ids = [
            self._ids(p, end=False, special=special) if isinstance(p, str) else torch.as_tensor(p)
            for p in prompts
        ]
        for k, n in enumerate(map(len, ids)):
            if n == 0:
                raise InputError(
                    f"prompt {k} has no token to go on from: give a word, or a front-end with start="
                )
            if self.context is not None and n > self.context:
                raise InputError(
                    f"prompt {k} has {n} tokens and the context takes {self.context}: give its last part"
                )
        tokens = front(front.collate(ids).to(self.device))
        step, logits, how = self.start_decoding(tokens, [len(i) for i in ids], new)
        return step, logits, how | {"prompts": [i.tolist() for i in ids]}

    def start_decoding(
        self, tokens: Tokens, sizes: Sequence[int], new: int
    ) -> tuple[Callable, Tensor, dict[str, Any]]:
        """Read tokens, to go on from them one by one.

        Args:
            tokens: (B, N, D), rows padded behind.
            sizes: B ints, the tokens of each row, 1 or more.
            new: the most to add.

        Returns:
            A step function (B,) ids -> (B, V) logits of what follows, the first logits, and what else `decode` wants to
            know.
        """
        front = self.front
        limits = [new if self.context is None else min(new, self.context - n + 1) for n in sizes]
        cache = self.trunk.cache(len(sizes), max(sizes) + max(limits))
        last = torch.tensor(list(sizes), device=self.device)
        x = self.hidden(tokens, cache).x
        place = [last[:, None]]  # of the next token

        how_many = len(sizes), max(limits)
        trunk = prepacked(self.trunk, *how_many)
        head = prepacked_linear(self.head_weight, self.head_bias, *how_many)

        def step(new: Tensor) -> Tensor:
            tokens = front.wrap(front.embed(new[:, None], place[0]), (1,) * len(new), "causal")
            place[0] = place[0] + 1
            return head(trunk(cache.offset(tokens), cache=cache).x[:, 0])

        def select(rows: Tensor) -> None:
            cache.select(rows)
            place[0] = place[0][rows]

        logits = self.logits(x[torch.arange(len(sizes), device=x.device), last - 1])
        how = {"max_new_tokens": limits, "front": front, "ends": self.end_ids, "select": select}
        return step, logits, how

    @property
    def end_ids(self) -> set[int]:
        """Ids that end what is written."""
        own = () if self.front.end_id is None else (self.front.end_id,)
        return {*own, *self.ends}
