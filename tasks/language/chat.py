"""A language model that answers messages, by the template that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.language.decoding import Sampling, Stream
from worldtokens.tasks.language.model import LanguageModel
from worldtokens.tokenizers.text.chat_template import chat_ids
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


class ChatModel(LanguageModel):
    """A `LanguageModel` that knows how a conversation is written down.

    Args:
        tokenizer, trunk, tied, bias, context: as in `LanguageModel`.
        template: chat template, Jinja text (see `tokenizers/text/chat_template.py`); None: as the language model it is, only with `ends`.
        ends: ids beside the end token that end an answer.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | dict[str, TextTokenizer],
        trunk: Part,
        tied: bool = True,
        bias: bool = False,
        context: int | None = None,
        template: str | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        super().__init__(tokenizer, trunk, tied, bias, context)
        self.template, self.ends = template, tuple(ends)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        seed: int | None = None,
    ) -> str:
        """The answer to a question, or to the last of several messages.

        Args:
            messages: a question; or dicts of ``"role"`` (``"system"``, ``"user"``, ``"assistant"``) and ``"content"``.
            max_new_tokens: the longest answer, in tokens.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; greedy unless asked otherwise.
            stop, stream: as in `generate`.

        Raises:
            InputError: no template, messages that it does not take, or more of them than the context holds.
        """
        if self.template is None:
            raise InputError(
                "this model has no chat template: use generate, or give ChatModel one (template=)"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = chat_ids(self.front, self.template, messages)
        how = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        return self.continuations([ids.tolist()], max_new_tokens, how, stop, stream)[0].text
