"""What captioning, speech-to-text and translation share: a decoder writes text and reads a context by cross-attention.

The text column is written, all the others are read: their tokens are set side by side and, where there is an encoder,
read each other first. So an image, a sound, a clip or a sentence as the source is a matter of the front-end alone.

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
from worldtokens.tasks.seq2seq.context import beside, spread
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens


class EncoderDecoder(Task):
    """A decoder that writes one column and reads the others.

    Args:
        tokenizers: front-ends by column; the one named `text` is a `TextTokenizer` with an end token.
        decoder: ``Transformer(cross=True)``, or a recurrent trunk that reads a context.
        encoder: what the source tokens go through first, or None.
        text: the column that is written; None: the class's own (``"text"``, or ``"target"`` of a Translator).
        tied: the head is the text's embedding; False gives it weights of its own.
        prefix: special ids or tokens that every answer is told to begin with, the last of which asks for the first
            word. Default: the text front-end's start token, or its end token where it has none.
        captions: ``"all"``: of several texts of a row one is drawn in each epoch, and any of them is right;
            ``"first"``: only the first counts.
        label_smoothing: share of the target spread evenly over the vocabulary, 0 to below 1.
        suppress: ids that are never written.
        suppress_first: ids that no answer begins with.
        max_new_tokens: the longest answer, in ids, unless a call says otherwise.
        score: what `evaluate` measures and the best checkpoint is chosen by: ``"loss"``, or of the answers ``"bleu"``,
            ``"chrf"``, ``"wer"`` or ``"exact"``.

    Raises:
        ValueError: columns, widths or settings that do not fit together.
    """

    written = "text"

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
        text = self.written if text is None else text
        if text not in tokenizers or len(tokenizers) < 2:
            raise ValueError(
                f"expected the column {text!r} and one or more to read, got {sorted(tokenizers)}"
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
        self._check_widths()
        self.prefix = self.prefix_ids(prefix)
        self.head = None
        if not tied:
            self.head = nn.Linear(self.front.dim, self.front.vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    def _check_widths(self) -> None:
        front = self.front
        if getattr(front, "end_id", None) is None:
            raise ValueError(
                f"the {self.text!r} front-end has no end token, so no answer would end: build it with end="
            )
        if front.dim != self.decoder.dim:
            raise ValueError(f"the {self.text!r} tokens are {front.dim} wide, the decoder {self.decoder.dim}")
        if not getattr(self.decoder, "cfg", self.decoder).cross:
            raise ValueError("the decoder reads no context: build it with cross=True")
        width = self.encoder.dim if self.encoder is not None else context_width(self.decoder)
        for name in self.sources:
            if self.tokenizers[name].dim != width:
                raise ValueError(
                    f"the {name!r} front-end gives tokens {self.tokenizers[name].dim} wide, they are read {width} wide"
                )
        if self.encoder is not None and width != context_width(self.decoder):
            raise ValueError(
                f"the encoder gives tokens {width} wide, the decoder reads {context_width(self.decoder)}: give it "
                f"context_dim={width}"
            )

    @property
    def front(self) -> Tokenizer:
        """The text's front-end."""
        return self.tokenizers[self.text]

    @property
    def head_weight(self) -> Tensor:
        """(V, D)."""
        return self.front.embedding.weight if self.head is None else self.head.weight

    def prefix_ids(self, prefix: Sequence[int | str] | None) -> list[int]:
        """Ids of special ids or tokens; None gives the usual beginning.

        Raises:
            InputError: no id at all, or a token that the vocabulary has not.
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
                found = found if front.decode(found) == "" else []  # words are no special token
            if len(found) != 1 or not 0 <= found[0] < front.vocab_size:
                raise InputError(
                    f"prefix names {given!r}, which is no id below {front.vocab_size} and no special token"
                )
            ids += found
        if not ids:
            raise InputError("the prefix is empty: at least one id must ask for the first word")
        return ids

    # ---- rows --------------------------------------------------------------------------------------------

    def read(self, row: Mapping[str, Any], rng=None, augment=None) -> dict[str, Any]:
        if self.captions == "first" and isinstance(row.get(self.text), list):
            row = {**row, self.text: row[self.text][:1]}
        return super().read(row, rng, augment)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch.

        ``batch[text]`` holds what the decoder is given and, under `labels` (B, N), what it has to say next: the prefix
        is given and not predicted. ``batch["weight"]`` counts the predicted ids, so that batches are averaged by token.
        """
        plain = [{k: v for k, v in row.items() if k != self.text} for row in rows]
        batch = super().collate(plain)
        batch["rows"], batch["weight"] = len(rows), 0
        places = tuple(i for i, row in enumerate(rows) if self.text in row)
        if places:
            batch[self.text] = self._taught([rows[i][self.text] for i in places])
            batch["has"][self.text] = None if len(places) == len(rows) else places
            batch["weight"] = sum(batch[self.text]["predicted"])
        return batch

    def _taught(self, texts: Sequence[Tensor]) -> Batch:
        front, first = self.front, len(self.prefix) - 1
        given, labels = [], []
        for ids in texts:
            ids = ids.tolist()
            body = ids[1:] if ids[:1] == [front.start_id] else ids
            if front.context is not None and first + len(body) > front.context:
                body = [*body[: front.context - first - 1], front.end_id]
            given.append(torch.tensor([*self.prefix, *body[:-1]]))
            labels.append(torch.tensor([IGNORE] * first + body))
        batch = front.collate(given)
        batch["labels"] = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE)
        batch["predicted"] = tuple(len(each) - first for each in labels)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def encode(self, batch: Mapping[str, Any]) -> Tokens:
        """The sources of a batch -> what the decoder reads, (B, K, D); a row that has none has no valid token."""
        rows = batch["rows"]
        parts = [
            spread(self.tokenizers[name](batch[name]), batch["has"].get(name), rows)
            for name in self.sources
            if name in batch
        ]
        if not parts:
            width = self.encoder.dim if self.encoder is not None else context_width(self.decoder)
            parts = [
                Tokens(torch.zeros(rows, 0, width, device=self.device), layout=Layout.simple([0] * rows))
            ]
        context = beside(parts)
        return context if self.encoder is None else self.encoder(context)

    def forward(self, batch: Batch) -> Tokens:
        """The decoder's tokens of every row that has a text, teacher-forced: (B', N, D)."""
        context, has = self.encode(batch), batch["has"].get(self.text)
        if has is not None:
            context = context[list(has)]
        return self.decoder(self.front(batch[self.text]), context=context)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the next id, the mean over predicted ids; without any a zero that has a graph."""
        total, count = self.token_losses(batch)
        return {"loss": total / count.clamp(min=1)}

    def token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy and how many ids were predicted."""
        if self.text not in batch:
            nothing = self.encode(batch).x.sum() * 0.0 + self.head_weight.sum() * 0.0
            return nothing, torch.zeros((), dtype=torch.int64, device=nothing.device)
        smoothing = self.label_smoothing if self.training else 0.0
        labels = batch[self.text]["labels"]
        return token_loss(self(batch).x, self.head_weight, labels, label_smoothing=smoothing)

    # ---- writing -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(
        self,
        context: Tokens,
        beams: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        prefix: Sequence[int | str] | None = None,
    ) -> list[list[Hypothesis]]:
        """Answers to a context, best first; see `beam_search`. One beam is the greedy search.

        Args:
            context: (B, K, D), from `encode`.
            prefix: instead of the model's own.
        """
        if not len(context):
            return []
        ids = self.prefix if prefix is None else self.prefix_ids(prefix)
        longest = max_new_tokens or self.max_new_tokens
        if self.front.context is not None:
            longest = min(longest, self.front.context - len(ids) + 1)
        if longest < 1:
            raise InputError(f"the prefix has {len(ids)} ids, the text's context holds {self.front.context}")
        writing = _Writing(self, context)
        return beam_search(
            writing.step,
            writing.select,
            torch.tensor([ids] * len(context), device=self.device),
            beams=beams,
            max_new_tokens=longest,
            end_id=self.front.end_id,
            length_penalty=length_penalty,
            ban=self.suppress,
            ban_first=self.suppress_first,
        )

    @torch.no_grad()
    def answer(self, sources: Sequence[Any], batch_size: int = 32, **how: Any) -> list[str]:
        """What the model writes for each source.

        Args:
            sources: rows with some of the columns that are read, or, where one column is read, what its front-end reads.
            batch_size: sources worked on at a time.
            how: `beams`, `max_new_tokens`, `length_penalty`, `prefix`, as in `write`.

        Raises:
            InputError: a source cannot be read.
        """
        out = []
        with evaluating(self):
            for i in range(0, len(sources), batch_size):
                context = self.encode(self.read_sources(sources[i : i + batch_size]))
                out += [
                    self.front.decode(found[0].ids) if found else "" for found in self.write(context, **how)
                ]
        return out

    def read_sources(self, sources: Sequence[Any]) -> Batch:
        """Sources -> a batch without text on the model's device."""
        rows = []
        for i, source in enumerate(sources):
            if not isinstance(source, Mapping):
                if len(self.sources) > 1:
                    raise InputError(
                        f"source {i} is a {type(source).__name__}, but this model reads {self.sources}: give rows, "
                        f'as {{"{self.sources[0]}": ...}}'
                    )
                source = {self.sources[0]: source}
            rows.append(self.read({k: v for k, v in source.items() if k in self.sources}))
        return self.collate(rows).to(self.device)

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, beams: int = 1
    ) -> dict[str, float]:
        """``loss`` (nats for an id of each row's first text); with another `score` the answers' figures too.

        Args:
            rows: with the text and one or more of the columns that are read.
            beams: of the search for the answers.

        Raises:
            InputError: no row with a text.
        """
        held = [row for row in (rows[i] for i in range(len(rows))) if row.get(self.text)]
        if not held:
            raise InputError(f"no row to evaluate has the column {self.text!r}")
        total, count = 0.0, 0
        with evaluating(self):
            for i in range(0, len(held), batch_size):
                batch = self.collate([self.read(row) for row in held[i : i + batch_size]])
                with torch.no_grad():
                    loss, predicted = self.token_losses(batch.to(self.device))
                total, count = total + float(loss), count + int(predicted)
        figures = {"loss": total / max(1, count)}
        if self.score != "loss":
            said = self.answer(held, batch_size, beams=beams)
            figures |= text_scores(said, [self.references(row) for row in held])
        return figures

    def references(self, row: Mapping[str, Any]) -> list[str]:
        """The texts of a row that count as right."""
        texts = row[self.text] if isinstance(row[self.text], list) else [row[self.text]]
        return texts[:1] if self.captions == "first" else texts

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"prefix": list(self.prefix)}


class _Writing:
    """A decoder at work: what `beam_search` steps and reorders."""

    def __init__(self, model: EncoderDecoder, context: Tokens) -> None:
        self.model, self.context = model, context
        self.cache = model.decoder.cache(len(context))

    def step(self, ids: Tensor) -> Tensor:
        """(R, n) -> (R, V)."""
        front, at = self.model.front, self.cache.length
        tokens = front.wrap(front.embed(ids, at), [ids.shape[1]] * len(ids), "causal", ids=ids)
        context = self.context if at == 0 else None
        out = self.model.decoder(self.cache.follow(tokens), context=context, cache=self.cache)
        return nn.functional.linear(out.x[:, -1], self.model.head_weight)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)


def context_width(decoder: Part) -> int:
    """How wide the tokens are that a decoder reads."""
    settings = getattr(decoder, "cfg", decoder)
    return getattr(settings, "context_dim", None) or decoder.dim
