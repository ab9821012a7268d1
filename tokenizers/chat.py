"""From messages to ids by a model's chat template, the Jinja text that Hugging Face keeps in `chat_template`.

Only the template's own text may spell special tokens. What people say is plain text whatever it spells: a message that
contains ``<|im_end|>`` ends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.text import TextTokenizer


def chat_ids(
    front: TextTokenizer, template: str, messages: Sequence[Mapping[str, Any]], reply: bool = True
) -> Tensor:
    """Messages -> the ids of a prompt, (N,) int64.

    Args:
        front: whose vocabulary.
        template: Jinja text that reads `messages`, `add_generation_prompt`, `bos_token` and `eos_token`. It runs in
            Jinja's sandbox and reaches nothing else.
        messages: dicts of ``"role"`` and ``"content"``, both str, in order.
        reply: end with what asks for the model's answer.

    Raises:
        InputError: a message that isn't such a dict, or a template that refuses them or can't be run.
    """
    checked = []
    for i, message in enumerate(messages):
        good = isinstance(message, Mapping) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        if not good:
            raise InputError(
                f"message {i} is {message!r:.80}, expected a dict of 'role' and 'content', both str"
            )
        checked.append(dict(message))
    if not checked:
        raise InputError("no messages: expected at least one")
    # a letter that nobody said is put into every special token that somebody spelled, and taken out again below
    said = "".join(v for m in checked for v in m.values() if isinstance(v, str)) + template
    hidden = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in said)
    for message in checked:
        for key in ("role", "content"):
            message[key] = front._marker.sub(lambda m: m[0][0] + hidden + m[0][1:], message[key])
    text = _rendered(front, template, checked, reply)
    ids, at = [], 0
    for mark in front._marker.finditer(text):
        ids += front._unmarked(text[at : mark.start()].replace(hidden, ""))
        ids.append(front._rust.token_to_id(mark[0]))
        at = mark.end()
    ids += front._unmarked(text[at:].replace(hidden, ""))
    return torch.tensor(ids, dtype=torch.int64)


def _rendered(front: TextTokenizer, template: str, messages: list[dict[str, Any]], reply: bool) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise InputError(f"the chat template refuses these messages: {why}")

    # these two settings and the loop controls are what published templates are written for
    extensions = ["jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    names = {"bos_token": front.start_id, "eos_token": front.end_id}
    names = {k: "" if i is None else front._rust.id_to_token(i) for k, i in names.items()}
    try:
        made = sandbox.from_string(template)
        return made.render(messages=messages, add_generation_prompt=reply, **names)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"the chat template can't be run: {e}") from e
