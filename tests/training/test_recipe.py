"""Recipes: reading, checking, overrides, building, several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from worldtokens.data.manifests import open_rows, write_folder
from worldtokens.errors import InputError
from worldtokens.training import recipe as recipes
from worldtokens.training.recipe import Recipe

SMALL = """
model:
  class: worldtokens.CLIP
  args:
    tokenizers:
      image: {class: worldtokens.ImageTokenizer, args: {dim: 32, patch: 16, size: 64}}
      text: {class: worldtokens.TextTokenizer, args: {vocabulary: {train: 400}, dim: 32, context: 48}}
    trunk: {class: worldtokens.Transformer, args: {dim: 32, depth: 1, heads: 2}}
    dim: 32
data:
  train: IMAGES
  validation: {split: validation}
  augment:
    image:
      - {class: torchvision.transforms.v2.RandomResizedCrop, args: {size: 64, scale: [0.6, 1.0]}}
      - {class: torchvision.transforms.v2.RandomHorizontalFlip}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 6, batch_size: 16, eval_every: 3, out: OUT, device: cpu, tensorboard: false, cache_mb: 16}
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """80 emoji with captions, as a user's own folder."""
    folder = tmp_path_factory.mktemp("images")
    write_folder(open_rows("emoji", split="train")[:80], folder)
    return folder


@pytest.fixture
def small(tmp_path, images):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("IMAGES", str(images)).replace("OUT", str(tmp_path / "out")))
    return path


@pytest.mark.parametrize("name", recipes.shipped_recipes())
def test_shipped_recipes_open_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.read(name)
    assert recipe.path.is_file()
    (tmp_path / "again.yaml").write_text(str(recipe))
    assert Recipe.read("again.yaml").values == recipe.values


def test_any_value_can_be_changed_by_its_path(small):
    r = Recipe.read(
        str(small),
        [
            "--model.dim", "64",
            "--model.args.loss", "siglip",
            "--model.tokenizers.image.patch=8",
            "--model.args.trunk.args.depth", "2",
            "--data.augment.image.0.scale", "[0.9, 1.0]",
            "--data.train.on_error", "skip",
            "--optim.betas", "[0.8, 0.9]",
            "--train.overwrite",
            "--train.epochs", "2", "--train.steps", "null",
        ],
    )  # fmt: skip
    args = r.values["model"]["args"]
    assert args["dim"] == 64 and args["loss"] == "siglip" and args["trunk"]["args"]["depth"] == 2
    assert args["tokenizers"]["image"]["args"]["patch"] == 8
    assert r.values["data"]["augment"]["image"][0]["args"]["scale"] == [0.9, 1.0]
    assert r.values["data"]["train"]["on_error"] == "skip"
    assert r.optim.betas == (0.8, 0.9) and r.train.overwrite and r.train.epochs == 2 and r.train.steps is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--optim.lrr", "1"], "lrr"),
        (["--model.tokenizers.image.patsch", "4"], "patsch"),
        (["--model.trunk.depth", "deep"], "depth.*int.*deep"),
        (["--data.train.colums", "{}"], "colums"),
        (["--data.train.colums", "{a: b}"], "colums"),
        (["--data.argument", "{}"], "data.argument"),
        (["--data.augment.image.0.syze", "4"], "syze"),
        (["--data.augment.image.7.size", "4"], "expected an index below 2"),
        (["--model.class", "worldtokens.CLAP"], "CLAP"),
        (["--model.class", "worldtokens.Transformer"], "Transformer"),
        (["--tran.steps", "4"], "tran.*model, data, optim, train"),
        (["--train.steps", "1", "--train.epochs", "1"], "found both"),
        (["--train.workers", "-1"], "workers is -1"),
        (["steps"], "found 'steps' on the command line"),
        (["--train.steps", "[1"], "not valid YAML"),
    ],
)
def test_invalid_overrides_raise_errors_that_name_them(small, change, message):
    with pytest.raises(InputError, match=message):
        Recipe.read(str(small), change)


def test_invalid_files_raise(tmp_path):
    path = tmp_path / "x.yaml"
    for text, message in (
        ("optim: {lr: 1}\noptim: {lr: 2}", "'optim' is given twice"),
        ("just words", "is not a recipe"),
        ("model: {class: worldtokens.CLIP}\ndata: {}", r"data.train is missing"),
        ("model: {}\ndata: {train: emoji}\nextra: 1", "unknown section.*extra"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            Recipe.read(str(path))
    with pytest.raises(InputError, match=r"no such file, and no shipped recipe of that name \(.*clip_emoji"):
        Recipe.read("clip_picture")


def test_a_saved_models_config_is_a_valid_model_section(small, tmp_path):
    """The content of config.json under `model:`, with its vocabulary file beside the recipe."""
    r = Recipe.read(str(small))
    task, _ = r.build(r.rows()[0])
    task.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    again = tmp_path / "saved" / "again.yaml"
    again.write_text(yaml.safe_dump({**r.values, "model": config}))
    r2 = Recipe.read(str(again))
    task2, _ = r2.build(r2.rows()[0])
    assert task2.config() == task.config()
    a, b = task.state_dict(), task2.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)  # the same seed gives the same initial weights


# ---- several processes -----------------------------------------------------------------------------------


def run_processes(args, ranks, cwd):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = []
    for rank in range(ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "worldtokens", "train", *args]
        jobs.append(subprocess.Popen(command, env=env, cwd=cwd, stdout=-1, stderr=-2, text=True))
    outs = [j.communicate(timeout=240)[0] for j in jobs]
    assert all(j.returncode == 0 for j in jobs), "\n".join(outs)
    return outs


def compared(tmp_path, common, start):
    """Train on one and on two processes: (largest difference between weights, largest change of a weight)."""
    one = run_processes([*common, "--train.out", str(tmp_path / "one")], 1, tmp_path)
    two = run_processes([*common, "--train.out", str(tmp_path / "two")], 2, tmp_path)
    assert "trained 6 steps" in one[0] and "trained 6 steps" in two[0] and "samples/s" not in two[1]
    a, b = (load_file(tmp_path / n / "last" / "model.safetensors") for n in ("one", "two"))
    moved = max(float((a[k] - v).abs().max()) for k, v in start.items())
    worst = max(float((a[k] - b[k]).abs().max()) for k in a)
    print(f"largest difference {worst:.2e}, moved {moved:.2e}")
    return worst, moved


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_train_clip_like_one(small, tmp_path, accumulation):
    """Every process sees all negatives; the weights are equal up to the order of sums."""
    common = [
        str(small),
        "--data.validation",
        "null",
        "--train.gradient_accumulation_steps",
        str(accumulation),
    ]
    # with the default eps AdamW turns rounding errors into full steps where a gradient is 0, as for a key's bias
    common += ["--optim.eps", "1e-3", "--optim.lr", "0.01"]
    r = Recipe.read(str(small), common[1:])
    worst, moved = compared(tmp_path, common, r.build(r.rows()[0])[0].state_dict())
    assert moved > 2e-3 and worst < 1e-5, (worst, moved)


TOY = """
import torch
from torch import nn
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch, Tokenizer

class Number(Tokenizer):
    modality = "number"
    def __init__(self, frozen: bool = False):
        super().__init__()
        self.scale = nn.Linear(1, 3).requires_grad_(not frozen)
    def read(self, source):
        return torch.tensor([float(source)])
    def collate(self, raws):
        return Batch(x=torch.stack(raws))

class Toy(Task):
    def __init__(self, tokenizers: dict[str, Number]):
        super().__init__()
        self.tokenizers = nn.ModuleDict(tokenizers)
        self.head = nn.Linear(3, 1)
        self.never_used = nn.Linear(2, 2)
    def loss(self, batch):
        # the sum over the columns of each row; a missing column counts 0
        total = 0.0
        for name, front in self.tokenizers.items():
            if name in batch:
                x = batch[name]["x"]
                total = total + (self.head(torch.tanh(front.scale(x))) - x * x).square().sum()
        return {"loss": total / batch["weight"]}
"""


@pytest.mark.slow
def test_two_processes_with_a_frozen_tower_and_batches_without_a_column(tmp_path):
    """One row in eight has column `views`: most micro-batches lack it on one process or on both."""
    (tmp_path / "toy_task.py").write_text(TOY)
    rows = [{"series": i / 40, **({"views": -i / 40} if i % 8 == 0 else {})} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(f"""
model:
  class: toy_task.Toy
  args:
    tokenizers:
      series: {{class: toy_task.Number, args: {{frozen: true}}}}
      views: {{class: toy_task.Number}}
data: {{train: {tmp_path / "rows.jsonl"}}}
optim: {{lr: 0.05, warmup: 0}}
train: {{steps: 6, batch_size: 4, gradient_accumulation_steps: 2, device: cpu, tensorboard: false}}
""")
    sys.path.insert(0, str(tmp_path))
    try:
        r = Recipe.read(str(recipe))
        start = r.build(r.rows()[0])[0].state_dict()
    finally:
        sys.path.remove(str(tmp_path))
    worst, moved = compared(tmp_path, [str(recipe)], start)
    assert moved > 0.05 and worst < 1e-5, (worst, moved)
    after = load_file(tmp_path / "two" / "last" / "model.safetensors")
    for name in ("tokenizers.series.scale.weight", "never_used.weight"):
        assert torch.equal(after[name], start[name])
    assert not torch.equal(after["tokenizers.views.scale.weight"], start["tokenizers.views.scale.weight"])


def test_an_evaluation_resumes_only_its_own_training(small, monkeypatch):
    """A stopped training is resumed and its time added; a finished one is loaded; another recipe trains anew."""
    from worldtokens.evals import training as evaluation

    def recipe(*words):
        return Recipe.read(str(small), ["--train.overwrite", "--train.eval_every", "null", *words])

    seen = []

    def stopping(*args, train, **kwargs):
        seen.append(train.resume)
        report = real(*args, train=train, **kwargs)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return report

    real = evaluation.train
    monkeypatch.setattr(evaluation, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluation.trained(recipe())
    first, minutes = evaluation.trained(recipe())
    again, same = evaluation.trained(recipe())
    assert seen == [False, True] and same == minutes > 0
    for name, value in first.state_dict().items():
        assert torch.equal(value.cpu(), again.state_dict()[name]), name
    other, _ = evaluation.trained(recipe("--train.seed", "1"))
    assert seen == [False, True, False]
    assert any(not torch.equal(v, first.state_dict()[n]) for n, v in other.state_dict().items())
