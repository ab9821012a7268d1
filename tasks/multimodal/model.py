"""Multimodal language model: images, audio and video interleaved with the text of one sequence.

Each medium's tokens (from its tokenizer, then its encoder if it has one) are projected to the language model's width and
placed where the conversation has them: any number per text, in any order. A medium's tokens attend to each other and to
everything before them; text attends causally. `Tokens.block` alone expresses this, so the trunk is that of any language
model, from scratch or published (LLaVA, Liu et al. 2023; Flamingo's resampler, Alayrac et al. 2022).

Shapes: B rows, N tokens, D width of the language model, M media of a column with K tokens each, T media tokens.
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
    ChatRow,
    Medium,
    collate_rows,
    count_tokens,
    equal_answers,
    fit_context,
    prompt_row,
    reference_answer,
    training_row,
)
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.text.chat_template import Chat
from worldtokens.tokens import Tokens

Messages = str | Sequence[Mapping[str, Any]]


class MultimodalLM(Task):
    """A language model that answers questions about images, audio, video or other media.

    A row is ``{"messages": [...]}``, each a dict of ``"role"`` and ``"content"``; a content is a str, or a list of str and
    media such as ``{"image": path}``. The loss covers the messages of the ``"assistant"``, the rest is context.

    Args:
        language_model: a `LanguageModel` or `ChatModel`.
        tokenizers: the media's tokenizers by column.
        projectors: modules that map a column's tokens to the language model's width D: a `Resampler` or `Projector` with
            ``dim=D``. A column whose tokens already have width D needs none.
        encoders: trunks applied to a column's tokens before the projector.
        chat_template: Jinja chat template (see `tokenizers/text/chat_template.py`); None: the ChatModel's own.
        context: maximum number of tokens of a conversation, media included; None: the language model's.
        freeze_language_model: freeze the language model's weights.

    Raises:
        ValueError: widths, columns or settings that do not match.
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
                f"columns {sorted(extra)}: projectors and encoders need a tokenizer, one of {sorted(tokenizers)}; text belongs "
                "to the language model"
            )
        for name in tokenizers:
            self._check_widths(name)
        template = chat_template or getattr(language_model, "chat_template", None)
        if template is None:
            raise ValueError("the language model has no chat template: give chat_template=")
        self.chat_template: str = template
        limit = language_model.context
        if context is not None and (context < 1 or context > (limit or context)):
            raise ValueError(f"context={context}, expected 1 to the language model's {limit}")
        self.context = context or limit
        if freeze_language_model:
            language_model.requires_grad_(False)
        self._sizes: dict[tuple, int] = {}

    def _check_widths(self, name: str) -> None:
        width = self.tokenizers[name].dim
        if name in self.encoders and self.encoders[name].dim != width:
            raise ValueError(
                f"the {name!r} tokenizer has dim={width}, its encoder dim={self.encoders[name].dim}: expected one width"
            )
        projector, target = dict(self.projectors).get(name), self.language_model.front.dim
        dims = (width, width) if projector is None else (projector.context_dim, projector.dim)
        if dims != (width, target):
            raise ValueError(
                f"the {name!r} tokens have width {width}, the language model {target}, but the projector maps "
                f"{dims[0]} -> {dims[1]}: give Projector or Resampler(dim={target}, context_dim={width})"
            )

    # ---- rows --------------------------------------------------------------------------------------------

    def read(self, row: Mapping[str, Any], rng=None, augment=None) -> dict[str, Any]:
        """Reads one row: its messages, with the media read.

        Raises:
            InputError: no messages, or a content that cannot be read.
        """
        if not isinstance(row.get("messages"), list | tuple) or not row["messages"]:
            raise InputError(
                f"a row has the columns {sorted(row)}, expected a list of messages under 'messages'"
            )
        return {"messages": self.read_messages(row["messages"], augment)}

    def read_messages(
        self, messages: Messages, augment: Mapping[str, Callable] | None = None
    ) -> list[Mapping[str, Any]]:
        """Reads messages, or one question; every medium becomes its column and raw tensor."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        read = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple):
                message = {**message, "content": [self._read_part(part, i, augment) for part in content]}
            read.append(message)
        return read

    def _read_part(
        self, part: Any, message: int, augment: Mapping[str, Callable] | None
    ) -> str | tuple[str, Any]:
        fields = (
            {k: v for k, v in part.items() if k != "type"} if isinstance(part, Mapping) else {"text": part}
        )
        ((name, value),) = fields.items() if len(fields) == 1 else (("", None),)
        if name == "text" and isinstance(value, str):
            return value
        if name not in self.tokenizers:
            raise InputError(
                f"message {message} holds {part!r:.80}, expected a str or a dict of one of {sorted(self.tokenizers)}"
            )
        raw = self.tokenizers[name].read(value)
        return name, augment[name](raw) if augment and name in augment else raw

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates rows from `read`, see `interleave.collate_rows`; ``batch["weight"]`` counts the predicted tokens.

        Raises:
            InputError: the last question of a conversation is longer than the context.
        """
        front = self.language_model.front
        encoded = [
            self._encode(
                row["messages"], lambda c: training_row(c, self.language_model.end_ids, front.pad_id)
            )
            for row in rows
        ]
        batch = collate_rows(encoded, front.pad_id, self.tokenizers)
        batch["weight"] = sum(int((row.labels >= 0).sum()) for row in encoded)
        return batch

    def _encode(self, messages: Sequence[Mapping[str, Any]], encode: Callable[[Chat], ChatRow]) -> ChatRow:
        """Encodes read messages as a row that fits the context."""
        sized = []
        for message in messages:
            if isinstance(message, Mapping) and isinstance(message.get("content"), list):
                content = [
                    p if isinstance(p, str) else Medium(p[0], p[1], self.media_size(p[0], p[1]))
                    for p in message["content"]
                ]
                message = {**message, "content": content}
            sized.append(message)
        return fit_context(
            sized,
            lambda some: encode(Chat(self.language_model.front, self.chat_template, some)),
            self.context,
        )

    def media_size(self, column: str, raw: Tensor) -> int:
        """Number of tokens of a raw medium: the resampler's latents, else the tokenizer's count for its shape."""
        projector = dict(self.projectors).get(column)
        if isinstance(projector, Resampler):
            return len(projector.latents)
        key = column, tuple(raw.shape)
        if key not in self._sizes:
            self._sizes[key] = count_tokens(self.tokenizers[column], raw)
        return self._sizes[key]

    # ---- forward -----------------------------------------------------------------------------------------

    def embed_media(self, column: str, batch: Batch) -> Tokens:
        """Embeds a tokenizer's batch at the language model's width, (M, K, D)."""
        tokens = self.tokenizers[column](batch)
        for modules in (self.encoders, self.projectors):
            tokens = modules[column](tokens) if column in modules else tokens
        return tokens

    def assemble(self, batch: Batch) -> Tokens:
        """Builds the trunk's input tokens, (B, N, D); position t increases by one per token, text or media."""
        front, ids = self.language_model.front, batch["ids"]
        (b, n), device = ids.shape, ids.device
        t = torch.arange(n, device=device).expand(b, n)
        x = front.embed(ids, t).flatten(0, 1)
        modality = torch.full((b * n,), modality_id(front.modality), dtype=torch.int16, device=device)
        for name, media in batch["media"].items():
            positions = batch["positions"][name]
            tokens, valid = self._valid(name, self.embed_media(name, media), batch["sizes"][name])
            y = tokens.x.flatten(0, 1)[valid]
            if front.pos_embed is not None:
                y = y + front.pos_embed[t.flatten()[positions]]
            x = x.index_copy(0, positions, y.to(x.dtype))
            modality = modality.index_copy(0, positions, tokens.modality.flatten()[valid])
        order = "causal" if batch["text_only"] else "any"
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
        """The tokens of a column, and the indices (T,) of the valid ones in the flattened (M * K)."""
        tokens = tokens if tokens.layout is not None else tokens.infer_layout()
        lengths = tuple(sum(row) for row in tokens.layout.lengths) if tokens.layout is not None else None
        if lengths != sizes:
            raise ValueError(f"the column {column!r} has {lengths} tokens, expected {sizes}")
        k = tokens.shape[1]
        if tokens.layout.full(k):
            return tokens, slice(None)
        indices = [m * k + i for m, size in enumerate(sizes) for i in range(size)]
        return tokens, torch.tensor(indices, device=tokens.device)

    def hidden(self, batch: Batch) -> Tokens:
        """Hidden states before the head, (B, N, D)."""
        return self.language_model.hidden(self.assemble(batch))

    def forward(self, batch: Batch) -> Tensor:
        """Next-token logits (B, N, V); those at padding are meaningless."""
        return self.language_model.logits(self.hidden(batch).x)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats per token of the answers; 0 with a graph where there are none."""
        total, count = self._sum(batch)
        loss = total / count.clamp(min=1)
        if torch.is_grad_enabled() and not loss.requires_grad:
            # a batch without media and a frozen language model: zero gradients, so that backward() still works
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
        """Generates the answer to a conversation, or the answers to several.

        Args:
            messages: a question, or a conversation as in a row: ``[{"role": "user", "content": ["What is this?",
                {"image": "cat.jpg"}]}]``; or a list of conversations. Answers do not depend on the batch.
            max_new_tokens: maximum length of an answer in tokens.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; greedy by default.
            stop, stream: as in `LanguageModel.generate`.

        Raises:
            InputError: a conversation cannot be read, or its last question is longer than the context.
        """
        sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        one = isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Mapping))
        conversations: Any = [messages] if one else messages
        answers = self.continuations(conversations, max_new_tokens, sampling, stop, stream)
        return answers[0].text if one else [c.text for c in answers]

    def continuations(
        self,
        conversations: Sequence[Messages],
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        stream: Stream | None = None,
    ) -> list[Continuation]:
        """As `chat`, with token ids and the reason for stopping."""
        if not len(conversations):
            return []
        pad = self.language_model.front.pad_id
        with evaluating(self), torch.inference_mode():
            encoded = [
                self._encode(self.read_messages(c), lambda chat: prompt_row(chat, pad)) for c in conversations
            ]
            batch = collate_rows(encoded, pad, self.tokenizers).to(self.device)
            step, logits, how = self.language_model.start_decoding(
                self.assemble(batch), batch["lengths"], max_new_tokens
            )
            # media are padding ids in the prompts: the repetition penalty does not apply to them
            prompts = [row.ids.tolist() for row in encoded]
            return decode(step, logits, sampling=sampling, stop=stop, stream=stream, prompts=prompts, **how)

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, max_new_tokens: int = 24
    ) -> dict[str, float]:
        """``loss`` (nats per token of an answer), ``exact`` (share of last answers that match exactly, ignoring case)
        and ``tokens`` (number of predicted tokens).

        Args:
            rows: conversations that end with an answer.
            batch_size: rows per forward pass.
            max_new_tokens: maximum length of the answers, generated greedily; 0: no generation and no ``exact``.

        Raises:
            InputError: no rows, or a row that does not end with an answer.
        """
        if not len(rows):
            raise InputError("no rows to evaluate")
        total, count, correct = 0.0, 0, 0
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                some = [rows[k] for k in range(i, min(i + batch_size, len(rows)))]
                references = [reference_answer(row) for row in some]
                part, n = self._sum(self.collate([self.read(row) for row in some]).to(self.device))
                total, count = total + float(part), count + int(n)
                if max_new_tokens:
                    answers = self.chat([row["messages"][:-1] for row in some], max_new_tokens)
                    correct += sum(map(equal_answers, answers, references))
        metrics = {"loss": total / max(1, count), "tokens": count}
        return metrics | ({"exact": correct / len(rows)} if max_new_tokens else {})
