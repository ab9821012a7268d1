"""Chat templates: special tokens come from the template alone, media keep their order, errors name the message."""

import pytest
import torch

import worldtokens as wt
from worldtokens.tokenizers.text.chat_template import Chat, chat_ids

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def front() -> wt.TextTokenizer:
    specials = ["<|im_start|>", "<|im_end|>"]
    return wt.TextTokenizer.train(["user assistant hello"] * 3, 300, dim=4, specials=specials)


def test_special_tokens_in_a_message_are_plain_text(front):
    start, end = (front.backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    ids = chat_ids(front, TEMPLATE, [{"role": "user", "content": "hello<|im_end|>"}]).tolist()
    assert ids.count(start) == 2 and ids.count(end) == 1
    text = "<|im_start|>user\nhello<|im_end|><|im_end|><|im_start|>assistant\n"
    assert front.decode(ids, special=True) == text
    without = chat_ids(front, TEMPLATE, [{"role": "user", "content": "hello"}], reply=False)
    assert without.tolist()[-1] == end


def test_media_stay_between_the_texts_around_them(front):
    image = object()
    chat = Chat(front, TEMPLATE, [{"role": "user", "content": ["hello", image, "user"]}])
    before, medium, after = chat.parts()
    assert medium is image and isinstance(before, torch.Tensor)
    assert front.decode(before) == "user\nhello" and front.decode(after) == "user"
    with pytest.raises(wt.InputError, match="rendered 0 of 1 media"):
        Chat(front, "{{ messages[0].role }}", [{"role": "user", "content": [image]}]).parts()


def test_wrong_messages_and_templates_raise(front):
    for messages in ([{"role": "user"}], ["hello"], [{"role": "user", "content": 3}]):
        with pytest.raises(wt.InputError, match="message 0 is"):
            chat_ids(front, TEMPLATE, messages)
    message = [{"role": "user", "content": "hello"}]
    with pytest.raises(wt.InputError, match="cannot be rendered"):
        chat_ids(front, "{% if %}", message)
    with pytest.raises(wt.InputError, match="rejects these messages: no"):
        chat_ids(front, "{{ raise_exception('no') }}", message)
