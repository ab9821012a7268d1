"""Autoencoder: the loss of `DiscreteTokenizer`, metrics by hand, and the frozen tokenizer of a saved one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import worldtokens as wt
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.training.recipe import Recipe


def make_tokenizer(**options):
    options = {"size": 16, "factor": 4, "width": 16, "depth": 1, "quantizer": wt.FSQ((5, 5))} | options
    torch.manual_seed(0)
    return wt.DiscreteTokenizer(24, **options)


def emoji_rows(n=5, side=16):
    return [{"image": r["image"], "text": r["text"]} for r in open_emoji("train", skin_tones=False)[:n]]


def test_loss_is_that_of_the_tokenizer_and_reaches_the_codec():
    model = wt.Autoencoder(make_tokenizer(frozen=True)).train()  # a frozen tokenizer is unfrozen
    batch = model.collate([model.read(r) for r in emoji_rows()])
    out = model.loss(batch)
    assert torch.equal(out["loss"], model.front.loss(batch["image"])["loss"]) and batch["weight"] == 5
    out["loss"].backward()
    # residual branches start at zero, so layers inside a block have gradients from the second step on
    reached = {n for n, p in model.front.codec.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"encoder.0.weight", "encoder.2.weight", "decoder.0.weight", "decoder.2.weight"} <= reached


def test_rows_without_an_image_are_skipped():
    model = wt.Autoencoder({"photo": make_tokenizer()})
    some = [{"photo": torch.zeros(3, 16, 16, dtype=torch.uint8)}, {}]
    assert model.collate(some)["weight"] == 1
    empty = model.collate([{}, {}])
    loss = model.loss(empty)["loss"]
    loss.backward()
    assert empty["weight"] == 0 and float(loss) == 0
    with pytest.raises(wt.InputError, match="'photo'"):
        model.evaluate([{"text": "a"}])
    with pytest.raises(ValueError, match="one column"):
        wt.Autoencoder({"a": make_tokenizer(), "b": make_tokenizer()})


def test_metrics_by_hand():
    model, rows = wt.Autoencoder(make_tokenizer()).train(), emoji_rows()
    got = model.evaluate(rows, batch_size=2)
    front, x = model.front, torch.stack([model.read(r)["image"] for r in rows])
    x = front.collate(list(x))["pixels"].float() / 255
    back = (model({"image": x}) * 255).round() / 255
    assert got["mse"] == pytest.approx(float(F.mse_loss(back, x)), rel=1e-4) and model.training
    assert got["psnr"] == pytest.approx(-10 * math.log10(got["mse"]))
    blocks = x.reshape(5, 3, 4, 4, 4, 4)
    colour = ((blocks - blocks.mean((3, 5), keepdim=True)) ** 2).mean()
    assert got["mse_colour"] == pytest.approx(float(colour), rel=1e-4)
    assert got["used"] == pytest.approx(len(front.encode(x).unique()) / 25)
    assert got["bits"] == pytest.approx(16 * math.log2(25))


def test_from_autoencoder_loads_the_frozen_tokenizer(tmp_path):
    model = wt.Autoencoder(make_tokenizer(quantizer=wt.VectorQuantizer(12, 4)))
    model.front.codec.quantizer.codebook.normal_()
    model.save(tmp_path)
    image = torch.from_numpy(np.random.default_rng(0).random((2, 3, 16, 16), np.float32))
    ids = model.front.encode(image)
    for dim in (None, 24, 40):
        front = wt.from_autoencoder(str(tmp_path), dim)
        assert (
            front.dim == (dim or 24)
            and front.frozen
            and front.tokens([Image.new("RGB", (16, 16))]).dim == front.dim
        )
        assert torch.equal(front.encode(image), ids) and len(ids.unique()) > 1
        assert torch.equal(front.decode(ids), model.front.decode(ids))
        assert not any(p.requires_grad for p in front.codec.parameters())
    wt.Transformer(8, 1, 1).save(tmp_path / "other")
    with pytest.raises(wt.InputError, match="holds a Transformer"):
        wt.from_autoencoder(str(tmp_path / "other"))
    with pytest.raises(wt.InputError, match="not a saved model"):
        wt.from_autoencoder(str(tmp_path / "nowhere"))


def test_training_reduces_the_error_and_both_recipes_work_together(tmp_path):
    """Twelve steps of the first recipe, then the second with its tokenizer; the saved model needs no other folder."""
    common = ["--train.tensorboard", "false", "--train.batch_size", "8", "--data.validation", "null"]
    common += ["--train.eval_every", "null", "--train.precision", "fp32", "--train.device", "cpu"]
    small = ["--model.tokenizer.width", "16", "--model.tokenizer.depth", "1", "--train.steps", "12"]
    first = Recipe.read("autoencoder_emoji", ["--train.out", str(tmp_path / "codes"), *small, *common])
    before, held_out = first.build(first.rows()[0])[0], open_emoji("test", skin_tones=False)[:16]
    model, _ = first.run()
    assert model.evaluate(held_out)["mse"] < before.evaluate(held_out)["mse"]
    options = ["--train.out", str(tmp_path / "generator"), "--train.steps", "2", "--model.trunk.depth", "1"]
    options += ["--model.image.folder", str(tmp_path / "codes" / "last"), *common]
    generator, _ = Recipe.read("image_lm_emoji", options).run()
    assert generator.image.frozen and generator.image.dim == 192
    (tmp_path / "codes").rename(tmp_path / "moved")
    again = wt.load(tmp_path / "generator" / "last")
    image = held_out[0]["image"]
    one = again.image.collate([again.image.read(image)])
    assert torch.equal(again.image.encode(one), model.front.encode(one))


def test_the_second_recipe_without_the_first_raises(tmp_path):
    options = ["--model.image.folder", str(tmp_path / "none"), "--train.out", str(tmp_path / "o")]
    recipe = Recipe.read("image_lm_emoji", options)
    with pytest.raises(wt.InputError, match="not a saved model"):
        recipe.build(recipe.rows()[0])
