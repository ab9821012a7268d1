"""LoRA by peft on our modules: training, saving, resuming, merging and loading in the standard training loop."""

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
    """Images of two classes: the left or the right half is brighter."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        image = torch.randint(0, 120, (3, 16, 16), generator=g, dtype=torch.uint8)
        image[:, :, 8 * (i % 2) : 8 * (i % 2) + 8] += 90
        out.append({"image": image, "label": i % 2})
    return out


def classifier() -> wt.Classifier:
    torch.manual_seed(1)
    return wt.Classifier(wt.ImageTokenizer(32, patch=8, size=16), wt.Transformer(32, 2, 4, drop_path=0.1), 2)


def adapted(**settings) -> wt.Classifier:
    model = classifier()
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=TARGETS, **settings), model)
    return model


def run(model, out, steps=30, every=10, resume=False, **optim):
    plan = TrainSettings(
        out=str(out), steps=steps, batch_size=16, eval_every=every, device="cpu", resume=resume, workers=0
    )
    return train(model, rows(), rows(16), train=plan, optim=OptimSettings(lr=2e-2, **optim))


def test_patterns_select_the_adapted_layers():
    model = adapted()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained)
    assert {n.partition(".lora_")[0] for n in trained} == {
        f"trunk.blocks.{i}.{m}" for i in range(2) for m in ("attn.qkv", "attn.proj", "mlp.fc1")
    }
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():  # an adapter is initialised to zero output
        torch.testing.assert_close(model.eval()({"image": x}), classifier().eval()({"image": x}))


def test_training_saving_merging_and_loading(tmp_path):
    model, start = adapted(lora_alpha=16, lora_dropout=0.1), classifier()
    wt.unfreeze(model, "head")
    metrics = run(model, tmp_path / "run").metrics
    assert metrics["top1"] == 1.0
    plain = dict(start.named_parameters())
    for name, p in model.named_parameters():
        if ".base_layer." in name:
            assert torch.equal(p, plain[name.replace(".base_layer", "")])  # all other weights are unchanged
    x = torch.stack([r["image"] for r in rows(8)])
    with torch.no_grad():
        want = model({"image": x})
        # the checkpoint: its config lists the adapters, and they are loaded unmerged
        loaded = wt.load(tmp_path / "run" / "last")
        torch.testing.assert_close(loaded({"image": x}), want, atol=1e-6, rtol=0)
        assert json.loads((tmp_path / "run/last/config.json").read_text())["adapters"] == {
            "default": {
                "peft_type": "LORA", "r": 4, "target_modules": TARGETS, "lora_alpha": 16, "lora_dropout": 0.1
            }
        }  # fmt: skip
        # merged: a plain model without peft
        assert wt.merge_lora(loaded) is loaded
        assert list(loaded.state_dict()) == list(start.state_dict())
        torch.testing.assert_close(loaded({"image": x}), want, atol=1e-5, rtol=0)
        loaded.save(tmp_path / "merged")
        assert set(json.loads((tmp_path / "merged/config.json").read_text())) == {"class", "args"}
        torch.testing.assert_close(wt.load(tmp_path / "merged")({"image": x}), want, atol=1e-5, rtol=0)
    with pytest.raises(wt.InputError, match="no adapters of peft"):
        wt.merge_lora(loaded)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    full = adapted()
    run(full, tmp_path / "full", steps=8, every=4)
    interrupted = adapted()
    stop = StopAfter(interrupted, 5)
    with pytest.raises(KeyboardInterrupt):
        run(stop.model, tmp_path / "interrupted", steps=8, every=4)
    resumed = adapted()
    run(resumed, tmp_path / "interrupted", steps=8, every=4, resume=True)
    for a, b in zip(full.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


class StopAfter:
    """Raises in the loss after a number of steps, as if the run was killed."""

    def __init__(self, model: wt.Classifier, steps: int) -> None:
        self.model, self.left, self.loss = model, steps, model.loss
        model.loss = self

    def __call__(self, batch):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.loss(batch)


def test_get_peft_model_wraps_the_same_task():
    model = classifier()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    assert wrapped.get_base_model() is model and model.peft_config
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(wrapped({"image": x}), model({"image": x}))


def test_ema_weights_include_the_adapters(tmp_path):
    model = adapted()
    run(model, tmp_path / "run", steps=10, ema=0.9)
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
data: {train: IMAGES}
optim: {lr: 1e-2, ema: 0.9}
train: {steps: 3, batch_size: 16, out: OUT, device: cpu, tensorboard: false}
"""


def test_adapters_in_a_recipe(tmp_path):
    """A recipe builds the task; adapters are injected before training. A few steps on real images and text."""
    write_folder(wt.open_rows("emoji", split="train")[:40], tmp_path / "images")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("IMAGES", str(tmp_path / "images")).replace("OUT", str(tmp_path / "run")))
    recipe = Recipe.read(str(path))
    rows, _ = recipe.rows()
    task, augment = recipe.build(rows)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=r".*\.attn\.qkv"), task)
    before = {n: p.detach().clone() for n, p in task.named_parameters()}
    train(task, rows, train=recipe.train, optim=recipe.optim, augment=augment)
    # (the logit scale is clamped in place, not changed by the optimizer)
    changed = {n for n, p in task.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".lora_" in n for n in changed)
    last = wt.load(tmp_path / "run" / "last")
    want = task.embed("text", ["a cat"])
    torch.testing.assert_close(wt.merge_lora(last).embed("text", ["a cat"]), want, atol=1e-5, rtol=0)
