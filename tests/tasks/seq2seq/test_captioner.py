"""Captioner: a decoder with cross-attention to images, audio or both."""

import random

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.errors import InputError
from worldtokens.tasks.seq2seq.alignment import group_words

WORDS = ["a", "red", "blue", "green", "ball", "cube", "star", "moon", "on", "under", "the", "table", "tree"]
SAMPLE_RATE = 16000


def text_tokenizer(dim=32, **options):
    texts = [" ".join(random.Random(i).sample(WORDS, 6)) for i in range(200)]
    return wt.TextTokenizer.train(texts, vocab_size=320, dim=dim, context=24, **options)


def image_tokenizer(dim=32):
    return wt.ImageTokenizer(dim=dim, patch=8, size=16)


def audio_tokenizer(dim=32):
    return wt.AudioTokenizer(dim=dim, stem="frames", n_mels=16, seconds=1.0)


def decoder(dim=32, **options):
    return wt.Transformer(dim, 2, 2, cross=True, **options)


def captioner(sources=("image",), **options):
    torch.manual_seed(0)
    tokenizers = {"image": image_tokenizer, "audio": audio_tokenizer}
    columns = {name: tokenizers[name]() for name in sources} | {"text": text_tokenizer(start="<|start|>")}
    return wt.Captioner(columns, decoder=decoder(), **options)


def image(seed=0):
    return torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(seed)).numpy().transpose(1, 2, 0)


def recording(seed=0, n=4000):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).numpy() * 0.1, SAMPLE_RATE


def batch_of(model, rows):
    return model.collate([model.read(row) for row in rows])


def row(i, *columns, text=None):
    values = {"image": image(i), "audio": recording(i, 3000 + 500 * i)}
    return {c: values[c] for c in columns} | ({"text": text} if text else {})


# ---- the loss ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_predicted_ids():
    """By hand: each row alone, full logits, torch's cross-entropy."""
    model = captioner().eval()
    rows = [
        row(0, "image", text="a red ball"),
        row(1, "image", text="the green star on a table under the moon"),
    ]
    total, count = 0.0, 0
    for r in rows:
        ids = model.front.read(r["text"])  # start, words, end
        context = model.encode(batch_of(model, [{"image": r["image"]}]))
        out = model.decoder(model.front(model.front.collate([ids[:-1]])), context=context)
        logits = out.x[0] @ model.front.embedding.weight.T
        total += float(F.cross_entropy(logits, ids[1:], reduction="sum").detach())
        count += len(ids) - 1
    batch = batch_of(model, rows)
    assert batch["weight"] == count
    assert float(model.loss(batch)["loss"].detach()) == pytest.approx(total / count, abs=1e-5)
    assert model.evaluate(rows)["loss"] == pytest.approx(total / count, abs=1e-5)


def test_a_prefix_is_an_input_and_not_predicted():
    """As for Whisper's language tokens: special ids before the text, loss on the text only."""
    front = text_tokenizer(start="<|start|>", specials=["<|es|>", "<|write|>"])
    prefix = ["<|start|>", "<|es|>", front.read("<|write|>", special=True, end=False)[-1].item()]
    model = wt.Captioner({"image": image_tokenizer(), "text": front}, decoder=decoder(), prefix=prefix)
    batch = batch_of(model, [row(0, "image", text="a red ball")])
    ids = front.read("a red ball").tolist()[1:]
    special = front.read("<|start|><|es|><|write|>", special=True, end=False).tolist()[1:]
    assert batch["text"]["ids"][0].tolist() == special + ids[:-1]
    assert batch["text"]["labels"][0].tolist() == [-100, -100, *ids]
    assert batch["weight"] == len(ids)
    with pytest.warns(UserWarning, match="cut to context=24"):
        long = batch_of(model, [row(0, "image", text=" ".join(WORDS * 4))])["text"]
    assert long["ids"].shape[1] == front.context and int(long["labels"][0, -1]) == front.end_id
    with pytest.raises(InputError, match="no special token"):
        model.prefix_ids(["red"])


def test_without_a_start_token_the_prefix_is_the_end_token():
    model = wt.Captioner({"image": image_tokenizer(), "text": text_tokenizer()}, decoder=decoder())
    assert model.prefix == [model.front.end_id]
    assert batch_of(model, [row(0, "image", text="a ball")])["text"]["ids"][0, 0] == model.front.end_id


def test_a_batch_without_texts_gives_zero_with_a_graph():
    model = captioner()
    loss = model.loss(batch_of(model, [row(0, "image"), row(1, "image")]))["loss"]
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert batch_of(model, [row(0, "image")])["weight"] == 0
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_batch_without_images_trains():
    model = captioner()
    loss = model.loss(batch_of(model, [{"text": "a red ball"}, {"text": "the moon"}]))["loss"]
    loss.backward()
    assert loss > 0 and model.front.embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("encoder", [False, True])
def test_rows_may_lack_a_column_and_a_batch_equals_its_rows(encoder):
    """Images, audio, both or neither in one batch: each row has the loss and caption that it has alone."""
    model = captioner(("image", "audio"), encoder=wt.Transformer(32, 1, 2) if encoder else None).eval()
    rows = [
        row(0, "image", "audio", text="a red ball"),
        row(1, "audio", text="the moon under the tree"),
        row(2, "image", text="a cube"),
        row(3, text="star"),
        row(4, "image", "audio", text="a green cube on the red table"),
    ]
    each = [model.token_losses(batch_of(model, [r])) for r in rows]
    total, count = model.token_losses(batch_of(model, rows))
    assert int(count) == sum(int(c) for _, c in each)
    assert float(total.detach()) == pytest.approx(sum(float(t.detach()) for t, _ in each), rel=1e-5)
    sources = [r for r in rows if set(r) - {"text"}]
    for beams in (1, 3):
        whole = model.caption(sources, beams=beams, max_new_tokens=7)
        assert whole == [model.caption([s], beams=beams, max_new_tokens=7)[0] for s in sources]


# ---- generation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_cached_decoding_equals_decoding_without_cache(beams):
    from worldtokens.tasks.language.beam import beam_search

    model = captioner().eval()
    context = model.encode(model.collate_sources([image(i) for i in range(4)]))
    state = {}

    def step(ids):
        state["ids"] = torch.cat([state["ids"], ids], 1) if state else ids
        state.setdefault("rows", torch.arange(4))
        tokens = model.front(wt.Batch(ids=state["ids"], lengths=(state["ids"].shape[1],) * len(ids)))
        out = model.decoder(tokens, context=context[state["rows"]])
        return out.x[:, -1] @ model.front.embedding.weight.T

    def select(rows):
        state.update(ids=state["ids"][rows], rows=state["rows"][rows])

    with torch.no_grad():
        start = torch.tensor([model.prefix] * 4)
        slow = beam_search(step, select, start, beams=beams, max_new_tokens=8, end_id=model.front.end_id)
        fast = model.generate(context, beams=beams, max_new_tokens=8)
    assert [[h.ids for h in r] for r in fast] == [[h.ids for h in r] for r in slow]
    assert fast[0][0].score == pytest.approx(slow[0][0].score, abs=1e-5)


def test_suppressed_ids_are_never_generated():
    model = captioner()
    model.eval()
    ids = [
        h.ids
        for r in model.generate(model.encode(model.collate_sources([image(0)])), max_new_tokens=6)
        for h in r
    ]
    assert ids[0]
    model.suppress = [ids[0][0]]
    again = model.generate(model.encode(model.collate_sources([image(0)])), max_new_tokens=6)
    assert again[0][0].ids[:1] != ids[0][:1] and ids[0][0] not in again[0][0].ids


def test_generation_stops_at_the_end_of_the_context():
    model = captioner()
    model.suppress = [model.front.end_id]
    model.eval()
    found = model.generate(model.encode(model.collate_sources([image(0)])), max_new_tokens=500)
    assert len(found[0][0].ids) == model.front.context


def test_a_saved_model_gives_the_same_captions(tmp_path):
    front = text_tokenizer(specials=["<|es|>"])
    model = wt.Captioner(
        {"image": image_tokenizer(), "text": front},
        decoder=decoder(),
        encoder=wt.Transformer(32, 1, 2),
        tied=False,
        prefix=["<|es|>"],
        suppress=[7],
        max_new_tokens=9,
    )
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert again.caption([image(0)], beams=2) == model.caption([image(0)], beams=2)
    assert again.prefix == model.prefix and again.suppress == [7]


# ---- the context is used --------------------------------------------------------------------------------------


def coloured_images(n, seed):
    """Dark and bright images of one colour, with captions."""
    rng, rows = random.Random(seed), []
    colours = {"red": (1.0, 0, 0), "blue": (0, 0, 1.0), "green": (0, 1.0, 0)}
    for _ in range(n):
        colour, side = rng.choice(sorted(colours)), rng.choice(["table", "tree"])
        image = torch.tensor(colours[colour]).view(3, 1, 1).expand(3, 16, 16) * (
            0.3 if side == "table" else 0.9
        )
        noise = 0.05 * torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        image = (image + noise).clamp(0, 1).numpy().transpose(1, 2, 0)
        rows.append({"image": image, "text": f"a {colour} ball on the {side}"})
    return rows


def tones(n, seed):
    """The same captions for tones of different pitch and onset."""
    rng, rows = random.Random(seed), []
    pitch = {"red": 300.0, "blue": 900.0, "green": 2500.0}
    for _ in range(n):
        colour, side = rng.choice(sorted(pitch)), rng.choice(["table", "tree"])
        t = torch.arange(4000) / SAMPLE_RATE
        waveform = 0.5 * torch.sin(2 * torch.pi * pitch[colour] * t + rng.random() * 6)
        waveform[(2000 if side == "table" else 0) :][:2000] = 0
        rows.append({"audio": (waveform.numpy(), SAMPLE_RATE), "text": f"a {colour} ball on the {side}"})
    return rows


@pytest.mark.parametrize("column", ["image", "audio"])
def test_captions_depend_on_the_source(column, tmp_path):
    """After seconds of training, held-out images (or audio, with another tokenizer) get the right captions, and shuffled
    sources give a clearly higher loss."""
    data = {"image": coloured_images, "audio": tones}[column]
    model = captioner((column,), score="exact", max_new_tokens=12)
    settings = wt.TrainSettings(out=str(tmp_path), steps=150, batch_size=16, tensorboard=False)
    wt.train(model, data(200, 0), train=settings, optim=wt.OptimSettings(lr=1e-2))
    test = data(40, 1)
    metrics = model.evaluate(test)
    assert metrics["exact"] >= 0.9 and metrics["wer"] <= 0.1
    others = test[1:] + test[:1]
    shuffled = model.evaluate([{**r, column: o[column]} for r, o in zip(test, others, strict=True)])
    assert shuffled["loss"] > 5 * metrics["loss"]
    assert model.evaluate(test, beams=3)["exact"] >= 0.9


def test_video_is_a_source_too():
    """An image and a video as sources of one text: their tokens are concatenated."""
    torch.manual_seed(0)
    columns = {
        "image": image_tokenizer(),
        "video": wt.VideoTokenizer(32, tubelet=(2, 8, 8), frames=4, size=16),
    }
    model = wt.Captioner(columns | {"text": text_tokenizer()}, decoder=decoder()).eval()
    video = (255 * torch.rand(6, 3, 16, 16)).to(torch.uint8)
    rows = [{"image": image(0), "video": video, "text": "a red ball"}, {"video": video, "text": "the moon"}]
    assert model.encode(batch_of(model, rows)).valid.sum(1).tolist() == [4 + 8, 8]
    whole = model.caption(rows, max_new_tokens=5)
    assert whole == [model.caption([r], max_new_tokens=5)[0] for r in rows]


def test_another_modality_is_one_line_of_the_recipe(tmp_path):
    """The shipped image recipe with its ImageTokenizer line replaced trains on audio."""
    import wave

    from worldtokens.training.recipe import RECIPES, Recipe

    for i in range(12):
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes((torch.tensor(recording(i)[0]) * 20000).short().numpy().tobytes())
        (tmp_path / f"{i}.txt").write_text(f"{WORDS[i]} ball on the table")
    lines = (RECIPES / "caption_emoji.yaml").read_text().splitlines()
    (index,) = [i for i, line in enumerate(lines) if "ImageTokenizer" in line]
    lines[index] = (
        "      audio: {class: worldtokens.AudioTokenizer, args: {dim: 160, stem: frames, n_mels: 16}}"
    )
    (tmp_path / "speech.yaml").write_text("\n".join(lines))
    overrides = ["--data.train", str(tmp_path), "--data.validation", "null", "--data.augment", "{}"]
    overrides += ["--train.steps", "2", "--train.batch_size", "4", "--train.out", str(tmp_path / "run")]
    overrides += ["--train.eval_every", "null", "--model.tokenizers.text.vocabulary", "{train: 300}"]
    model, report = Recipe.read(str(tmp_path / "speech.yaml"), overrides).run()
    assert report.steps == 2 and model.sources == ["audio"]
    assert len(model.caption([str(tmp_path / "0.wav")], max_new_tokens=3)) == 1


@pytest.mark.slow
def test_speech_of_held_out_voices_is_transcribed(tmp_path):
    """Ten spoken words by voices that are not in training; with shuffled audio the loss is far higher."""
    train, test = (wt.samples.open("spoken_digits", split=side) for side in ("train", "test"))
    torch.manual_seed(0)
    text = wt.TextTokenizer.train(train.texts(), vocab_size=270, dim=64, context=8)
    front = wt.AudioTokenizer(64, sample_rate=11025, n_mels=40, stem="patches", patch=(6, 40), seconds=1.5)
    model = wt.Captioner(
        {"audio": front, "text": text},
        encoder=wt.Transformer(64, 2, 2, rope=1),
        decoder=wt.Transformer(64, 2, 2, cross=True),
        max_new_tokens=6,
        score="exact",
    )
    settings = wt.TrainSettings(out=str(tmp_path), steps=110, batch_size=64, cache_mb=200, precision="auto")
    wt.train(model, train, train=settings, optim=wt.OptimSettings(lr=5e-3))
    rows = [test[i] for i in range(len(test))]
    metrics = model.evaluate(rows)
    assert metrics["exact"] > 0.85
    model.score, half = "loss", len(rows) // 2 + 1
    others = [{**r, "audio": o["audio"]} for r, o in zip(rows, rows[half:] + rows[:half], strict=True)]
    assert model.evaluate(others)["loss"] > 10 * metrics["loss"]


# ---- cross-attention -----------------------------------------------------------------------------------------


def test_ids_are_grouped_into_words():
    front = text_tokenizer(start="<|start|>")
    ids = front.read("the tablecloth treeé on").tolist()[1:]
    found = group_words(front, ids)
    assert [w for w, _ in found] == ["the", "tablecloth", "treeé", "on", "<|endoftext|>"]
    assert [i for _, positions in found for i in positions] == list(range(len(ids)))


def test_the_figure_shows_the_attention_weights(tmp_path):
    """With all weight on the upper right patch, the image stays light there and is dark elsewhere."""
    from PIL import Image

    from worldtokens.figures import attention as attention_look

    model = captioner().eval()
    white = torch.full((16, 16, 3), 255, dtype=torch.uint8).numpy()
    attention = model.cross_attention(white, "a red ball")
    assert len(attention.ids) == len(model.front.read("a red ball")) - 1
    assert all(w.shape == (len(attention.ids), 4) for w in attention.weights)
    assert all(w.sum(1).allclose(torch.ones(len(w)), atol=1e-5) for w in attention.weights)
    panel = type("Panel", (), {"imshow": lambda self, image: setattr(self, "image", image)})()
    front = model.tokenizers["image"]
    attention_look._draw_image(panel, front, front.read(white), attention, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert (
        panel.image[:4, 12:].min() > 0.8 and panel.image[9:].max() < 0.5 and panel.image[:4, :4].max() < 0.2
    )
    path = attention_look.attention_figure(model, [white, white], tmp_path / "looked.png")
    assert Image.open(path).size[0] > 100
    heard = captioner(("audio",))
    assert (
        Image.open(attention_look.attention_figure(heard, [recording(0)], tmp_path / "heard.png")).size[0]
        > 100
    )
    with pytest.raises(InputError, match="one image or audio column"):
        attention_look.attention_figure(captioner(("image", "audio")), [], tmp_path / "no.png")


# ---- errors ----------------------------------------------------------------------------------------------------


def test_components_that_do_not_match_raise():
    with pytest.raises(ValueError, match="cross=True"):
        wt.Captioner({"image": image_tokenizer(), "text": text_tokenizer()}, decoder=wt.Transformer(32, 1, 2))
    with pytest.raises(ValueError, match="'image' tokenizer has dim 16, expected 32"):
        wt.Captioner({"image": image_tokenizer(16), "text": text_tokenizer()}, decoder=decoder())
    with pytest.raises(ValueError, match="expected the target column 'text'"):
        wt.Captioner({"image": image_tokenizer()}, decoder=decoder())
    with pytest.raises(ValueError, match="context_dim=16"):
        wt.Captioner(
            {"image": image_tokenizer(16), "text": text_tokenizer()},
            decoder=decoder(),
            encoder=wt.Transformer(16, 1, 2),
        )
    with pytest.raises(InputError, match=r"this model has the sources \['image', 'audio'\]"):
        captioner(("image", "audio")).caption([image(0)])
    with pytest.raises(InputError, match="no row to evaluate"):
        captioner().evaluate([row(0, "image")])
