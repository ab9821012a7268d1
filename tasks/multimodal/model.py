"""A language model that is shown things: images, sounds and clips stand among the words of one sequence.

Each medium's tokens (its front-end's, then an encoder's where there is one) go through a bridge into the language model's
width, and stand where the conversation has them, several to a text and in any order. A medium's tokens read each other
and what was said before; text reads from left to right. That is `Tokens.block` and nothing else: the trunk is any language
model's, from scratch or published (LLaVA, Liu et al. 2023; Flamingo's resampler, Alayrac et al. 2022).

Shapes: B rows, N tokens, D width of the language model, M media of a column, K tokens of one, T tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.resampler import Resampler
from worldtokens.errors import InputError
from worldtokens.layout import Layout, modality_id
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.language.decoding import Continuation, Sampling, Stream, decode
from worldtokens.tasks.language.loss import token_loss
from worldtokens.tasks.language.model import LanguageModel
from worldtokens.tasks.multimodal.interleave import (
    Line,
    Medium,
    asked,
    fitted,
    gold,
    rows_of,
    same,
    taught,
    tokens_of,
)
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text.chat_template import Chat
from worldtokens.tokens import Tokens

Messages = str | Sequence[Mapping[str, Any]]


class MultimodalLM(Task):
    """Answers questions about what it is shown.

    A row is ``{"messages": [...]}``, each a dict of ``"role"`` and ``"content"``; a content is a str, or a list of str and
    media such as ``{"image": path}``. What the ``"assistant"`` says is learned, all else is read.

    Args:
        language_model: a `LanguageModel` or `ChatModel`.
        tokenizers: the media's front-ends by column.
        projectors: what brings a column's tokens to the language model's width: a `Resampler` or `Projector` with
            ``dim=D``. A column whose tokens are D wide needs none.
        encoders: trunks that a column's tokens go through before their bridge.
        chat_template: chat template, Jinja text (see `tokenizers/text/chat_template.py`); None: the ChatModel's own.
        context: the most tokens of a conversation, media included; None: the language model's.
        freeze_language_model: the language model keeps its weights.

    Raises:
        ValueError: widths, columns or settings that do not fit together.
    """

    metric = ("exact", "max")

    def __init__(
        self,
        language_model: LanguageModel,
        tokenizers: dict[str, Tokenizer],
        projectors: dict[str, Part] | None = None,
        encoders: dict[str, Part] | None = None,
        chat_template: str | None = None,
        context: int | None = None,
        freeze_language_model: bool = False,
    ) -> None:
        super().__init__()
        self.language_model, self.tokenizers = language_model, nn.ModuleDict(tokenizers)
        self.projectors, self.encoders = nn.ModuleDict(projectors or {}), nn.ModuleDict(encoders or {})
        if extra := ({*self.projectors, *self.encoders} - {*tokenizers}) or ({"text"} & {*tokenizers}):
            raise ValueError(
                f"columns {sorted(extra)}: projectors and encoders belong to front-ends {sorted(tokenizers)}, and text is "
                "the language model's"
            )
        for name in tokenizers:
            self._check_widths(name)
        self.chat_template = chat_template or getattr(language_model, "template", None)
        if self.chat_template is None:
            raise ValueError("the language model has no chat template: give chat_template=")
        most = language_model.context
        if context is not None and (context < 1 or context > (most or context)):
            raise ValueError(f"context={context}, expected 1 to the language model's {most}")
        self.context = context or most
        if freeze_language_model:
            language_model.requires_grad_(False)
        self._sizes: dict[tuple, int] = {}

    def _check_widths(self, name: str) -> None:
        width, way = self.tokenizers[name].dim, f"the {name!r} front-end"
        if name in self.encoders:
            if self.encoders[name].dim != width:
                raise ValueError(
                    f"{way} gives tokens {width} wide, its encoder takes {self.encoders[name].dim}"
                )
            way += " and encoder"
        bridge, wanted = dict(self.projectors).get(name), self.language_model.front.dim
        takes, gives = (width, width) if bridge is None else (bridge.context_dim, bridge.dim)
        if (takes, gives) != (width, wanted):
            raise ValueError(
                f"{way} give tokens {width} wide for a language model {wanted} wide, but the bridge is "
                f"{takes} -> {gives}: give Projector or Resampler(dim={wanted}, context_dim={width})"
            )

    # ---- rows --------------------------------------------------------------------------------------------

    def read(self, row: Mapping[str, Any], rng=None, augment=None) -> dict[str, Any]:
        """One row -> its messages with the media read.

        Raises:
            InputError: no messages, or a content that cannot be read.
        """
        if not isinstance(row.get("messages"), list | tuple) or not row["messages"]:
            raise InputError(
                f"a row has the columns {sorted(row)}, expected a list of messages under 'messages'"
            )
        return {"messages": self.read_messages(row["messages"], augment)}

    def read_messages(self, messages: Messages, augment: Mapping[str, Callable] | None = None) -> list[dict]:
        """Messages, or one question, with every medium as its column and raw tensor."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        read = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple):
                message = {**message, "content": [self._part(part, i, augment) for part in content]}
            read.append(message)
        return read

    def _part(self, part: Any, message: int, augment: Mapping[str, Callable] | None) -> str | tuple[str, Any]:
        found = (
            {k: v for k, v in part.items() if k != "type"} if isinstance(part, Mapping) else {"text": part}
        )
        ((name, value),) = found.items() if len(found) == 1 else ((None, None),)
        if name == "text" and isinstance(value, str):
            return value
        if name not in self.tokenizers:
            raise InputError(
                f"message {message} holds {part!r:.80}, expected a str or a dict of one of {sorted(self.tokenizers)}"
            )
        raw = self.tokenizers[name].read(value)
        return name, augment[name](raw) if augment and name in augment else raw

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch, see `interleave.rows_of`; ``batch["weight"]`` counts the predicted tokens.

        Raises:
            InputError: a conversation whose last question is longer than the context.
        """
        front = self.language_model.front
        lines = [
            self._line(row["messages"], lambda c: taught(c, self.language_model.end_ids, front.pad_id))
            for row in rows
        ]
        batch = rows_of(lines, front.pad_id, self.tokenizers)
        batch["weight"] = sum(int((line.labels >= 0).sum()) for line in lines)
        return batch

    def _line(self, messages: Sequence[Mapping[str, Any]], write: Callable[[Chat], Line]) -> Line:
        """Read messages -> a row that fits the context."""
        sized = []
        for message in messages:
            if isinstance(message, Mapping) and isinstance(message.get("content"), list):
                content = [p if isinstance(p, str) else Medium(*p, self.size(*p)) for p in message["content"]]
                message = {**message, "content": content}
            sized.append(message)
        return fitted(
            sized, lambda some: write(Chat(self.language_model.front, self.chat_template, some)), self.context
        )

    def size(self, column: str, raw: Tensor) -> int:
        """Tokens that a raw medium becomes: a resampler's latents, else what the front-end makes of its shape."""
        bridge = dict(self.projectors).get(column)
        if isinstance(bridge, Resampler):
            return len(bridge.latents)
        key = column, tuple(raw.shape)
        if key not in self._sizes:
            self._sizes[key] = tokens_of(self.tokenizers[column], raw)
        return self._sizes[key]

    # ---- forward -----------------------------------------------------------------------------------------

    def media(self, column: str, batch: Batch) -> Tokens:
        """A front-end's batch -> its tokens in the language model's width, (M, K, D)."""
        tokens = self.tokenizers[column](batch)
        for room in (self.encoders, self.projectors):
            tokens = room[column](tokens) if column in room else tokens
        return tokens

    def assemble(self, batch: Batch) -> Tokens:
        """A batch -> the tokens that the trunk reads, (B, N, D): t counts on by one for each, text or not."""
        front, ids = self.language_model.front, batch["ids"]
        (b, n), device = ids.shape, ids.device
        t = torch.arange(n, device=device).expand(b, n)
        x = front.embed(ids, t).flatten(0, 1)
        modality = torch.full((b * n,), modality_id(front.modality), dtype=torch.int16, device=device)
        for name, media in batch["media"].items():
            places = batch["places"][name]
            tokens, picked = self._valid(name, self.media(name, media), batch["sizes"][name])
            y = tokens.x.flatten(0, 1)[picked]
            if front.position is not None:
                y = y + front.position[t.flatten()[places]]
            x = x.index_copy(0, places, y.to(x.dtype))
            modality = modality.index_copy(0, places, tokens.modality.flatten()[picked])
        order = "causal" if batch["plain"] else "any"
        return Tokens(
            x.unflatten(0, (b, n)),
            valid=torch.arange(n, device=device) < torch.tensor(batch["lengths"], device=device)[:, None],
            pos=nn.functional.pad(t[..., None].float(), (0, 2)),
            block=batch["block"],
            modality=modality.unflatten(0, (b, n)),
            ids=ids,
            layout=Layout.simple(batch["lengths"], order),
        )

    def _valid(self, column: str, tokens: Tokens, sizes: tuple[int, ...]) -> tuple[Tokens, Tensor | slice]:
        """Tokens of a column, and the places (T,) of the valid ones in the flattened (M * K)."""
        tokens = tokens if tokens.layout is not None else tokens.infer_layout()
        found = tuple(sum(row) for row in tokens.layout.lengths) if tokens.layout is not None else None
        if found != sizes:
            raise ValueError(f"the column {column!r} gave {found} tokens where {sizes} were expected")
        k = tokens.shape[1]
        if tokens.layout.full(k):
            return tokens, slice(None)
        picked = [m * k + i for m, size in enumerate(sizes) for i in range(size)]
        return tokens, torch.tensor(picked, device=tokens.device)

    def hidden(self, batch: Batch) -> Tokens:
        """What the head reads, (B, N, D)."""
        return self.language_model.hidden(self.assemble(batch))

    def forward(self, batch: Batch) -> Tensor:
        """A batch -> logits (B, N, V) of what follows each token; at padding they mean nothing."""
        return self.language_model.logits(self.hidden(batch).x)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats, the mean over the answers' tokens; 0 with a graph where there are none."""
        total, count = self._sum(batch)
        loss = total / count.clamp(min=1)
        if torch.is_grad_enabled() and not loss.requires_grad:
            # nothing shown to a frozen language model: a gradient of zeros, so that such a batch trains like any other
            loss = loss + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        return {"loss": loss}

    def _sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        lm = self.language_model
        return token_loss(self.hidden(batch).x, lm.head_weight, batch["labels"], lm.head_bias)

    # ---- answers -----------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        seed: int | None = None,
    ) -> str | list[str]:
        """The answer to a conversation, or the answers to several.

        Args:
            messages: a question, or a conversation as in a row: ``[{"role": "user", "content": ["What is this?",
                {"image": "cat.jpg"}]}]``; or a list of conversations, answered together, each as if alone.
            max_new_tokens: the longest answer, in tokens.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; greedy unless asked otherwise.
            stop, stream: as in `LanguageModel.generate`.

        Raises:
            InputError: a conversation that cannot be read, or whose last question is longer than the context.
        """
        how = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        one = isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Mapping))
        said = self.continuations([messages] if one else messages, max_new_tokens, how, stop, stream)
        return said[0].text if one else [c.text for c in said]

    def continuations(
        self,
        conversations: Sequence[Messages],
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        stream: Stream | None = None,
    ) -> list[Continuation]:
        """As `chat`, with the ids and the reason for the end."""
        if not len(conversations):
            return []
        pad = self.language_model.front.pad_id
        with evaluating(self), torch.inference_mode():
            lines = [self._line(self.read_messages(c), lambda chat: asked(chat, pad)) for c in conversations]
            batch = rows_of(lines, pad, self.tokenizers).to(self.device)
            step, logits, how = self.language_model.go_on(
                self.assemble(batch), batch["lengths"], max_new_tokens
            )
            # media stand as padding among the ids: no words to be penalised for
            said = [line.ids.tolist() for line in lines]
            return decode(step, logits, sampling=sampling, stop=stop, stream=stream, prompts=said, **how)

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, max_new_tokens: int = 24
    ) -> dict[str, float]:
        """``loss`` (nats for a token of an answer), ``exact``, the share of last answers said word for word, in any case,
        and ``tokens``, how many there are.

        Args:
            rows: conversations that end in an answer.
            batch_size: rows worked on at a time.
            max_new_tokens: of the answers written, greedily; 0: none are, and ``exact`` is left out.

        Raises:
            InputError: no rows, or one that does not end in the assistant's words.
        """
        if not len(rows):
            raise InputError("no rows to evaluate")
        total, count, right = 0.0, 0, 0
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                some = [rows[k] for k in range(i, min(i + batch_size, len(rows)))]
                wanted = [gold(row) for row in some]
                part, n = self._sum(self.collate([self.read(row) for row in some]).to(self.device))
                total, count = total + float(part), count + int(n)
                if max_new_tokens:
                    said = self.chat([row["messages"][:-1] for row in some], max_new_tokens)
                    right += sum(map(same, said, wanted))
        figures = {"loss": total / max(1, count), "tokens": count}
        return figures | ({"exact": right / len(rows)} if max_new_tokens else {})
