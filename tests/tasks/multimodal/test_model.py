"""MultimodalLM: attention, batches, decoding, learning, saving and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.multimodal.interleave import Medium, prompt_row
from worldtokens.tokenizers.text.chat_template import Chat, chat_ids

DIM = 32


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_without_media_it_equals_the_language_model(
    positions, make_model, collate, user, assistant, template
):
    m = make_model(positions)
    talk = [user("What is this? ", "a face"), assistant("red apple"), user("and?")]
    plain = [
        {**t, "content": "".join(t["content"]) if isinstance(t["content"], list) else t["content"]}
        for t in talk
    ]
    batch = collate(m, [*talk, assistant("the first")])
    tokens = m.assemble(batch)
    assert tokens.layout.order == "causal"
    ids = chat_ids(m.language_model.front, template, plain)
    assert batch["ids"][0, : len(ids)].equal(ids)
    want = m.language_model({"text": m.language_model.front.collate([batch["ids"][0]])})
    assert m(batch).equal(want)
    assert m.chat(talk, 8) == m.language_model.chat(plain, 8) != ""


def test_an_image_attends_to_itself_and_to_earlier_tokens_only(make_model, collate, user, assistant, images):
    m = make_model()
    batch = collate(m, [user("What", images[0], "or", images[1], "?"), assistant("face")])
    positions = batch["positions"]["image"]
    tokens = m.assemble(batch)

    def changed(position: int) -> list[bool]:
        x = tokens.x.clone()
        x[0, position, 0] += 3
        a, b = (m.language_model.hidden(t).x[0] for t in (tokens, tokens.replace(x=x)))
        return [(d > 1e-6).item() for d in (a - b).abs().amax(1)]

    n, first, second = tokens.shape[1], positions[0].item(), positions[4].item()
    assert changed(first + 3) == [p >= first for p in range(n)]  # attention within an image is bidirectional
    assert changed(second) == [p >= second for p in range(n)]
    assert changed(second - 1) == [p >= second - 1 for p in range(n)]  # text attends causally


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_outputs_do_not_depend_on_the_batch(positions, make_model, collate, conversations):
    m = make_model(positions)
    batch = collate(m, *conversations)
    both, worst = m(batch), 0.0
    for i, talk in enumerate(conversations):
        one = collate(m, talk)
        alone = m(one)[0]
        worst = max(worst, float((both[i, : len(alone)] - alone).detach().abs().max()))
    print(f"batch against alone: {worst:.1e}")
    assert worst < 1e-4
    prompts = [t[:-1] for t in conversations]
    together = m.chat(prompts, 10)
    assert together == [m.chat(t, 10) for t in prompts] and len(set(together)) > 1


def test_cached_decoding_equals_uncached_decoding(make_model, collate, conversations, template):
    m = make_model("learned")
    talk = conversations[1][:-1]
    answer = m.continuations([talk], 6)[0].ids
    for k in range(len(answer)):
        row = prompt_row(
            Chat(m.language_model.front, template, _media(m, talk)), m.language_model.front.pad_id
        )
        ids = torch.cat((row.ids, torch.tensor(answer[:k], dtype=torch.int64)))
        block = torch.cat((row.block, row.block[-1] + 1 + torch.arange(k)))
        batch = collate(m, conversations[1]) | {
            "ids": ids[None],
            "block": block[None].int(),
            "lengths": (len(ids),),
        }
        assert int(m(batch)[0, -1].argmax()) == answer[k]


def _media(m: wt.MultimodalLM, talk: list) -> list:
    read = m.read_messages(talk)
    return [
        {**t, "content": [p if isinstance(p, str) else Medium(*p, 4) for p in t["content"]]} for t in read
    ]


def test_batches_without_labels_or_without_images_train(make_model, collate, user, conversations, images):
    m = make_model()
    nothing = collate(m, [user("face", images[0])])
    assert nothing["weight"] == 0
    loss = m.loss(nothing)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0 and m.projectors["image"].fc1.weight.grad.abs().sum() == 0
    m.zero_grad()
    m.loss(collate(m, conversations[2]))["loss"].backward()
    assert m.language_model.trunk.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0
    m.zero_grad()
    m.loss(collate(m, conversations[2], conversations[0]))["loss"].backward()
    grads = {n: p.grad for n, p in m.named_parameters()}
    assert not [n for n, g in grads.items() if g is None or not g.isfinite().all()]
    assert grads["tokenizers.image.proj.weight"].abs().sum() > 0


def fit(m: wt.MultimodalLM, rows: list, steps: int, tmp_path, **settings) -> None:
    settings = {"batch_size": len(rows), "tensorboard": False, "log_every": steps, "device": "cpu"} | settings
    train = wt.TrainSettings(out=str(tmp_path / "run"), steps=steps, **settings)
    wt.train(m, rows, train=train, optim=wt.OptimSettings(lr=5e-3, warmup=5))


def test_it_learns_from_images_and_is_equal_after_loading(
    tmp_path, make_model, user, assistant, images, template
):
    projectors = {"image": wt.Resampler(DIM, latents=3, depth=1, heads=4, context_dim=16)}
    m = make_model(projectors=projectors, encoders={"image": wt.Transformer(16, 1, 2, rope=2)})
    names = ["face", "red apple", "the first", "flag"]
    rows = [
        {"messages": [user("What is this?", p), assistant(n)]} for p, n in zip(images, names, strict=True)
    ]
    before = m.evaluate(rows)
    fit(m, rows, 60, tmp_path)
    metrics = m.evaluate(rows)
    assert metrics["exact"] == 1 and metrics["loss"] < 0.2 < before["loss"], metrics
    assert metrics["tokens"] == sum(len(m.language_model.front.read(f" {n}")) for n in names)
    shuffled = [
        {"messages": [user("What is this?", images[i - 1]), assistant(n)]} for i, n in enumerate(names)
    ]
    assert m.evaluate(shuffled)["exact"] == 0
    assert set(m.evaluate(rows, max_new_tokens=0)) == {"loss", "tokens"}
    m.save(tmp_path / "saved")
    again = wt.load(tmp_path / "saved")
    assert isinstance(again.language_model, wt.ChatModel) and again.chat_template == template
    assert [a.strip() for a in again.chat([r["messages"][:1] for r in rows])] == names
    path = tmp_path / "image.png"
    path.write_bytes(images[1])
    question = {
        "role": "user",
        "content": [{"type": "text", "text": "What is this?"}, {"type": "image", "image": path}],
    }
    assert again.chat([question]).strip() == "red apple"


def test_a_frozen_language_model_keeps_its_weights_and_answers(
    tmp_path, make_language_model, make_image_tokenizer, conversations
):
    lm = make_language_model()
    before = {k: v.clone() for k, v in lm.state_dict().items()}
    answer = lm.chat("happy face", 12)
    m = wt.MultimodalLM(
        lm, {"image": make_image_tokenizer()}, {"image": wt.Projector(DIM, 16)}, freeze_language_model=True
    )
    weight = m.projectors["image"].fc1.weight.clone()
    text = {"messages": conversations[2]}
    rows = [{"messages": conversations[0]}, {"messages": conversations[1]}, text, text]
    fit(m, rows, 4, tmp_path, batch_size=1)  # some of these batches have no image
    assert all(v.equal(before[k]) for k, v in m.language_model.state_dict().items())
    assert not m.projectors["image"].fc1.weight.equal(weight)
    assert m.chat("happy face", 12) == answer
    m.save(tmp_path / "saved")
    assert not any(p.requires_grad for p in wt.load(tmp_path / "saved").language_model.parameters())


def test_audio_replaces_images_by_one_line(make_language_model, collate, user, assistant):
    front = wt.AudioTokenizer(dim=16, sample_rate=8000, n_mels=16, stem="patches", patch=(8, 16), seconds=1.0)
    m = wt.MultimodalLM(make_language_model(), {"audio": front}, {"audio": wt.Projector(DIM, 16)}).eval()
    rng = np.random.default_rng(0)
    waveforms = [(rng.standard_normal(n).astype(np.float32) / 10, 8000) for n in (3000, 8000)]
    talks = [[user("What is this?", {"audio": w}), assistant("flag")] for w in waveforms]
    both = m(collate(m, *talks))
    for i, talk in enumerate(talks):
        alone = m(collate(m, talk))[0]
        assert (both[i, : len(alone)] - alone).abs().max() < 1e-4
    assert m.chat([t[:1] for t in talks], 6) == [m.chat(t[:1], 6) for t in talks]


def test_images_are_augmented_only_in_training(make_model, conversations):
    m = make_model()
    black = {"image": torch.zeros_like}
    read = [
        m.read({"messages": conversations[0]}, augment=a)["messages"][0]["content"][1] for a in (black, None)
    ]
    assert read[0][0] == "image" and read[0][1].sum() == 0 and read[1][1].sum() > 0


def test_invalid_rows_and_settings_raise(
    tmp_path, make_model, make_language_model, make_image_tokenizer, user, images
):
    m = make_model()
    for row, message in (
        ({"text": "a"}, "columns \\['text'\\], expected a list of messages"),
        ({"messages": [user({"other": b"x"})]}, "message 0 holds .*other"),
        ({"messages": [user({"image": tmp_path / "no.png"})]}, "no.png"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 is"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
    ):
        with pytest.raises(wt.InputError, match=message):
            m.collate([m.read(row)])
    with pytest.raises(wt.InputError, match="the chat template rendered 0 of 1 media"):
        wt.MultimodalLM(
            make_language_model(),
            {"image": make_image_tokenizer()},
            {"image": wt.Projector(DIM, 16)},
            chat_template="x",
        ).chat([user("a", images[0])])
    with pytest.raises(wt.InputError, match="expected text of the assistant"):
        m.evaluate([{"messages": [user("a")]}])
    for options, message in (
        ({"projectors": None}, r"width 16, the language model 32.*context_dim=16"),
        ({"projectors": {"image": wt.Projector(DIM, 20)}}, "20 -> 32"),
        ({"encoders": {"other": wt.Transformer(16, 1, 2)}}, "'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(**options)
    with pytest.raises(ValueError, match="1 to the language model's 64"):
        wt.MultimodalLM(make_language_model(), {"image": make_image_tokenizer(dim=DIM)}, context=65)
    with pytest.raises(ValueError, match="chat_template="):
        wt.MultimodalLM(
            wt.LanguageModel(make_language_model().front, make_language_model().trunk),
            {"image": make_image_tokenizer(dim=DIM)},
        )


def test_the_projector_is_a_two_layer_mlp_per_token():
    torch.manual_seed(0)
    p = wt.Projector(6, 4, mlp_dim=5)
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


@pytest.mark.slow
def test_a_frozen_published_language_model_keeps_its_answers(tmp_path, user, images):
    from worldtokens.training.recipe import Recipe

    options = ["--train.out", str(tmp_path / "run"), "--train.steps", "2", "--train.tensorboard", "false"]
    recipe = Recipe.read("vlm_smollm2", [*options, "--data.validation", "null"])
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
    both = m.chat([[user(images[0], "What is this?")], question], 8)
    assert both[1] == m.chat(question, 8)
