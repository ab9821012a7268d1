"""LoRA by peft on our modules: trains, saves, resumes, merges and reloads, in the training loop as it is."""

from __future__ import annotations

import json

import peft
import pytest
import torch

import worldtokens as wt
from worldtokens.data.manifests import write_folder
from worldtokens.training.loop import train
from worldtokens.training.optim import OptimSettings
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import TrainSettings

TARGETS = r"trunk\.blocks\.\d+\.(attn\.qkv|attn\.proj|mlp\.fc1)"


def rows(n: int = 64) -> list[dict]:
    """Two kinds of images, told apart by which half is brighter."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        picture = torch.randint(0, 120, (3, 16, 16), generator=g, dtype=torch.uint8)
        picture[:, :, 8 * (i % 2) : 8 * (i % 2) + 8] += 90
        out.append({"image": picture, "label": i % 2})
    return out


def classifier() -> wt.Classifier:
    torch.manual_seed(1)
    return wt.Classifier(wt.ImageTokenizer(32, patch=8, size=16), wt.Transformer(32, 2, 4, drop_path=0.1), 2)


def adapted(**settings) -> wt.Classifier:
    model = classifier()
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=TARGETS, **settings), model)
    return model


def go(model, out, steps=30, every=10, resume=False, **optim):
    plan = TrainSettings(
        out=str(out), steps=steps, batch_size=16, eval_every=every, device="cpu", resume=resume, workers=0
    )
    return train(model, rows(), rows(16), train=plan, optim=OptimSettings(lr=2e-2, **optim))


def test_patterns_adapt_what_they_name():
    model = adapted()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained)
    assert {n.partition(".lora_")[0] for n in trained} == {
        f"trunk.blocks.{i}.{m}" for i in range(2) for m in ("attn.qkv", "attn.proj", "mlp.fc1")
    }
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():  # an adapter starts at nothing
        torch.testing.assert_close(model.eval()({"image": x}), classifier().eval()({"image": x}))


def test_trains_saves_merges_and_reloads(tmp_path):
    model, start = adapted(lora_alpha=16, lora_dropout=0.1), classifier()
    wt.unfreeze(model, "head")
    figures = go(model, tmp_path / "run").figures
    assert figures["top1"] == 1.0
    plain = dict(start.named_parameters())
    for name, p in model.named_parameters():
        if ".base_layer." in name:
            assert torch.equal(p, plain[name.replace(".base_layer", "")])  # what is not an adapter stayed
    x = torch.stack([r["image"] for r in rows(8)])
    with torch.no_grad():
        want = model({"image": x})
        # what the run left: the adapters are told in its config and come back, still apart
        kept = wt.load(tmp_path / "run" / "last")
        torch.testing.assert_close(kept({"image": x}), want, atol=1e-6, rtol=0)
        assert json.loads((tmp_path / "run/last/config.json").read_text())["adapters"] == {
            "default": {
                "peft_type": "LORA", "r": 4, "target_modules": TARGETS, "lora_alpha": 16, "lora_dropout": 0.1
            }
        }  # fmt: skip
        # merged: an ordinary model, no peft in it
        assert wt.merge_lora(kept) is kept
        assert list(kept.state_dict()) == list(start.state_dict())
        torch.testing.assert_close(kept({"image": x}), want, atol=1e-5, rtol=0)
        kept.save(tmp_path / "merged")
        assert set(json.loads((tmp_path / "merged/config.json").read_text())) == {"class", "args"}
        torch.testing.assert_close(wt.load(tmp_path / "merged")({"image": x}), want, atol=1e-5, rtol=0)
    with pytest.raises(wt.InputError, match="no adapters of peft"):
        wt.merge_lora(kept)


def test_a_run_that_is_resumed_is_the_unbroken_one(tmp_path):
    whole = adapted()
    go(whole, tmp_path / "whole", steps=8, every=4)
    broken = adapted()
    stop = StopAfter(broken, 5)
    with pytest.raises(KeyboardInterrupt):
        go(stop.model, tmp_path / "broken", steps=8, every=4)
    resumed = adapted()
    go(resumed, tmp_path / "broken", steps=8, every=4, resume=True)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


class StopAfter:
    """Raises in the first loss behind so many, as a run that is killed."""

    def __init__(self, model: wt.Classifier, steps: int) -> None:
        self.model, self.left, self.loss = model, steps, model.loss
        model.loss = self

    def __call__(self, batch):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.loss(batch)


def test_get_peft_model_gives_the_same_task():
    model = classifier()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    assert wrapped.get_base_model() is model and model.peft_config
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(wrapped({"image": x}), model({"image": x}))


def test_averaged_weights_are_of_the_adapters(tmp_path):
    model = adapted()
    go(model, tmp_path / "run", steps=10, ema=0.9)
    back = wt.load(tmp_path / "run" / "last")
    x = torch.stack([r["image"] for r in rows(4)])
    with torch.no_grad():
        torch.testing.assert_close(back({"image": x}), model({"image": x}), atol=1e-6, rtol=0)


RECIPE = """
model:
  class: worldtokens.CLIP
  args:
    tokenizers:
      image: {class: worldtokens.ImageTokenizer, args: {dim: 32, patch: 16, size: 64}}
      text: {class: worldtokens.TextTokenizer, args: {vocabulary: {train: 400}, dim: 32, context: 48}}
    trunk: {class: worldtokens.Transformer, args: {dim: 32, depth: 1, heads: 2}}
    dim: 32
data: {train: PICTURES}
optim: {lr: 1e-2, ema: 0.9}
train: {steps: 3, batch_size: 16, out: OUT, device: cpu, tensorboard: false}
"""


def test_through_a_recipe(tmp_path):
    """A recipe builds the task; adapters go in before it is trained. A few steps on real images and words."""
    write_folder(wt.open_rows("emoji", split="train")[:40], tmp_path / "images")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        RECIPE.replace("PICTURES", str(tmp_path / "images")).replace("OUT", str(tmp_path / "run"))
    )
    recipe = Recipe.read(str(path))
    rows, _ = recipe.rows()
    task, augment = recipe.build(rows)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=r".*\.attn\.qkv"), task)
    before = {n: p.detach().clone() for n, p in task.named_parameters()}
    train(task, rows, train=recipe.train, optim=recipe.optim, augment=augment)
    # (the temperature is kept within its bounds in place, not by the optimizer)
    changed = {n for n, p in task.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".lora_" in n for n in changed)
    last = wt.load(tmp_path / "run" / "last")
    want = task.embed("text", ["a cat"])
    torch.testing.assert_close(wt.merge_lora(last).embed("text", ["a cat"]), want, atol=1e-5, rtol=0)
