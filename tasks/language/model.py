"""Autoregressive language model.

It has one text tokenizer, a causal trunk (Transformer or Recurrent) and a head over the vocabulary, by default tied to
the embedding (Press and Wolf 2017). Notable:

- Documents of a batch are split into windows and packed into rows; they do not attend to each other.
- The loss is the mean over predicted tokens, and a batch is weighted by their number, so that gradient accumulation and
  several processes give the same step as one large batch. The full logits are never in memory
  (`tasks/language/loss.py`).
- Prompts of different lengths are continued in one batch with the trunk's cache, with the same outputs as one by one.

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

_NO_LIMIT = 1 << 62  # context for encoding a text of any length


class LanguageModel(Task):
    """Autoregressive language model: predicts every token of a text from the tokens before it.

    Args:
        tokenizer: a causal `TextTokenizer`; its column is ``"text"``, or give ``{"story": ...}``. With a start token the
            first token of a text is predicted too, and an empty prompt can be continued.
        trunk: a Transformer or Recurrent with the tokenizer's `dim`.
        tied: tie the head's weight to the embedding. False: a separate weight.
        bias: the head has a bias.
        context: the most tokens of a window; longer documents are split. None: the tokenizer's own `context`; no limit
            if that is None too.

    Raises:
        ValueError: dims or settings that do not match.
    """

    metric = ("bits_per_byte", "min")
    stop_ids: Sequence[int] = ()  # ids that end a text, in addition to the tokenizer's end token

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
            raise ValueError(f"LanguageModel takes one column, got {sorted(given)}")
        ((self.column, front),) = given.items()
        if front.dim != trunk.dim:
            raise ValueError(f"the tokenizer has dim {front.dim}, the trunk dim {trunk.dim}")
        if not front.causal or front.pad_to_context:
            raise ValueError(
                "a language model is causal: its tokenizer needs causal=True, pad_to_context=False"
            )
        if context is not None and (context < 1 or context > (front.context or context)):
            raise ValueError(f"context={context}, expected 1 to the tokenizer's {front.context}")
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
        """One row -> the ids of its whole text, and in training (`rng`) the drawn length of its first window.

        Raises:
            InputError: the row has no text, or the text is not a str.
        """
        value = row.get(self.column)
        if isinstance(value, list) and value:
            value = rng.choice(value) if rng is not None else value[0]
        if value is None or isinstance(value, list):
            raise InputError(f"a row has the columns {sorted(row)}, expected text under {self.column!r}")
        ids = self._ids(value)
        if augment and self.column in augment:
            ids = augment[self.column](ids)
        raws: dict[str, Any] = {self.column: ids}
        if rng is not None and self.context is not None and len(ids) > self.context + 1:
            raws["first"] = rng.randint(1, self.context)
        return raws

    def _ids(self, text: str, end: bool = True, special: bool = False) -> Tensor:
        """A text of any length -> (n,) int64 ids."""
        ids = self.front.encode_batch([text], context=_NO_LIMIT, special=special, end=end)[0]
        return torch.tensor(ids, dtype=torch.int64)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> ``batch[column]``, packed windows with labels (see `tasks.language.documents`).

        ``batch["weight"]`` is the number of predicted tokens.
        """
        windows = [
            window
            for r in rows
            for window in split_windows(r[self.column], self.context, first=r.get("first"))
        ] or [Window(torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE))]
        packed = pack_windows(windows, self.context, self.front.pad_id)
        weight = int((packed["labels"] != IGNORE).sum())
        return Batch({"weight": weight, "has": {self.column: None}, self.column: packed})

    # ---- forward -----------------------------------------------------------------------------------------

    def hidden(self, batch: Mapping[str, Batch | Tensor] | Tokens, cache: Any = None) -> Tokens:
        """The trunk's output, (B, N, D).

        Args:
            batch: the tokenizer's batch by column, or `Tokens`.
            cache: from `trunk.cache`; None: no cache.
        """
        if not isinstance(batch, Tokens):
            if self.column not in batch:
                raise InputError(f"the batch has {sorted(batch)}, expected the column {self.column!r}")
            batch = self.front(batch[self.column])
        return self.trunk(batch) if cache is None else self.trunk(batch, cache=cache)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) -> logits (..., V)."""
        return F.linear(x, self.head_weight, self.head_bias)

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """``{"text": ...}`` -> logits (B, N, V) of the token after each position; undefined at padding."""
        return self.logits(self.hidden(batch).x)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats, the mean over predicted tokens; 0 with a graph if there are none."""
        total, count = self._sum(batch)
        return {"loss": total / count.clamp(min=1)}

    def _sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.hidden(batch).x
        return token_loss(x, self.head_weight, batch[self.column]["labels"], self.head_bias)

    # ---- evaluation --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, overlap: int | None = None
    ) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity`` (per token), ``bits_per_byte``, and the counts ``tokens``, ``bytes``.

        All ids of a text except the first are predicted; with a start token that is the whole text. The end token
        counts in the bits but has no bytes. Bytes are those of the UTF-8 text after the tokenizer's normalisation,
        without those of a first token that is not predicted. So bits per byte compare models of different vocabularies.

        Args:
            rows: rows with a text each.
            batch_size: windows per batch.
            overlap: tokens that a window of a long text repeats from the previous one as context. None: half a window.

        Raises:
            InputError: no rows, or no row with a token to predict.
        """
        overlap = (self.context or 2) // 2 if overlap is None else overlap
        front = self.front
        windows, size = [], 0
        for row in rows:
            ids = self.read(row)[self.column]
            windows += split_windows(ids, self.context, overlap)
            size += len(front.decode(ids).encode())
            if len(ids) and front.start_id is None:
                size -= len(front.token_bytes(int(ids[0]))) if int(ids[0]) != front.end_id else 0
        if not windows:
            raise InputError(f"{len(rows)} rows have no token to predict")
        total, count = 0.0, 0
        with evaluating(self):
            windows.sort(key=lambda w: -len(w.ids))
            for i in range(0, len(windows), batch_size):
                packed = pack_windows(windows[i : i + batch_size], self.context, front.pad_id)
                batch_loss, n = self._sum(Batch({self.column: packed}).to(self.device))
                total, count = total + float(batch_loss), count + int(n)
        return {
            "loss": total / count,
            "perplexity": math.exp(min(700.0, total / count)),
            "bits_per_byte": total / math.log(2) / max(1, size),
            "tokens": count,
            "bytes": size,
        }

    # ---- generation --------------------------------------------------------------------------------------

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
        """Continue prompts; returns the continuations without the prompts.

        A row ends at the end token, before a stop string, after `max_new_tokens`, or when the context is full.

        Args:
            prompts: a list of texts of any lengths, or one text.
            max_new_tokens: the most tokens to generate per prompt.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; temperature 0 is greedy.
            stop: strings that end a continuation; it does not include them.
            stream: called with (row, new text) during generation, never with an incomplete character.
            special: parse special tokens in the prompts, as in chat templates.

        Raises:
            InputError: a prompt without a token (if the tokenizer has no start token), or longer than the context.
        """
        sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        return [c.text for c in self.continuations(prompts, max_new_tokens, sampling, stop, stream, special)]

    def continuations(
        self,
        prompts: Sequence[str | Sequence[int]] | str,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        special: bool = False,
    ) -> list[Continuation]:
        """As `generate`, but returns text, ids and finish reason; a prompt may also be a list of ids."""
        with evaluating(self), torch.inference_mode():
            step, logits, options = self._start(prompts, max_new_tokens, special)
            return decode(step, logits, sampling=sampling, stop=stop, stream=stream, **options)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(temperature=1.0),
        stop: Sequence[str] = (),
        special: bool = False,
    ) -> Iterator[str]:
        """Continue one prompt; yields the text during generation."""
        with evaluating(self):
            with torch.inference_mode():
                step, logits, options = self._start([prompt], max_new_tokens, special)
            for _, text in decode_stream(step, logits, sampling=sampling, stop=stop, **options):
                yield text

    def _start(self, prompts: Sequence[str | Sequence[int]] | str, new: int, special: bool) -> tuple:
        """Run the prompts through the trunk; see `start_decoding`."""
        prompts, front = [prompts] if isinstance(prompts, str) else list(prompts), self.front
        ids = [
            self._ids(p, end=False, special=special) if isinstance(p, str) else torch.as_tensor(p)
            for p in prompts
        ]
        for k, n in enumerate(map(len, ids)):
            if n == 0:
                raise InputError(
                    f"prompt {k} has no token: give a non-empty text, or a tokenizer with start="
                )
            if self.context is not None and n > self.context:
                raise InputError(
                    f"prompt {k} has {n} tokens, more than the context of {self.context}: give its last {self.context} tokens"
                )
        tokens = front(front.collate(ids).to(self.device))
        step, logits, options = self.start_decoding(tokens, [len(i) for i in ids], new)
        return step, logits, options | {"prompts": [i.tolist() for i in ids]}

    def start_decoding(
        self, tokens: Tokens, sizes: Sequence[int], new: int
    ) -> tuple[Callable, Tensor, dict[str, Any]]:
        """Run the prompt through the trunk and prepare `decode`.

        Args:
            tokens: (B, N, D), padded at the end.
            sizes: B ints, the number of tokens of each row, 1 or more.
            new: the most tokens to generate.

        Returns:
            A step function from ids (B,) to logits (B, V), the logits of the first new token, and the remaining keyword
            arguments of `decode`.
        """
        front = self.front
        limits = [new if self.context is None else min(new, self.context - n + 1) for n in sizes]
        cache = self.trunk.cache(len(sizes), max(sizes) + max(limits))
        last = torch.tensor(list(sizes), device=self.device)
        x = self.hidden(tokens, cache).x
        position = [last[:, None]]  # of the next token

        workload = len(sizes), max(limits)
        trunk = prepacked(self.trunk, *workload)
        head = prepacked_linear(self.head_weight, self.head_bias, *workload)

        def step(new: Tensor) -> Tensor:
            tokens = front.wrap(front.embed(new[:, None], position[0]), (1,) * len(new), "causal")
            position[0] = position[0] + 1
            return head(trunk(cache.offset(tokens), cache=cache).x[:, 0])

        def select(rows: Tensor) -> None:
            cache.select(rows)
            position[0] = position[0][rows]

        logits = self.logits(x[torch.arange(len(sizes), device=x.device), last - 1])
        options = {"max_new_tokens": limits, "front": front, "end_ids": self.end_ids, "select": select}
        return step, logits, options

    @property
    def end_ids(self) -> set[int]:
        """Ids that end a text: the tokenizer's end token and `stop_ids`."""
        own = () if self.front.end_id is None else (self.front.end_id,)
        return {*own, *self.stop_ids}
