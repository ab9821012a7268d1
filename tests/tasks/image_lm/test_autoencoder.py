"""Training codes: what the task adds to `DiscreteTokenizer`, figures by hand, and the frozen codes of a saved one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import worldtokens as wt
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.training.recipe import Recipe


def codes(**options):
    options = {"size": 16, "factor": 4, "width": 16, "depth": 1, "quantizer": wt.FSQ((5, 5))} | options
    torch.manual_seed(0)
    return wt.DiscreteTokenizer(24, **options)


def rows(n=5, side=16):
    return [{"image": r["image"], "text": r["text"]} for r in open_emoji("train", skin_tones=False)[:n]]


def test_its_loss_is_the_tokenizers_and_reaches_the_codec():
    model = wt.Autoencoder(codes(frozen=True)).train()  # a frozen one is thawed
    batch = model.collate([model.read(r) for r in rows()])
    made = model.loss(batch)
    assert torch.equal(made["loss"], model.front.loss(batch["image"])["loss"]) and batch["weight"] == 5
    made["loss"].backward()
    # a block begins as its straight path, so what lies before its last map learns from the second step on
    reached = {n for n, p in model.front.codec.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"encoder.0.weight", "encoder.2.weight", "decoder.0.weight", "decoder.2.weight"} <= reached


def test_rows_without_a_picture_are_left_out():
    model = wt.Autoencoder({"photo": codes()})
    some = [{"photo": torch.zeros(3, 16, 16, dtype=torch.uint8)}, {}]
    assert model.collate(some)["weight"] == 1
    empty = model.collate([{}, {}])
    loss = model.loss(empty)["loss"]
    loss.backward()
    assert empty["weight"] == 0 and float(loss) == 0
    with pytest.raises(wt.InputError, match="'photo'"):
        model.evaluate([{"text": "a"}])
    with pytest.raises(ValueError, match="one column"):
        wt.Autoencoder({"a": codes(), "b": codes()})


def test_figures_by_hand():
    model, few = wt.Autoencoder(codes()).train(), rows()
    got = model.evaluate(few, batch_size=2)
    front, x = model.front, torch.stack([model.read(r)["image"] for r in few])
    x = front.collate(list(x))["pixels"].float() / 255
    back = (model({"image": x}) * 255).round() / 255
    assert got["mse"] == pytest.approx(float(F.mse_loss(back, x)), rel=1e-4) and model.training
    assert got["psnr"] == pytest.approx(-10 * math.log10(got["mse"]))
    blocks = x.reshape(5, 3, 4, 4, 4, 4)
    colour = ((blocks - blocks.mean((3, 5), keepdim=True)) ** 2).mean()
    assert got["mse_colour"] == pytest.approx(float(colour), rel=1e-4)
    assert got["used"] == pytest.approx(len(front.encode(x).unique()) / 25)
    assert got["bits"] == pytest.approx(16 * math.log2(25))


def test_a_saved_one_hands_out_its_codes(tmp_path):
    model = wt.Autoencoder(codes(quantizer=wt.VectorQuantizer(12, 4)))
    model.front.codec.quantizer.codebook.normal_()
    model.save(tmp_path)
    picture = torch.from_numpy(np.random.default_rng(0).random((2, 3, 16, 16), np.float32))
    ids = model.front.encode(picture)
    for dim in (None, 24, 40):
        front = wt.from_autoencoder(str(tmp_path), dim)
        assert (
            front.dim == (dim or 24)
            and front.frozen
            and front.tokens([Image.new("RGB", (16, 16))]).dim == front.dim
        )
        assert torch.equal(front.encode(picture), ids) and len(ids.unique()) > 1
        assert torch.equal(front.decode(ids), model.front.decode(ids))
        assert not any(p.requires_grad for p in front.codec.parameters())
    wt.Transformer(8, 1, 1).save(tmp_path / "other")
    with pytest.raises(wt.InputError, match="holds a Transformer"):
        wt.from_autoencoder(str(tmp_path / "other"))
    with pytest.raises(wt.InputError, match="not a saved model"):
        wt.from_autoencoder(str(tmp_path / "nowhere"))


def test_training_lessens_the_error_and_both_recipes_go_together(tmp_path):
    """Twelve steps of the first recipe, and the second on what it saved; the model stands alone when loaded."""
    common = ["--train.tensorboard", "false", "--train.batch_size", "8", "--data.validation", "null"]
    common += ["--train.eval_every", "null", "--train.precision", "fp32", "--train.device", "cpu"]
    small = ["--model.tokenizer.width", "16", "--model.tokenizer.depth", "1", "--train.steps", "12"]
    first = Recipe.read("autoencoder_emoji", ["--train.out", str(tmp_path / "codes"), *small, *common])
    before, held = first.build(first.rows()[0])[0], open_emoji("test", skin_tones=False)[:16]
    model, _ = first.run()
    assert model.evaluate(held)["mse"] < before.evaluate(held)["mse"]
    words = ["--train.out", str(tmp_path / "draws"), "--train.steps", "2", "--model.trunk.depth", "1"]
    words += ["--model.image.folder", str(tmp_path / "codes" / "last"), *common]
    drawer, _ = Recipe.read("image_lm_emoji", words).run()
    assert drawer.image.frozen and drawer.image.dim == 192
    (tmp_path / "codes").rename(tmp_path / "gone")
    again = wt.load(tmp_path / "draws" / "last")
    picture = held[0]["image"]
    one = again.image.collate([again.image.read(picture)])
    assert torch.equal(again.image.encode(one), model.front.encode(one))


def test_the_second_recipe_without_the_first_says_what_is_missing(tmp_path):
    words = ["--model.image.folder", str(tmp_path / "none"), "--train.out", str(tmp_path / "o")]
    recipe = Recipe.read("image_lm_emoji", words)
    with pytest.raises(wt.InputError, match="not a saved model"):
        recipe.build(recipe.rows()[0])
