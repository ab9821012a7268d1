"""A language model with a chat template."""

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
    """A `LanguageModel` with a chat template.

    Args:
        tokenizer, trunk, tied, bias, context: as in `LanguageModel`.
        chat_template: Jinja text (see `tokenizers/text/chat_template.py`). None: no `chat`, only the `stop_ids`.
        stop_ids: ids other than the end token that end an answer.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | dict[str, TextTokenizer],
        trunk: Part,
        tied: bool = True,
        bias: bool = False,
        context: int | None = None,
        chat_template: str | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(tokenizer, trunk, tied, bias, context)
        self.chat_template, self.stop_ids = chat_template, tuple(stop_ids)

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
            max_new_tokens: the most tokens of the answer.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; greedy by default.
            stop, stream: as in `generate`.

        Raises:
            InputError: the model has no chat template, the template rejects the messages, or they exceed the context.
        """
        if self.chat_template is None:
            raise InputError(
                "this model has no chat template: use generate, or build ChatModel with chat_template="
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = chat_ids(self.front, self.chat_template, messages)
        sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        return self.continuations([ids.tolist()], max_new_tokens, sampling, stop, stream)[0].text
