"""Encoder-decoder model of captioning, speech-to-text and translation: a decoder with cross-attention to a context.

One column is the target text, all others are sources. Source tokens are concatenated and pass through the encoder if
there is one. So the tokenizers alone decide whether the source is an image, audio, video or text.

Shapes: B rows, N text tokens, K context tokens, D width, P prefix ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.language.beam import Hypothesis, beam_search
from worldtokens.tasks.language.loss import IGNORE, token_loss
from worldtokens.tasks.metrics.text import SCORES, text_scores
from worldtokens.tasks.seq2seq.context import concat_tokens, scatter_rows
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens


class EncoderDecoder(Task):
    """Generates one text column from the other columns.

    Args:
        tokenizers: tokenizers by column; the one named `text` is a `TextTokenizer` with an end token.
        decoder: ``Transformer(cross=True)``, or a recurrent decoder with a context.
        encoder: trunk for the source tokens, or None.
        text: the target column; None: the class's default (``"text"``, for a Translator ``"target"``).
        tied: tie the head's weight to the text embedding. False: a separate weight.
        prefix: ids or special tokens at the start of every target; the first token is predicted from the last of them.
            Default: the text tokenizer's start token, or its end token if it has none.
        captions: ``"all"``: if a row has several texts, one is drawn in each epoch and all are references;
            ``"first"``: only the first is used.
        label_smoothing: share of the target that is spread evenly over the vocabulary, 0 to below 1.
        suppress: ids that are never generated.
        suppress_first: ids that are never generated first.
        max_new_tokens: default for the most ids per generated text.
        score: metric of `evaluate` that selects the best checkpoint: ``"loss"``, or of the generated texts ``"bleu"``,
            ``"chrf"``, ``"wer"`` or ``"exact"``.

    Raises:
        ValueError: columns, dims or settings that do not match.
    """

    target_column = "text"

    def __init__(
        self,
        tokenizers: dict[str, Tokenizer],
        decoder: Part,
        encoder: Part | None = None,
        text: str | None = None,
        tied: bool = True,
        prefix: list[int | str] | None = None,
        captions: str = "all",
        label_smoothing: float = 0.0,
        suppress: list[int] | None = None,
        suppress_first: list[int] | None = None,
        max_new_tokens: int = 64,
        score: str = "loss",
    ) -> None:
        super().__init__()
        text = self.target_column if text is None else text
        if text not in tokenizers or len(tokenizers) < 2:
            raise ValueError(
                f"expected the target column {text!r} and at least one source column, got {sorted(tokenizers)}"
            )
        if captions not in ("all", "first"):
            raise ValueError(f"captions={captions!r}, expected 'all' or 'first'")
        if score != "loss" and score not in SCORES:
            raise ValueError(f"score={score!r}, expected 'loss' or one of {sorted(SCORES)}")
        if not 0 <= label_smoothing < 1 or max_new_tokens < 1:
            raise ValueError(
                f"label_smoothing={label_smoothing} and max_new_tokens={max_new_tokens}, expected 0 to below 1, and 1 "
                "or more"
            )
        self.tokenizers = nn.ModuleDict(tokenizers)
        self.encoder, self.decoder, self.text = encoder, decoder, text
        self.sources = [c for c in tokenizers if c != text]
        self.captions, self.label_smoothing, self.max_new_tokens = captions, label_smoothing, max_new_tokens
        self.suppress, self.suppress_first = list(suppress or ()), list(suppress_first or ())
        self.score = score
        self.metric = (score, "max" if score != "loss" and SCORES[score] else "min")
        self._check_dims()
        self.prefix = self.prefix_ids(prefix)
        self.head = None
        if not tied:
            self.head = nn.Linear(self.front.dim, self.front.vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    def _check_dims(self) -> None:
        front = self.front
        if getattr(front, "end_id", None) is None:
            raise ValueError(
                f"the {self.text!r} tokenizer has no end token, so generation would not stop: build it with end="
            )
        if front.dim != self.decoder.dim:
            raise ValueError(
                f"the {self.text!r} tokenizer has dim {front.dim}, the decoder dim {self.decoder.dim}"
            )
        if not getattr(self.decoder, "cfg", self.decoder).cross:
            raise ValueError("the decoder has no cross-attention: build it with cross=True")
        width = self.encoder.dim if self.encoder is not None else get_context_dim(self.decoder)
        for name in self.sources:
            if self.tokenizers[name].dim != width:
                raise ValueError(
                    f"the {name!r} tokenizer has dim {self.tokenizers[name].dim}, expected {width}"
                )
        if self.encoder is not None and width != get_context_dim(self.decoder):
            raise ValueError(
                f"the encoder has dim {width}, the decoder context_dim={get_context_dim(self.decoder)}: build the decoder "
                f"with context_dim={width}"
            )

    @property
    def front(self) -> TextTokenizer:
        """The tokenizer of the target column."""
        return self.tokenizers[self.text]

    @property
    def head_weight(self) -> Tensor:
        """(V, D)."""
        return self.front.embedding.weight if self.head is None else self.head.weight

    def prefix_ids(self, prefix: Sequence[int | str] | None) -> list[int]:
        """The ids of a prefix given as ids or special tokens; None: the default prefix.

        Raises:
            InputError: the prefix is empty, or an item is no id and no special token of the vocabulary.
        """
        front = self.front
        if prefix is None:
            return [front.start_id if front.start_id is not None else front.end_id]
        ids = []
        for given in prefix:
            found = [given]
            if isinstance(given, str):
                found = front.read(given, special=True, end=False).tolist()
                found = found[1:] if found[:1] == [front.start_id] else found
                found = found if front.decode(found) == "" else []  # plain text is no special token
            if len(found) != 1 or not 0 <= found[0] < front.vocab_size:
                raise InputError(
                    f"prefix names {given!r}, which is no id below {front.vocab_size} and no special token"
                )
            ids += found
        if not ids:
            raise InputError("the prefix is empty: the first token is predicted from at least one id")
        return ids

    # ---- rows --------------------------------------------------------------------------------------------

    def read(self, row: Mapping[str, Any], rng=None, augment=None) -> dict[str, Any]:
        if self.captions == "first" and isinstance(row.get(self.text), list):
            row = {**row, self.text: row[self.text][:1]}
        return super().read(row, rng, augment)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch.

        ``batch[text]`` holds the decoder's inputs and, under `labels` (B, N), the next ids; the prefix is an input but
        not predicted. ``batch["weight"]`` is the number of predicted ids, so that batches are averaged per token.
        """
        sources = [{k: v for k, v in row.items() if k != self.text} for row in rows]
        batch = super().collate(sources)
        batch["rows"], batch["weight"] = len(rows), 0
        row_indices = tuple(i for i, row in enumerate(rows) if self.text in row)
        if row_indices:
            batch[self.text] = self._teacher_forced([rows[i][self.text] for i in row_indices])
            batch["has"][self.text] = None if len(row_indices) == len(rows) else row_indices
            batch["weight"] = sum(batch[self.text]["predicted"])
        return batch

    def _teacher_forced(self, texts: Sequence[Tensor]) -> Batch:
        front, first = self.front, len(self.prefix) - 1
        inputs, labels = [], []
        for ids in texts:
            ids = ids.tolist()
            body = ids[1:] if ids[:1] == [front.start_id] else ids
            if front.context is not None and first + len(body) > front.context:
                body = [*body[: front.context - first - 1], front.end_id]
            inputs.append(torch.tensor([*self.prefix, *body[:-1]]))
            labels.append(torch.tensor([IGNORE] * first + body))
        batch = front.collate(inputs)
        batch["labels"] = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE)
        batch["predicted"] = tuple(len(each) - first for each in labels)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def encode(self, batch: Mapping[str, Any]) -> Tokens:
        """The sources of a batch -> context tokens (B, K, D); a row without any source has no valid token."""
        rows = batch["rows"]
        parts = [
            scatter_rows(self.tokenizers[name](batch[name]), batch["has"].get(name), rows)
            for name in self.sources
            if name in batch
        ]
        if not parts:
            width = self.encoder.dim if self.encoder is not None else get_context_dim(self.decoder)
            parts = [
                Tokens(torch.zeros(rows, 0, width, device=self.device), layout=Layout.simple([0] * rows))
            ]
        context = concat_tokens(parts)
        return context if self.encoder is None else self.encoder(context)

    def forward(self, batch: Batch) -> Tokens:
        """Decoder outputs of every row that has a text, with teacher forcing: (B', N, D)."""
        context, has = self.encode(batch), batch["has"].get(self.text)
        if has is not None:
            context = context[list(has)]
        return self.decoder(self.front(batch[self.text]), context=context)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats, the mean over predicted ids; 0 with a graph if there are none."""
        total, count = self.token_losses(batch)
        return {"loss": total / count.clamp(min=1)}

    def token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy and the number of predicted ids."""
        if self.text not in batch:
            zero = self.encode(batch).x.sum() * 0.0 + self.head_weight.sum() * 0.0
            return zero, torch.zeros((), dtype=torch.int64, device=zero.device)
        smoothing = self.label_smoothing if self.training else 0.0
        labels = batch[self.text]["labels"]
        return token_loss(self(batch).x, self.head_weight, labels, label_smoothing=smoothing)

    # ---- generation --------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        context: Tokens,
        beams: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        prefix: Sequence[int | str] | None = None,
    ) -> list[list[Hypothesis]]:
        """Hypotheses for each row of a context, best first; see `beam_search`. One beam is greedy search.

        Args:
            context: (B, K, D), from `encode`.
            beams: beams of the search.
            max_new_tokens: the most ids per hypothesis; None: the model's setting.
            length_penalty: see `beam_search`.
            prefix: ids or special tokens, in place of the model's own.

        Raises:
            InputError: the prefix is invalid, or longer than the text's context.
        """
        if not len(context):
            return []
        ids = self.prefix if prefix is None else self.prefix_ids(prefix)
        longest = max_new_tokens or self.max_new_tokens
        if self.front.context is not None:
            longest = min(longest, self.front.context - len(ids) + 1)
        if longest < 1:
            raise InputError(
                f"the prefix has {len(ids)} ids, more than the text's context of {self.front.context}"
            )
        state = _DecoderState(self, context)
        return beam_search(
            state.step,
            state.select,
            torch.tensor([ids] * len(context), device=self.device),
            beams=beams,
            max_new_tokens=longest,
            end_id=self.front.end_id,
            length_penalty=length_penalty,
            suppress=self.suppress,
            suppress_first=self.suppress_first,
        )

    @torch.no_grad()
    def generate_texts(self, sources: Sequence[Any], batch_size: int = 32, **options: Any) -> list[str]:
        """The generated text of each source.

        Args:
            sources: rows with source columns; with one source column also bare inputs of its tokenizer.
            batch_size: sources per batch.
            options: `beams`, `max_new_tokens`, `length_penalty`, `prefix`, as in `generate`.

        Raises:
            InputError: a source cannot be read.
        """
        out = []
        with evaluating(self):
            for i in range(0, len(sources), batch_size):
                context = self.encode(self.collate_sources(sources[i : i + batch_size]))
                out += [
                    self.front.decode(found[0].ids) if found else ""
                    for found in self.generate(context, **options)
                ]
        return out

    def collate_sources(self, sources: Sequence[Any]) -> Batch:
        """Sources -> a batch without target text, on the model's device."""
        rows = []
        for i, source in enumerate(sources):
            if not isinstance(source, Mapping):
                if len(self.sources) > 1:
                    raise InputError(
                        f"source {i} is a {type(source).__name__}, but this model has the sources {self.sources}: give "
                        f'rows such as {{"{self.sources[0]}": ...}}'
                    )
                source = {self.sources[0]: source}
            rows.append(self.read({k: v for k, v in source.items() if k in self.sources}))
        return self.collate(rows).to(self.device)

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, beams: int = 1
    ) -> dict[str, float]:
        """``loss`` (nats per id of each row's first text); with another `score` also the metrics of generated texts.

        Args:
            rows: rows with the target text and source columns.
            batch_size: rows per batch.
            beams: beams of the search.

        Raises:
            InputError: no row has a target text.
        """
        labelled = [row for row in (rows[i] for i in range(len(rows))) if row.get(self.text)]
        if not labelled:
            raise InputError(f"no row to evaluate has the column {self.text!r}")
        total, count = 0.0, 0
        with evaluating(self):
            for i in range(0, len(labelled), batch_size):
                batch = self.collate([self.read(row) for row in labelled[i : i + batch_size]])
                with torch.no_grad():
                    loss, predicted = self.token_losses(batch.to(self.device))
                total, count = total + float(loss), count + int(predicted)
        metrics = {"loss": total / max(1, count)}
        if self.score != "loss":
            texts = self.generate_texts(labelled, batch_size, beams=beams)
            metrics |= text_scores(texts, [self.references(row) for row in labelled])
        return metrics

    def references(self, row: Mapping[str, Any]) -> list[str]:
        """The reference texts of a row."""
        texts = row[self.text] if isinstance(row[self.text], list) else [row[self.text]]
        return texts[:1] if self.captions == "first" else texts

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"prefix": list(self.prefix)}


class _DecoderState:
    """A decoder with its cache: the step and select functions of `beam_search`."""

    def __init__(self, model: EncoderDecoder, context: Tokens) -> None:
        self.model, self.context = model, context
        self.cache = model.decoder.cache(len(context))

    def step(self, ids: Tensor) -> Tensor:
        """Ids (R, n) -> logits (R, V) of the next token."""
        front, start = self.model.front, self.cache.length
        tokens = front.wrap(front.embed(ids, start), [ids.shape[1]] * len(ids), "causal", ids=ids)
        context = self.context if start == 0 else None
        out = self.model.decoder(self.cache.offset(tokens), context=context, cache=self.cache)
        return nn.functional.linear(out.x[:, -1], self.model.head_weight)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)


def get_context_dim(decoder: Part) -> int:
    """The dim of the context tokens that a decoder expects."""
    settings = getattr(decoder, "cfg", decoder)
    return getattr(settings, "context_dim", None) or decoder.dim
