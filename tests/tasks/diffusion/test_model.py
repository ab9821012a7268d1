"""Rectified flow: the arithmetic by hand, samplers, guidance, the null, batches, targets and conditions of other kinds."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

import worldtokens as wt
from worldtokens.data.manifests import open_rows
from worldtokens.tasks.diffusion.samplers import euler, guided, heun, times

DIM, WORDS = 32, 24


def vocabulary():
    texts = ["red heart", "blue square", "a face with a grin", "flag of the moon"] * 4
    return wt.TextTokenizer.train(texts, vocab_size=300, dim=1, start=None, end="<|endoftext|>").backend


VOCABULARY = vocabulary()


def text():
    return wt.TextTokenizer(VOCABULARY, dim=WORDS, context=24, causal=False, end="<|endoftext|>")


def image(**options):
    options = {"patch": 4, "size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3} | options
    return wt.ImageTokenizer(DIM, **options)


def made(tokenizers=None, seed=0, **options):
    """A small model with every parameter away from its start, in eval mode."""
    torch.manual_seed(seed)
    tokenizers = {"image": image(), "text": text()} if tokenizers is None else tokenizers
    some = len(tokenizers) > 1
    trunk = wt.Transformer(DIM, 2, 2, adaln=True, cross=some, context_dim=WORDS if some else None)
    encoder = wt.Transformer(WORDS, 1, 2) if some else None
    model = wt.Diffusion(tokenizers, trunk, encoder, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def picture(seed, size=16):
    a = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(a)


ROWS = [
    {"image": picture(0), "text": "red heart"},
    {"image": picture(1), "text": "a face with a grin and more words"},
    {"image": picture(2), "text": "flag"},
]


def batch_of(model, rows=ROWS):
    return model.collate([model.read(r) for r in rows])


def pixels(pictures):
    return torch.stack([torch.from_numpy(np.array(p)) for p in pictures]).int()


def alike(a, b):
    """Equal images, but for a rounding to the other side of half a level."""
    return int((pixels(a) - pixels(b)).abs().max()) <= 1


# ---- samplers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [euler, heun])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_point_mass_is_reached_exactly(sampler, steps):
    """Where all images are one point, x moves straight at it: even a single step lands there."""
    point = torch.tensor([[1.0, -2.0, 0.5]])
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    out = sampler(lambda x, t: (point - x) / (1 - t)[:, None], x, times(steps))
    assert (out - point).abs().max() < 1e-6


def test_orders_of_the_samplers():
    """dx/dt = x cos t has the solution x0 exp(sin t): half the step halves Euler's error and quarters Heun's."""
    x = torch.ones(1, 1, dtype=torch.float64)

    def error(sampler, steps):
        out = sampler(lambda x, t: x * t.double().cos()[:, None], x, times(steps))
        return abs(float(out) - math.exp(math.sin(1.0)))

    assert 1.9 < error(euler, 32) / error(euler, 64) < 2.1
    assert 3.8 < error(heun, 128) / error(heun, 256) < 4.2


def test_how_often_a_model_is_asked():
    asked = []
    for sampler, expected in ((euler, 5), (heun, 9)):
        asked.clear()
        sampler(lambda x, t: asked.append(float(t[0])) or x, torch.zeros(1, 1), times(5))
        assert len(asked) == expected and max(asked) < 1


def test_times():
    assert times(4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    shifted = times(4, shift=3.0)
    assert shifted[0] == 0 and shifted[-1] == 1 and shifted[2] == pytest.approx(0.25)
    with pytest.raises(wt.InputError, match="1 or more"):
        times(0)


def test_guidance_by_hand():
    a, b = torch.tensor([1.0]), torch.tensor([3.0])
    assert [float(guided(b, a, g)) for g in (0.0, 1.0, 2.5)] == [1.0, 3.0, 6.0]


# ---- loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_loss_by_hand(prediction):
    """A fresh model says zero, so its loss is the mean square of x1 - x0, or of x1 / (1 - t)."""
    model = wt.Diffusion({"image": image()}, wt.Transformer(DIM, 1, 2, adaln=True), prediction=prediction)
    batch = batch_of(model, [{"image": r["image"]} for r in ROWS])
    torch.manual_seed(3)
    loss = float(model.loss(batch)["loss"].detach())
    torch.manual_seed(3)
    torch.rand(3)  # who is dropped
    t = torch.randn(3).sigmoid()[:, None, None, None]
    clean = torch.stack([torch.from_numpy(np.array(r["image"])) for r in ROWS]).permute(0, 3, 1, 2)
    clean = clean / 127.5 - 1
    noise = torch.randn(clean.shape)
    error = clean - noise if prediction == "velocity" else clean / (1 - t).clamp(min=0.05)
    assert loss == pytest.approx(float(error.square().mean()), rel=1e-5)


@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_a_right_answer_has_no_error(prediction):
    model = made(prediction=prediction).train()
    clean, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    t = torch.tensor([0.3, 0.99])
    x = torch.lerp(noise, clean, t[:, None, None, None])
    right = clean - noise if prediction == "velocity" else clean
    model.space.unfold = lambda front, out, like: right
    assert float(model.errors(clean, noise, t, model.condition(batch_of(model, ROWS[:2]))).max()) < 1e-9
    assert x.shape == clean.shape


def test_gradients_reach_every_parameter():
    model = made(condition_dropout=0.5).train()
    torch.manual_seed(1)  # some rows keep their words, some lose them
    model.loss(batch_of(model))["loss"].backward()
    lacking = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert lacking == []


def test_rows_that_lack_something_train():
    model = made().train()
    half = [{"image": picture(0)}, {"image": picture(1), "text": "flag"}, {"text": "red heart"}]
    batch = batch_of(model, half)
    assert batch["weight"] == 2 and torch.isfinite(model.loss(batch)["loss"])
    without = model.loss(batch_of(model, [{"text": "flag"}]))["loss"]
    without.backward()
    assert float(without) == 0
    assert torch.isfinite(model.loss(batch_of(model, [{"image": picture(0)}]))["loss"])


def test_a_row_without_words_has_the_null():
    model = made()
    batch = batch_of(model, [ROWS[0], {"image": picture(1)}])
    context = model.condition(batch)
    assert [sum(n) for n in context.layout.lengths] == [context.shape[1], 1]
    assert torch.equal(context.x[1, 0], model.null[0, 0])


def test_all_dropped_is_unconditional():
    model = made()
    batch = batch_of(model)
    lost, other = model.condition(batch, [True] * 3), batch_of(model, [{"image": r["image"]} for r in ROWS])
    assert torch.equal(lost.x[:, :1], model.condition(other).x)
    clean = model.space.clean(model.front, batch["image"])
    args = clean, torch.zeros_like(clean), torch.full((3,), 0.5)
    assert torch.allclose(model.errors(*args, lost), model.errors(*args, model.condition(other)), atol=1e-6)
    assert not torch.allclose(
        model.errors(*args, lost), model.errors(*args, model.condition(batch)), atol=1e-3
    )


def test_a_batch_gives_what_one_by_one_gives():
    model = made()
    clean = model.space.clean(model.front, batch_of(model)["image"])
    t = torch.tensor([0.2, 0.5, 0.8])
    whole = model.velocity(clean, t, model.condition(batch_of(model)))
    for i, row in enumerate(ROWS):
        alone = model.velocity(clean[i : i + 1], t[i : i + 1], model.condition(batch_of(model, [row])))
        assert (whole[i] - alone[0]).abs().max() < 1e-4


# ---- sampling ------------------------------------------------------------------------------------------------


def test_sampling_in_a_batch_is_sampling_one_by_one():
    model = made()
    texts = ["red heart", None, "a face with a grin and more words"]
    whole = model.sample(texts, steps=3, seed=[5, 6, 7])
    for i, asked in enumerate(texts):
        assert alike(model.sample([asked], steps=3, seed=5 + i), whole[i : i + 1])
    assert alike(model.sample(texts, steps=3, seed=5, batch_size=2), whole)
    assert whole[0].size == (16, 16) and not alike(whole[:1], whole[1:2])


def test_guidance_one_is_none_and_zero_is_unconditional():
    model, texts = made(), ["red heart", "flag"]
    noise = torch.stack([torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1)])
    context = model.condition(model.collate([model.read({"text": t}) for t in texts]))
    with torch.no_grad():
        x = euler(lambda x, t: model.velocity(x, t, context), noise, times(4))
    plain = model.space.pictures(model.front, x)
    assert alike(model.sample(texts, steps=4, guidance=1.0, sampler=euler), plain)
    free = model.sample(2, steps=4)
    assert alike(model.sample(texts, steps=4, guidance=0.0), free)
    assert alike(model.sample([None, None], steps=4, guidance=7.0), free)
    assert not alike(model.sample(texts, steps=4, guidance=4.0, sampler=euler), plain)


def test_the_null_and_everything_else_is_saved(tmp_path):
    model = made(prediction="data")
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert torch.equal(again.null, model.null) and again.prediction == "data"
    asked = ["red heart", None]
    assert alike(again.sample(asked, steps=2), model.sample(asked, steps=2))


def test_sizes_and_what_cannot_be_asked():
    model = made()
    assert model.sample(["flag"], steps=1, size=(8, 24))[0].size == (24, 8)
    assert model.training is False and model.sample([], steps=1) == []
    with pytest.raises(wt.InputError, match="multiples of the patch"):
        model.sample(["flag"], size=18)
    with pytest.raises(wt.InputError, match="seeds"):
        model.sample(["flag"], seed=[1, 2])
    with pytest.raises(wt.InputError, match="this model reads"):
        model.sample({"audio": ["flag"]})


# ---- evaluation ----------------------------------------------------------------------------------------------


def test_evaluation_is_the_same_each_time_and_for_any_batch():
    model = made().train()
    a, b = model.evaluate(ROWS, batch_size=3), model.evaluate(ROWS, batch_size=2)
    assert set(a) == {"loss", "loss_null", "loss_shuffled"} and model.training
    assert all(a[k] == pytest.approx(b[k], rel=1e-4) for k in a)
    with pytest.raises(wt.InputError, match="no row"):
        model.evaluate([{"text": "flag"}])


# ---- spaces and conditions -----------------------------------------------------------------------------------


def test_pixels_go_out_as_they_came_in():
    model = made()
    clean = model.space.clean(model.front, batch_of(model)["image"])
    assert alike(model.space.pictures(model.front, clean), [r["image"] for r in ROWS])
    from worldtokens.tokenizers.patches import patchify

    assert torch.equal(model.space.unfold(model.front, patchify(clean, (4, 4)), clean), clean)


def test_a_class_token_and_another_patch():
    model = made({"image": image(class_token=True, patch=(8, 4)), "text": text()})
    assert model.sample(["flag"], steps=1)[0].size == (16, 16)


def codes():
    front = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, causal=False)
    return {"image": front, "text": text()}


def test_the_codes_of_a_codec_as_space(tmp_path):
    model = made(codes()).train()
    loss = model.loss(batch_of(model))["loss"]
    loss.backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not any("codec" in n or ("embedding" in n and "image" in n) for n in trained)
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad and n != "null")
    front, batch = model.front, batch_of(model)["image"]
    clean = model.space.clean(front, batch)
    assert clean.shape == (3, 4, 4, 4) and 0.5 < float(clean.std()) < 2
    rebuilt = front.decode(front.encode(batch), torch.uint8).permute(0, 2, 3, 1)
    assert int((pixels(model.space.pictures(front, clean)) - rebuilt.int()).abs().max()) <= 1
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert float(again.space.scale) == float(model.space.scale) > 0
    assert alike(again.sample(["flag"], steps=2), model.sample(["flag"], steps=2))


def test_a_sound_as_condition_and_both():
    def sound():
        return wt.AudioTokenizer(WORDS, preset="whisper")

    wave = (np.sin(np.arange(8000) / 9).astype(np.float32), 16000)
    model = made({"image": image(), "audio": sound()})
    assert torch.isfinite(model.loss(batch_of(model, [{"image": picture(0), "audio": wave}]))["loss"])
    assert model.sample([wave, None], steps=1)[0].size == (16, 16)
    both = made({"image": image(), "audio": sound(), "text": text()})
    rows = [{"image": picture(0), "audio": wave}, {"image": picture(1), "text": "flag"}, ROWS[2]]
    assert torch.isfinite(both.loss(batch_of(both, rows))["loss"])
    asked = {"audio": [wave, None], "text": ["flag", "flag"]}
    whole = both.sample(asked, steps=2)
    assert alike(whole[1:], both.sample({"text": ["flag"]}, steps=2, seed=1))


def test_refused_where_parts_do_not_fit():
    trunk = wt.Transformer(DIM, 1, 2, adaln=True)
    with pytest.raises(ValueError, match="cross=True"):
        wt.Diffusion({"image": image(), "text": text()}, trunk)
    with pytest.raises(ValueError, match="no column 'image'"):
        wt.Diffusion({"text": text()}, trunk)
    with pytest.raises(ValueError, match="one size"):
        wt.Diffusion({"image": image(size=None)}, trunk)
    with pytest.raises(ValueError, match="give them one width"):
        cross = wt.Transformer(DIM, 1, 2, adaln=True, cross=True)
        wt.Diffusion({"image": image(), "text": text()}, cross)
    with pytest.raises(ValueError, match="adaln=True"):
        wt.Diffusion({"image": image()}, wt.Transformer(DIM, 1, 2))


def test_two_pictures_are_learnt_by_their_names():
    """Trained on two hearts alone, it draws the one that is asked for, and only that."""
    rows = {r["text"][0]: r for r in open_rows("emoji", split="train")}
    pair = [{"image": rows[n]["image"], "text": n} for n in ("green heart", "yellow heart")]
    torch.manual_seed(0)
    trunk = wt.Transformer(64, 2, 2, adaln=True, cross=True, context_dim=WORDS)
    model = wt.Diffusion({"image": wt.ImageTokenizer(64, patch=4, size=16), "text": text()}, trunk)
    batch = batch_of(model, pair * 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(batch)["loss"].backward()
        optimizer.step()
    real = pixels([Image.fromarray(p) for p in _small(model, pair)]).float()
    drawn = pixels(model.sample([r["text"] for r in pair] * 4, steps=10, guidance=1.0)).float()
    distance = (drawn[:, None] - real[None]).square().flatten(2).mean(2).sqrt()
    assert distance.argmin(1).tolist() == [0, 1] * 4
    assert distance.min(1).values.mean() < 0.5 * distance.max(1).values.mean()


def _small(model, rows):
    clean = model.space.clean(model.front, batch_of(model, rows)["image"])
    return [np.array(p) for p in model.space.pictures(model.front, clean)]
