"""Diffusion: loss by hand, sampling, guidance, the null embedding, batches, targets and conditions of other kinds."""

import numpy as np
import pytest
import torch
from PIL import Image

import worldtokens as wt
from worldtokens.data.manifests import open_rows
from worldtokens.tasks.diffusion.samplers import euler, make_timesteps
from worldtokens.tokenizers.patches import patchify

DIM, TEXT_DIM = 32, 24


def vocabulary():
    texts = ["red heart", "blue square", "a face with a grin", "flag of the moon"] * 4
    return wt.TextTokenizer.train(texts, vocab_size=300, dim=1, start=None, end="<|endoftext|>").backend


VOCABULARY = vocabulary()


def text():
    return wt.TextTokenizer(VOCABULARY, dim=TEXT_DIM, context=24, causal=False, end="<|endoftext|>")


def image(**options):
    options = {"patch": 4, "size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3} | options
    return wt.ImageTokenizer(DIM, **options)


def make_model(tokenizers=None, seed=0, **options):
    """A small model with randomised parameters, in eval mode."""
    torch.manual_seed(seed)
    tokenizers = {"image": image(), "text": text()} if tokenizers is None else tokenizers
    conditional = len(tokenizers) > 1
    trunk = wt.Transformer(
        DIM, 2, 2, adaln=True, cross=conditional, context_dim=TEXT_DIM if conditional else None
    )
    encoder = wt.Transformer(TEXT_DIM, 1, 2) if conditional else None
    model = wt.Diffusion(tokenizers, trunk, encoder, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def make_image(seed, size=16):
    a = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(a)


ROWS = [
    {"image": make_image(0), "text": "red heart"},
    {"image": make_image(1), "text": "a face with a grin and more words"},
    {"image": make_image(2), "text": "flag"},
]


def collate(model, rows=ROWS):
    return model.collate([model.read(r) for r in rows])


def pixels(images):
    return torch.stack([torch.from_numpy(np.array(p)) for p in images]).int()


def close(a, b):
    """Equal images, up to rounding by one level."""
    return int((pixels(a) - pixels(b)).abs().max()) <= 1


# ---- loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_loss_by_hand(prediction):
    """A new model predicts zero, so its loss is the mean square of x1 - x0, or of x1 / (1 - t)."""
    model = wt.Diffusion({"image": image()}, wt.Transformer(DIM, 1, 2, adaln=True), prediction=prediction)
    batch = collate(model, [{"image": r["image"]} for r in ROWS])
    torch.manual_seed(3)
    loss = float(model.loss(batch)["loss"].detach())
    torch.manual_seed(3)
    torch.rand(3)  # dropout of conditions
    t = torch.randn(3).sigmoid()[:, None, None, None]
    clean = torch.stack([torch.from_numpy(np.array(r["image"])) for r in ROWS]).permute(0, 3, 1, 2)
    clean = clean / 127.5 - 1
    noise = torch.randn(clean.shape)
    error = clean - noise if prediction == "velocity" else clean / (1 - t).clamp(min=0.05)
    assert loss == pytest.approx(float(error.square().mean()), rel=1e-5)


@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_the_correct_prediction_has_no_error(prediction):
    model = make_model(prediction=prediction).train()
    clean, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    t = torch.tensor([0.3, 0.99])
    x = torch.lerp(noise, clean, t[:, None, None, None])
    correct = clean - noise if prediction == "velocity" else clean
    model.space.unfold = lambda front, out, like: correct
    assert float(model.errors(clean, noise, t, model.condition(collate(model, ROWS[:2]))).max()) < 1e-9
    assert x.shape == clean.shape


def test_gradients_reach_every_parameter():
    model = make_model(condition_dropout=0.5).train()
    torch.manual_seed(1)  # some rows keep their text, others drop it
    model.loss(collate(model))["loss"].backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_rows_with_missing_columns_train():
    model = make_model().train()
    rows = [{"image": make_image(0)}, {"image": make_image(1), "text": "flag"}, {"text": "red heart"}]
    batch = collate(model, rows)
    assert batch["weight"] == 2 and torch.isfinite(model.loss(batch)["loss"])
    without = model.loss(collate(model, [{"text": "flag"}]))["loss"]
    without.backward()
    assert float(without) == 0
    assert torch.isfinite(model.loss(collate(model, [{"image": make_image(0)}]))["loss"])


def test_a_row_without_text_has_the_null_embedding():
    model = make_model()
    batch = collate(model, [ROWS[0], {"image": make_image(1)}])
    context = model.condition(batch)
    assert [sum(n) for n in context.layout.lengths] == [context.shape[1], 1]
    assert torch.equal(context.x[1, 0], model.null[0, 0])


def test_dropped_conditions_are_unconditional():
    model = make_model()
    batch = collate(model)
    dropped, other = model.condition(batch, [True] * 3), collate(model, [{"image": r["image"]} for r in ROWS])
    assert torch.equal(dropped.x[:, :1], model.condition(other).x)
    clean = model.space.clean(model.front, batch["image"])
    args = clean, torch.zeros_like(clean), torch.full((3,), 0.5)
    assert torch.allclose(
        model.errors(*args, dropped), model.errors(*args, model.condition(other)), atol=1e-6
    )
    assert not torch.allclose(
        model.errors(*args, dropped), model.errors(*args, model.condition(batch)), atol=1e-3
    )


def test_velocities_do_not_depend_on_the_batch():
    model = make_model()
    clean = model.space.clean(model.front, collate(model)["image"])
    t = torch.tensor([0.2, 0.5, 0.8])
    whole = model.velocity(clean, t, model.condition(collate(model)))
    for i, row in enumerate(ROWS):
        alone = model.velocity(clean[i : i + 1], t[i : i + 1], model.condition(collate(model, [row])))
        assert (whole[i] - alone[0]).abs().max() < 1e-4


# ---- sampling ------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_batch():
    model = make_model()
    texts = ["red heart", None, "a face with a grin and more words"]
    whole = model.sample(texts, steps=3, seed=[5, 6, 7])
    for i, text in enumerate(texts):
        assert close(model.sample([text], steps=3, seed=5 + i), whole[i : i + 1])
    assert close(model.sample(texts, steps=3, seed=5, batch_size=2), whole)
    assert whole[0].size == (16, 16) and not close(whole[:1], whole[1:2])


def test_guidance_one_is_conditional_and_zero_is_unconditional():
    model, texts = make_model(), ["red heart", "flag"]
    noise = torch.stack([torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1)])
    context = model.condition(model.collate([model.read({"text": t}) for t in texts]))
    with torch.no_grad():
        x = euler(lambda x, t: model.velocity(x, t, context), noise, make_timesteps(4))
    plain = model.space.images(model.front, x)
    assert close(model.sample(texts, steps=4, guidance=1.0, sampler=euler), plain)
    unconditional = model.sample(2, steps=4)
    assert close(model.sample(texts, steps=4, guidance=0.0), unconditional)
    assert close(model.sample([None, None], steps=4, guidance=7.0), unconditional)
    assert not close(model.sample(texts, steps=4, guidance=4.0, sampler=euler), plain)


def test_save_and_load(tmp_path):
    model = make_model(prediction="data")
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert torch.equal(again.null, model.null) and again.prediction == "data"
    texts = ["red heart", None]
    assert close(again.sample(texts, steps=2), model.sample(texts, steps=2))


def test_sizes_and_invalid_requests():
    model = make_model()
    assert model.sample(["flag"], steps=1, size=(8, 24))[0].size == (24, 8)
    assert model.training is False and model.sample([], steps=1) == []
    with pytest.raises(wt.InputError, match="multiples of the patch"):
        model.sample(["flag"], size=18)
    with pytest.raises(wt.InputError, match="seeds"):
        model.sample(["flag"], seed=[1, 2])
    with pytest.raises(wt.InputError, match="source columns"):
        model.sample({"audio": ["flag"]})


# ---- evaluation ----------------------------------------------------------------------------------------------


def test_evaluation_is_deterministic_and_independent_of_the_batch():
    model = make_model().train()
    a, b = model.evaluate(ROWS, batch_size=3), model.evaluate(ROWS, batch_size=2)
    assert set(a) == {"loss", "loss_null", "loss_shuffled"} and model.training
    assert all(a[k] == pytest.approx(b[k], rel=1e-4) for k in a)
    with pytest.raises(wt.InputError, match="no row"):
        model.evaluate([{"text": "flag"}])


# ---- spaces and conditions -----------------------------------------------------------------------------------


def test_pixels_round_trip():
    model = make_model()
    clean = model.space.clean(model.front, collate(model)["image"])
    assert close(model.space.images(model.front, clean), [r["image"] for r in ROWS])
    assert torch.equal(model.space.unfold(model.front, patchify(clean, (4, 4)), clean), clean)


def test_a_class_token_and_another_patch():
    model = make_model({"image": image(class_token=True, patch=(8, 4)), "text": text()})
    assert model.sample(["flag"], steps=1)[0].size == (16, 16)


def codec_tokenizers():
    front = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, causal=False)
    return {"image": front, "text": text()}


def test_latents_of_a_codec(tmp_path):
    model = make_model(codec_tokenizers()).train()
    loss = model.loss(collate(model))["loss"]
    loss.backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not any("codec" in n or ("embedding" in n and "image" in n) for n in trained)
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad and n != "null")
    front, batch = model.front, collate(model)["image"]
    clean = model.space.clean(front, batch)
    assert clean.shape == (3, 4, 4, 4) and 0.5 < float(clean.std()) < 2
    rebuilt = front.decode(front.encode(batch), torch.uint8).permute(0, 2, 3, 1)
    assert int((pixels(model.space.images(front, clean)) - rebuilt.int()).abs().max()) <= 1
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert float(again.space.scale) == float(model.space.scale) > 0
    assert close(again.sample(["flag"], steps=2), model.sample(["flag"], steps=2))


def test_audio_conditions_and_two_source_columns():
    def audio():
        return wt.AudioTokenizer(TEXT_DIM, preset="whisper")

    waveform = (np.sin(np.arange(8000) / 9).astype(np.float32), 16000)
    model = make_model({"image": image(), "audio": audio()})
    assert torch.isfinite(model.loss(collate(model, [{"image": make_image(0), "audio": waveform}]))["loss"])
    assert model.sample([waveform, None], steps=1)[0].size == (16, 16)
    both = make_model({"image": image(), "audio": audio(), "text": text()})
    rows = [{"image": make_image(0), "audio": waveform}, {"image": make_image(1), "text": "flag"}, ROWS[2]]
    assert torch.isfinite(both.loss(collate(both, rows))["loss"])
    conditions = {"audio": [waveform, None], "text": ["flag", "flag"]}
    whole = both.sample(conditions, steps=2)
    assert close(whole[1:], both.sample({"text": ["flag"]}, steps=2, seed=1))


def test_mismatched_settings_raise():
    trunk = wt.Transformer(DIM, 1, 2, adaln=True)
    with pytest.raises(ValueError, match="cross=True"):
        wt.Diffusion({"image": image(), "text": text()}, trunk)
    with pytest.raises(ValueError, match="no target column 'image'"):
        wt.Diffusion({"text": text()}, trunk)
    with pytest.raises(ValueError, match="one image size"):
        wt.Diffusion({"image": image(size=None)}, trunk)
    with pytest.raises(ValueError, match="expected one width"):
        cross = wt.Transformer(DIM, 1, 2, adaln=True, cross=True)
        wt.Diffusion({"image": image(), "text": text()}, cross)
    with pytest.raises(ValueError, match="adaln=True"):
        wt.Diffusion({"image": image()}, wt.Transformer(DIM, 1, 2))


def test_two_images_are_memorised_by_their_captions():
    """Trained on two hearts only, the model generates the one in the caption."""
    rows = {r["text"][0]: r for r in open_rows("emoji", split="train")}
    pair = [{"image": rows[n]["image"], "text": n} for n in ("green heart", "yellow heart")]
    torch.manual_seed(0)
    trunk = wt.Transformer(64, 2, 2, adaln=True, cross=True, context_dim=TEXT_DIM)
    model = wt.Diffusion({"image": wt.ImageTokenizer(64, patch=4, size=16), "text": text()}, trunk)
    batch = collate(model, pair * 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(batch)["loss"].backward()
        optimizer.step()
    real = pixels([Image.fromarray(p) for p in _targets(model, pair)]).float()
    sampled = pixels(model.sample([r["text"] for r in pair] * 4, steps=10, guidance=1.0)).float()
    distance = (sampled[:, None] - real[None]).square().flatten(2).mean(2).sqrt()
    assert distance.argmin(1).tolist() == [0, 1] * 4
    assert distance.min(1).values.mean() < 0.5 * distance.max(1).values.mean()


def _targets(model, rows):
    clean = model.space.clean(model.front, collate(model, rows)["image"])
    return [np.array(p) for p in model.space.images(model.front, clean)]
