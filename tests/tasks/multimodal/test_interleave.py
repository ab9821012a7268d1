"""Encoding of conversations: positions and blocks of media, labels of answers, the context limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tasks.multimodal.interleave import training_row
from worldtokens.tokenizers.text.chat_template import Chat

DIM = 32


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_media_tokens_have_their_position_in_the_text(
    positions, make_model, collate, user, assistant, images
):
    """Text, image, text, image: positions, block numbers and embeddings."""
    m = make_model(positions)
    conversation = [user("What", images[0], "or", images[1], "?"), assistant("face")]
    batch, front = collate(m, conversation), m.language_model.front
    tokens = m.assemble(batch)
    first, gap = (len(front.read(t, end=False)) for t in ("u: What", "or"))
    at = [list(range(first, first + 4)), list(range(first + 4 + gap, first + 8 + gap))]
    assert batch["positions"]["image"].tolist() == at[0] + at[1] and batch["sizes"]["image"] == (4, 4)
    block = tokens.block[0].tolist()
    want = [*range(first), *[first] * 4, *range(first + 1, first + 1 + gap), *[first + 1 + gap] * 4]
    assert block[: len(want)] == want
    assert block[len(want) :] == list(range(want[-1] + 1, want[-1] + 1 + len(block) - len(want)))
    assert tokens.pos[0, :, 0].tolist() == list(range(len(block))) and tokens.layout.order == "any"
    embeddings = m.projectors["image"](m.tokenizers["image"].tokens(images[:2])).x
    if front.pos_embed is not None:
        embeddings = embeddings + front.pos_embed[torch.tensor(at)]
    assert tokens.x[0, torch.tensor(at)].equal(embeddings)
    assert (tokens.modality[0] == wt.modality_id("image")).nonzero().flatten().tolist() == at[0] + at[1]


@pytest.mark.parametrize("spelled", ["<image>", "{'image': 'x.png'}", "<|endoftext|>", "\ue000 \ue001"])
def test_spelled_special_tokens_stay_text(spelled, make_model, collate, user, assistant, images):
    m = make_model(context=96)
    front = m.language_model.front
    batch = collate(m, [user(f"is {spelled} this", images[0], spelled), assistant(f"a {spelled} b")])
    assert batch["sizes"]["image"] == (4,)
    ids = batch["ids"][0].tolist()
    for position in batch["positions"]["image"].tolist():
        ids[position] = -1
    assert ids.count(front.end_id) == 0  # the only one is the answer's last label
    text = front.decode([i for i in ids if i >= 0])
    assert text == f"u: is {spelled} this{spelled} A: a {spelled} b"
    labels = batch["labels"][0][batch["labels"][0] != IGNORE]
    assert (
        front.decode(labels, special=True) == f" a {spelled} b<|endoftext|>"
        and (labels == front.end_id).sum() == 1
    )


def test_only_answers_are_predicted(make_model, collate, conversations):
    m = make_model()
    batch = collate(m, *conversations)
    front, labels, ids = m.language_model.front, batch["labels"], batch["ids"]
    answers = [front.decode(row[row != IGNORE], special=True) for row in labels]
    end = "<|endoftext|>"
    assert answers == [
        f" red apple{end}",
        f" the second{end}",
        f" face{end}",
        f" the first{end} a red flag{end}",
    ]
    assert batch["weight"] == int((labels != IGNORE).sum())
    predicted = labels[:, :-1] != IGNORE
    assert labels[:, :-1][predicted & (labels[:, :-1] != front.end_id)].equal(
        ids[:, 1:][predicted & (labels[:, :-1] != front.end_id)]
    )  # a label is the next token
    logits = m(batch).flatten(0, 1)
    want = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE)
    assert abs(float(m.loss(batch)["loss"].detach()) - float(want.detach())) < 1e-5


def test_an_answer_ends_with_the_first_end_token_of_the_template(make_language_model, user, assistant):
    template = "{% for m in messages %}[{{ m.content }}{{ eos_token }} tail ]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    front = make_language_model().front
    row = training_row(Chat(front, template, [user("face"), assistant("red")]), {front.end_id}, 0)
    assert front.decode(row.labels[row.labels != IGNORE], special=True) == "red<|endoftext|>"
    assert row.labels[-1] == front.end_id  # tokens after it are cut
    changing = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(wt.InputError, match="message 1 differently once the answer is present"):
        training_row(Chat(front, changing, [user("face"), assistant("red")]), {front.end_id}, 0)


def test_long_conversations_drop_their_oldest_messages(make_model, collate, user, assistant, images):
    conversation = [
        user(images[0], "happy face"),
        assistant("red"),
        user("and", images[1]),
        assistant("the first"),
    ]
    system = {"role": "system", "content": "red flag"}
    whole, last = (
        collate(make_model(), [system, *conversation]),
        collate(make_model(), [system, *conversation[2:]]),
    )
    n, short = whole["ids"].shape[1], last["ids"].shape[1]
    for context in (short, n - 1, n, n + 1):
        batch = collate(make_model(context=context), [system, *conversation])
        want = last if context < n else whole
        assert batch["ids"].equal(want["ids"]) and batch["positions"]["image"].equal(
            want["positions"]["image"]
        )
        assert batch["labels"].equal(want["labels"])
    m = make_model(context=short - 1)
    with pytest.raises(wt.InputError, match=rf"last question has {short} tokens \(of media: image 4\)"):
        collate(m, [system, *conversation])
    with pytest.raises(wt.InputError, match="shorten it"):
        m.chat([user(*images, *images)])


def test_images_of_any_size_have_as_many_positions_as_tokens(
    make_language_model, make_image_tokenizer, collate, user, assistant
):
    front = make_image_tokenizer(size=None, patch=16, max_tokens=12)
    m = wt.MultimodalLM(make_language_model(), {"image": front}, {"image": wt.Projector(DIM, 16)}).eval()
    shapes = [(3, 40, 20), (3, 16, 90), (3, 64, 64)]
    rng = torch.Generator().manual_seed(0)
    raws = [torch.randint(0, 256, s, dtype=torch.uint8, generator=rng) for s in shapes]
    conversations = [
        [user("What", {"image": raws[0]}, {"image": raws[1]}), assistant("face")],
        [user({"image": raws[2]}), assistant("red")],
    ]
    batch = collate(m, *conversations)
    assert batch["sizes"]["image"] == tuple(front(front.collate([r])).shape[1] for r in raws)
    assert len(set(batch["sizes"]["image"])) > 1
    both = m(batch)
    for i, conversation in enumerate(conversations):
        alone = m(collate(m, conversation))[0]
        assert (both[i, : len(alone)] - alone).abs().max() < 1e-4
    with pytest.raises(ValueError, match="tokens, expected"):
        m.assemble({**batch, "sizes": {"image": (1, 1, 1)}})
