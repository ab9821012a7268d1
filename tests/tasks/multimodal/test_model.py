"""A language model that is shown things: what it reads, in which order, what it learns from, and what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tasks.multimodal.interleave import asked, taught
from worldtokens.tokenizers.text.chat_template import Chat, chat_ids

ROWS = samples.open("emoji", split="validation")
PICTURES = [ROWS[i]["image"] for i in (0, 40, 80, 120)]  # PNG bytes
TEXTS = ROWS.texts()[:150] + ["What is this? the first or the second red apple"] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.role[0] }}: {{ m.content }} A:{% endif %}{% endfor %}"
)
DIM = 32


def language(positions: str = "none", context: int = 64, seed: int = 0, **options) -> wt.ChatModel:
    torch.manual_seed(seed)
    front = wt.TextTokenizer.train(TEXTS, 400, dim=DIM, context=context, positions=positions)
    with torch.no_grad():
        front.embedding.weight.mul_(25)
        if front.position is not None:
            front.position.mul_(50)
    trunk = wt.Transformer(DIM, 2, 4, rope=1 if positions == "none" else 0, **options)
    with torch.no_grad():  # so that what it says untrained depends on all that it reads
        for p in trunk.blocks.parameters():
            p.mul_(3 if p.ndim == 2 else 1)
    lm = wt.ChatModel(front, trunk, tied=False, template=TEMPLATE)
    torch.nn.init.normal_(lm.head.weight)
    return lm


def pictures(**options) -> wt.ImageTokenizer:
    return wt.ImageTokenizer(
        **({"dim": 16, "patch": 32, "size": 64, "draft": False} | options)
    )  # four tokens


def model(positions: str = "none", context: int = 64, **options) -> wt.MultimodalLM:
    lm = language(positions, context)
    options = {"projectors": {"image": wt.Projector(DIM, 16)}} | options
    return wt.MultimodalLM(lm, {"image": pictures()}, **options).eval()


def user(*content) -> dict:
    return {"role": "user", "content": [{"image": c} if isinstance(c, bytes) else c for c in content]}


def says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def batch_of(m: wt.MultimodalLM, *conversations) -> wt.Batch:
    return m.collate([m.read({"messages": c}) for c in conversations])


TALKS = [
    [user("What is this?", PICTURES[0]), says("red apple")],
    [user(PICTURES[1], "the first", PICTURES[2], "or the second?"), says("the second")],
    [user("happy face?"), says("face")],
    [user(PICTURES[3]), says("the first"), user("and", PICTURES[0], "?"), says("a red flag")],
]


# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_without_media_it_is_the_language_model(positions):
    m = model(positions)
    talk = [user("What is this? ", "a face"), says("red apple"), user("and?")]
    plain = [
        {**t, "content": "".join(t["content"]) if isinstance(t["content"], list) else t["content"]}
        for t in talk
    ]
    batch = batch_of(m, [*talk, says("the first")])
    tokens = m.assemble(batch)
    assert tokens.layout.order == "causal"
    ids = chat_ids(m.language_model.front, TEMPLATE, plain)
    assert batch["ids"][0, : len(ids)].equal(ids)
    want = m.language_model({"text": m.language_model.front.collate([batch["ids"][0]])})
    assert m(batch).equal(want)
    assert m.chat(talk, 8) == m.language_model.chat(plain, 8) != ""


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_media_stand_where_they_are_said(positions):
    """Text, image, text, image: places, reading order, and each image's own tokens."""
    m = model(positions)
    talk = [user("What", PICTURES[0], "or", PICTURES[1], "?"), says("face")]
    batch, front = batch_of(m, talk), m.language_model.front
    tokens = m.assemble(batch)
    first, gap = (len(front.read(t, end=False)) for t in ("u: What", "or"))
    at = [list(range(first, first + 4)), list(range(first + 4 + gap, first + 8 + gap))]
    assert batch["places"]["image"].tolist() == at[0] + at[1] and batch["sizes"]["image"] == (4, 4)
    block = tokens.block[0].tolist()
    want = [*range(first), *[first] * 4, *range(first + 1, first + 1 + gap), *[first + 1 + gap] * 4]
    assert block[: len(want)] == want
    assert block[len(want) :] == list(range(want[-1] + 1, want[-1] + 1 + len(block) - len(want)))
    assert tokens.pos[0, :, 0].tolist() == list(range(len(block))) and tokens.layout.order == "any"
    made = m.projectors["image"](m.tokenizers["image"].tokens(PICTURES[:2])).x
    if front.position is not None:
        made = made + front.position[torch.tensor(at)]
    assert tokens.x[0, torch.tensor(at)].equal(made)
    assert (tokens.modality[0] == wt.modality_id("image")).nonzero().flatten().tolist() == at[0] + at[1]


def test_a_picture_reads_itself_and_what_came_before_and_nothing_after():
    m = model()
    batch = batch_of(m, [user("What", PICTURES[0], "or", PICTURES[1], "?"), says("face")])
    places = batch["places"]["image"]
    tokens = m.assemble(batch)

    def moved(place: int) -> list[bool]:
        x = tokens.x.clone()
        x[0, place, 0] += 3
        a, b = (m.language_model.hidden(t).x[0] for t in (tokens, tokens.replace(x=x)))
        return [(d > 1e-6).item() for d in (a - b).abs().amax(1)]

    n, first, second = tokens.shape[1], places[0].item(), places[4].item()
    assert moved(first + 3) == [p >= first for p in range(n)]  # an image's last token reaches its first
    assert moved(second) == [p >= second for p in range(n)]
    assert moved(second - 1) == [p >= second - 1 for p in range(n)]  # text between reads from left to right


@pytest.mark.parametrize("wicked", ["<image>", "{'image': 'x.png'}", "<|endoftext|>", "\ue000 \ue001"])
def test_what_people_spell_stays_text(wicked):
    m = model(context=96)
    front = m.language_model.front
    batch = batch_of(m, [user(f"is {wicked} this", PICTURES[0], wicked), says(f"a {wicked} b")])
    assert batch["sizes"]["image"] == (4,)
    spelled = batch["ids"][0].tolist()
    for place in batch["places"]["image"].tolist():
        spelled[place] = -1
    assert spelled.count(front.end_id) == 0  # the only one stands behind the answer, as its last label
    said = front.decode([i for i in spelled if i >= 0])
    assert said == f"u: is {wicked} this{wicked} A: a {wicked} b"
    labels = batch["labels"][0][batch["labels"][0] != IGNORE]
    assert (
        front.decode(labels, special=True) == f" a {wicked} b<|endoftext|>"
        and (labels == front.end_id).sum() == 1
    )


def test_only_answers_are_learnt():
    m = model()
    batch = batch_of(m, *TALKS)
    front, labels, ids = m.language_model.front, batch["labels"], batch["ids"]
    told = [front.decode(row[row != IGNORE], special=True) for row in labels]
    end = "<|endoftext|>"
    assert told == [
        f" red apple{end}",
        f" the second{end}",
        f" face{end}",
        f" the first{end} a red flag{end}",
    ]
    assert batch["weight"] == int((labels != IGNORE).sum())
    kept = labels[:, :-1] != IGNORE
    assert labels[:, :-1][kept & (labels[:, :-1] != front.end_id)].equal(
        ids[:, 1:][kept & (labels[:, :-1] != front.end_id)]
    )  # a label is the token that comes next
    logits = m(batch).flatten(0, 1)
    want = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE)
    assert abs(float(m.loss(batch)["loss"].detach()) - float(want.detach())) < 1e-5


def test_an_answer_ends_with_the_first_end_that_the_template_writes():
    template = "{% for m in messages %}[{{ m.content }}{{ eos_token }} tail ]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    front = language().front
    line = taught(Chat(front, template, [user("face"), says("red")]), {front.end_id}, 0)
    assert front.decode(line.labels[line.labels != IGNORE], special=True) == "red<|endoftext|>"
    assert line.labels[-1] == front.end_id  # and what stands behind it is not read either
    changing = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(wt.InputError, match="message 1 otherwise once the answer is there"):
        taught(Chat(front, changing, [user("face"), says("red")]), {front.end_id}, 0)


# ---- length ------------------------------------------------------------------------------------------------


def test_what_is_too_long_loses_its_oldest_messages_whole():
    talk = [user(PICTURES[0], "happy face"), says("red"), user("and", PICTURES[1]), says("the first")]
    system = {"role": "system", "content": "red flag"}
    whole, last = batch_of(model(), [system, *talk]), batch_of(model(), [system, *talk[2:]])
    n, short = whole["ids"].shape[1], last["ids"].shape[1]
    for context in (short, n - 1, n, n + 1):
        batch = batch_of(model(context=context), [system, *talk])
        want = last if context < n else whole
        assert batch["ids"].equal(want["ids"]) and batch["places"]["image"].equal(want["places"]["image"])
        assert batch["labels"].equal(want["labels"])
    m = model(context=short - 1)
    with pytest.raises(wt.InputError, match=rf"last question has {short} tokens \(of media: image 4\)"):
        batch_of(m, [system, *talk])
    with pytest.raises(wt.InputError, match="ask shorter"):
        m.chat([user(*PICTURES, *PICTURES)])


def test_pictures_of_any_shape_take_as_many_places_as_they_have_tokens():
    front = pictures(size=None, patch=16, max_tokens=12)
    m = wt.MultimodalLM(language(), {"image": front}, {"image": wt.Projector(DIM, 16)}).eval()
    shapes = [(3, 40, 20), (3, 16, 90), (3, 64, 64)]
    rng = torch.Generator().manual_seed(0)
    raws = [torch.randint(0, 256, s, dtype=torch.uint8, generator=rng) for s in shapes]
    talks = [
        [user("What", {"image": raws[0]}, {"image": raws[1]}), says("face")],
        [user({"image": raws[2]}), says("red")],
    ]
    batch = batch_of(m, *talks)
    assert batch["sizes"]["image"] == tuple(front(front.collate([r])).shape[1] for r in raws)
    assert len(set(batch["sizes"]["image"])) > 1
    both = m(batch)
    for row, talk in enumerate(talks):
        alone = m(batch_of(m, talk))[0]
        assert (both[row, : len(alone)] - alone).abs().max() < 1e-4
    with pytest.raises(ValueError, match="tokens where"):
        m.assemble({**batch, "sizes": {"image": (1, 1, 1)}})


# ---- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_a_batch_gives_what_each_gives_alone(positions):
    m = model(positions)
    batch = batch_of(m, *TALKS)
    both, worst = m(batch), 0.0
    for row, talk in enumerate(TALKS):
        one = batch_of(m, talk)
        alone = m(one)[0]
        worst = max(worst, float((both[row, : len(alone)] - alone).detach().abs().max()))
    print(f"batch against alone: {worst:.1e}")
    assert worst < 1e-4
    asked_of = [t[:-1] for t in TALKS]
    together = m.chat(asked_of, 10)
    assert together == [m.chat(t, 10) for t in asked_of] and len(set(together)) > 1


def test_going_on_with_a_cache_is_reading_it_all_again():
    m = model("learned")
    talk = TALKS[1][:-1]
    said = m.continuations([talk], 6)[0].ids
    for k in range(len(said)):
        line = asked(Chat(m.language_model.front, TEMPLATE, _media(m, talk)), m.language_model.front.pad_id)
        ids = torch.cat((line.ids, torch.tensor(said[:k], dtype=torch.int64)))
        block = torch.cat((line.block, line.block[-1] + 1 + torch.arange(k)))
        batch = batch_of(m, TALKS[1]) | {"ids": ids[None], "block": block[None].int(), "lengths": (len(ids),)}
        assert int(m(batch)[0, -1].argmax()) == said[k]


def _media(m: wt.MultimodalLM, talk: list) -> list:
    from worldtokens.tasks.multimodal.interleave import Medium

    read = m.read_messages(talk)
    return [
        {**t, "content": [p if isinstance(p, str) else Medium(*p, 4) for p in t["content"]]} for t in read
    ]


def test_a_batch_with_nothing_to_predict_and_one_without_pictures():
    m = model()
    nothing = batch_of(m, [user("face", PICTURES[0])])
    assert nothing["weight"] == 0
    loss = m.loss(nothing)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0 and m.projectors["image"].fc1.weight.grad.abs().sum() == 0
    m.zero_grad()
    m.loss(batch_of(m, TALKS[2]))["loss"].backward()
    assert m.language_model.trunk.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0
    m.zero_grad()
    m.loss(batch_of(m, TALKS[2], TALKS[0]))["loss"].backward()
    grads = {n: p.grad for n, p in m.named_parameters()}
    assert not [n for n, g in grads.items() if g is None or not g.isfinite().all()]
    assert grads["tokenizers.image.proj.weight"].abs().sum() > 0


# ---- learning ----------------------------------------------------------------------------------------------


def learn(m: wt.MultimodalLM, rows: list, steps: int, tmp_path, **settings) -> None:
    settings = {"batch_size": len(rows), "tensorboard": False, "log_every": steps, "device": "cpu"} | settings
    how = wt.TrainSettings(out=str(tmp_path / "run"), steps=steps, **settings)
    wt.train(m, rows, train=how, optim=wt.OptimSettings(lr=5e-3, warmup=5))


def test_it_learns_to_tell_pictures_apart_and_is_the_same_once_saved(tmp_path):
    bridge = {"image": wt.Resampler(DIM, latents=3, depth=1, heads=4, context_dim=16)}
    m = model(projectors=bridge, encoders={"image": wt.Transformer(16, 1, 2, rope=2)})
    names = ["face", "red apple", "the first", "flag"]
    rows = [{"messages": [user("What is this?", p), says(n)]} for p, n in zip(PICTURES, names, strict=True)]
    before = m.evaluate(rows)
    learn(m, rows, 60, tmp_path)
    figures = m.evaluate(rows)
    assert figures["exact"] == 1 and figures["loss"] < 0.2 < before["loss"], figures
    assert figures["tokens"] == sum(len(m.language_model.front.read(f" {n}")) for n in names)
    turned = [{"messages": [user("What is this?", PICTURES[i - 1]), says(n)]} for i, n in enumerate(names)]
    assert m.evaluate(turned)["exact"] == 0
    assert set(m.evaluate(rows, max_new_tokens=0)) == {"loss", "tokens"}
    m.save(tmp_path / "saved")
    again = wt.load(tmp_path / "saved")
    assert isinstance(again.language_model, wt.ChatModel) and again.chat_template == TEMPLATE
    assert [a.strip() for a in again.chat([r["messages"][:1] for r in rows])] == names
    path = tmp_path / "image.png"
    path.write_bytes(PICTURES[1])
    asked_for = {
        "role": "user",
        "content": [{"type": "text", "text": "What is this?"}, {"type": "image", "image": path}],
    }
    assert again.chat([asked_for]).strip() == "red apple"


def test_a_frozen_language_model_keeps_its_weights_and_its_words(tmp_path):
    lm = language()
    before = {k: v.clone() for k, v in lm.state_dict().items()}
    words = lm.chat("happy face", 12)
    m = wt.MultimodalLM(
        lm, {"image": pictures()}, {"image": wt.Projector(DIM, 16)}, freeze_language_model=True
    )
    bridge = m.projectors["image"].fc1.weight.clone()
    text = {"messages": TALKS[2]}
    rows = [{"messages": TALKS[0]}, {"messages": TALKS[1]}, text, text]
    learn(m, rows, 4, tmp_path, batch_size=1)  # some of these batches show nothing
    assert all(v.equal(before[k]) for k, v in m.language_model.state_dict().items())
    assert not m.projectors["image"].fc1.weight.equal(bridge)
    assert m.chat("happy face", 12) == words
    m.save(tmp_path / "saved")
    assert not any(p.requires_grad for p in wt.load(tmp_path / "saved").language_model.parameters())


def test_sounds_in_place_of_pictures_are_one_line():
    front = wt.AudioTokenizer(dim=16, sample_rate=8000, n_mels=16, stem="patches", patch=(8, 16), seconds=1.0)
    m = wt.MultimodalLM(language(), {"audio": front}, {"audio": wt.Projector(DIM, 16)}).eval()
    rng = np.random.default_rng(0)
    waves = [(rng.standard_normal(n).astype(np.float32) / 10, 8000) for n in (3000, 8000)]
    talks = [[user("What is this?", {"audio": w}), says("flag")] for w in waves]
    both = m(batch_of(m, *talks))
    for row, talk in enumerate(talks):
        alone = m(batch_of(m, talk))[0]
        assert (both[row, : len(alone)] - alone).abs().max() < 1e-4
    assert m.chat([t[:1] for t in talks], 6) == [m.chat(t[:1], 6) for t in talks]


def test_pictures_are_augmented_in_training_alone():
    m = model()
    black = {"image": torch.zeros_like}
    read = [m.read({"messages": TALKS[0]}, augment=a)["messages"][0]["content"][1] for a in (black, None)]
    assert read[0][0] == "image" and read[0][1].sum() == 0 and read[1][1].sum() > 0


# ---- what is refused ---------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_named(tmp_path):
    m = model()
    for row, words in (
        ({"text": "a"}, "columns \\['text'\\], expected a list of messages"),
        ({"messages": [user({"sound": b"x"})]}, "message 0 holds .*sound"),
        ({"messages": [user({"image": tmp_path / "no.png"})]}, "no.png"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 is"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
    ):
        with pytest.raises(wt.InputError, match=words):
            m.collate([m.read(row)])
    with pytest.raises(wt.InputError, match="the chat template wrote 0 of 1 media"):
        wt.MultimodalLM(
            language(), {"image": pictures()}, {"image": wt.Projector(DIM, 16)}, chat_template="x"
        ).chat([user("a", PICTURES[0])])
    with pytest.raises(wt.InputError, match="expected the assistant's words"):
        m.evaluate([{"messages": [user("a")]}])
    for options, words in (
        ({"projectors": None}, r"16 wide for a language model 32 wide.*context_dim=16"),
        ({"projectors": {"image": wt.Projector(DIM, 20)}}, "20 -> 32"),
        ({"encoders": {"sound": wt.Transformer(16, 1, 2)}}, "'sound'"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**options)
    with pytest.raises(ValueError, match="1 to the language model's 64"):
        wt.MultimodalLM(language(), {"image": pictures(dim=DIM)}, context=65)
    with pytest.raises(ValueError, match="chat_template="):
        wt.MultimodalLM(wt.LanguageModel(language().front, language().trunk), {"image": pictures(dim=DIM)})


# ---- the projector -----------------------------------------------------------------------------------------


def test_the_projector_is_two_layers_for_each_token():
    torch.manual_seed(0)
    p = wt.Projector(6, 4, hidden=5)
    x = torch.randn(2, 3, 4)
    x[1, 2] = torch.nan
    valid = torch.tensor([[True] * 3, [True, True, False]])
    out = p(wt.Tokens(x, valid=valid))
    by_hand = F.layer_norm(x, (4,), p.norm.weight, p.norm.bias) @ p.fc1.weight.T + p.fc1.bias
    by_hand = F.gelu(by_hand) @ p.fc2.weight.T + p.fc2.bias
    assert (out.x - by_hand)[valid].abs().max() < 1e-6 and out.x.isfinite().all()
    assert out.valid.equal(valid) and out.dim == 6 and wt.build(p.config()).context_dim == 4
    with pytest.raises(ValueError, match="context_dim=7"):
        p(wt.Tokens(torch.zeros(1, 1, 7)))


# ---- the recipes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_published_language_model_sees_and_still_speaks_as_before(tmp_path):
    from worldtokens.training.recipe import Recipe

    words = ["--train.out", str(tmp_path / "run"), "--train.steps", "2", "--train.tensorboard", "false"]
    recipe = Recipe.read("vlm_smollm2", [*words, "--data.validation", "null"])
    rows, _ = recipe.rows()
    m, augment = recipe.build(rows)
    before = {k: v.clone() for k, v in m.projectors["image"].state_dict().items()}
    report = wt.train(m, rows, train=recipe.train, optim=recipe.optim, augment=augment)
    assert report.steps == 2 and not report.bad_rows
    assert not all(v.equal(before[k]) for k, v in m.projectors["image"].state_dict().items())
    published = wt.from_hf(wt.weights("smollm2"))
    assert all(v.equal(m.language_model.state_dict()[k]) for k, v in published.state_dict().items())
    question = "What is the capital of France?"
    assert m.chat(question, 8) == published.chat(question, 8) and "Paris" in m.chat(question, 8)
    both = m.chat([[user(PICTURES[0], "What is this?")], question], 8)
    assert both[1] == m.chat(question, 8)
