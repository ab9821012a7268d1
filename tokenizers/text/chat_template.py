"""Chat messages to ids by a model's chat template, the Jinja text of Hugging Face's `chat_template`.

Only the template itself may spell special tokens. Message contents are always plain text: a message that contains
``<|im_end|>`` does not end its turn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


def chat_ids(
    front: TextTokenizer, template: str, messages: Sequence[Mapping[str, Any]], reply: bool = True
) -> Tensor:
    """Messages -> the ids of a prompt, (N,) int64.

    Args:
        front: the text tokenizer.
        template: Jinja text with the variables `messages`, `add_generation_prompt`, `bos_token` and `eos_token`. It
            runs in Jinja's sandbox.
        messages: dicts of ``"role"`` and ``"content"``, both str, in order.
        reply: add the generation prompt, which starts the model's answer.

    Raises:
        InputError: a message is not such a dict, or the template rejects the messages or cannot be rendered.
    """
    for i, message in enumerate(messages):
        good = isinstance(message, Mapping) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        if not good:
            raise InputError(
                f"message {i} is {message!r:.80}, expected a dict of 'role' and 'content', both str"
            )
    (ids,) = Chat(front, template, messages).parts(reply=reply) or [torch.zeros(0, dtype=torch.int64)]
    return ids


class Chat:
    """Messages rendered by a chat template, with placeholders for media.

    Args:
        front, template: as in `chat_ids`.
        messages: dicts of ``"role"`` and ``"content"``, a str or a list of str and media (anything else).

    Raises:
        InputError: no messages, or one that is not such a dict.
    """

    def __init__(self, front: TextTokenizer, template: str, messages: Sequence[Mapping[str, Any]]) -> None:
        self.front, self.template, self.media = front, template, []
        self.messages, contents = [], []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, str | list | tuple) or not isinstance(message.get("role"), str):
                raise InputError(
                    f"message {i} is {message!r:.80}, expected a dict of 'role', a str, and 'content', a str or a list"
                )
            contents.append([content] if isinstance(content, str) else list(content))
            self.messages.append(dict(message))
        if not self.messages:
            raise InputError("no messages: expected at least one")
        known = "".join(v for m in self.messages for v in m.values() if isinstance(v, str)) + template
        known += "".join(v for c in contents for v in c if isinstance(v, str))
        # unused characters: `escape` is inserted into special tokens that messages spell, and removed before encoding;
        # `slot` stands for a medium
        free = (c for c in map(chr, range(0xE000, 0xF900)) if c not in known)
        self.escape, self.slot = next(free), next(free)
        for message, content in zip(self.messages, contents, strict=True):
            self.media.append([v for v in content if not isinstance(v, str)])
            message["content"] = "".join(v if isinstance(v, str) else self.slot for v in content)
            for key, value in message.items():
                if isinstance(value, str):
                    message[key] = front.encoder.special_pattern.sub(
                        lambda m: m[0][0] + self.escape + m[0][1:], value
                    )

    def text(self, first: int = 0, last: int | None = None, reply: bool = False) -> str:
        """Messages `first` to `last` (exclusive) rendered by the template."""
        return _rendered(self.front, self.template, self.messages[first:last], reply)

    def parts(self, first: int = 0, last: int | None = None, reply: bool = False) -> list[Any]:
        """The same as ids (n,) with the media between them, in order.

        Raises:
            InputError: the template drops a medium or repeats it.
        """
        return self.read(self.text(first, last, reply), [m for ms in self.media[first:last] for m in ms])

    def read(self, text: str, media: Sequence[Any]) -> list[Any]:
        """Rendered text -> ids (n,) and media."""
        pieces = text.split(self.slot)
        if len(pieces) != len(media) + 1:
            raise InputError(
                f"the chat template rendered {len(pieces) - 1} of {len(media)} media: it must render every content once"
            )
        out = []
        for i, piece in enumerate(pieces):
            if ids := self._ids(piece):
                out.append(torch.tensor(ids, dtype=torch.int64))
            out += [media[i]] if i < len(media) else []
        return out

    def _ids(self, text: str) -> list[int]:
        encoder, ids, at = self.front.encoder, [], 0
        for match in encoder.special_pattern.finditer(text):
            ids += encoder.one(text[at : match.start()].replace(self.escape, ""))
            ids.append(encoder.special_tokens[match[0]])
            at = match.end()
        return ids + encoder.one(text[at:].replace(self.escape, ""))


def _rendered(front: TextTokenizer, template: str, messages: list[dict[str, Any]], reply: bool) -> str:
    import jinja2

    names = {"bos_token": front.start_id, "eos_token": front.end_id}
    names = {k: "" if i is None else front.backend.id_to_token(i) for k, i in names.items()}
    try:
        return _compiled(template).render(messages=messages, add_generation_prompt=reply, **names)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"the chat template cannot be rendered: {e}") from e


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
    """A compiled template; compiling costs more than rendering."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise InputError(f"the chat template rejects these messages: {why}")

    # published templates are written for these two settings and the loop controls
    extensions = ["jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)
