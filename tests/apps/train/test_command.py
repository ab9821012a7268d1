"""The command `worldtokens train`: its help, --print_config, a run and its resume."""

from __future__ import annotations

import json
import re

import pytest
import yaml

import worldtokens as wt
from worldtokens.apps.train.command import main
from worldtokens.data.manifests import open_rows, write_folder
from worldtokens.errors import InputError
from worldtokens.training.recipe import Recipe, shipped_recipes


def test_help_fits_on_a_screen_with_an_example_per_need(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert all(name in out for name in shipped_recipes())
    for example in (
        r"worldtokens train clip_emoji +a shipped recipe",
        r"worldtokens train clip_emoji --help",
        r"--data\.train my/images .*--train\.out",
        r"--optim\.lr \S+",
        r"--resume +continue",
        r"--print_config > mine\.yaml",
        r"worldtokens train mine\.yaml",
        r"torchrun --nproc-per-node 2 -m worldtokens train",
    ):
        assert re.search(example, out), example
    assert main([]) == 0 and capsys.readouterr().out == out


@pytest.mark.parametrize("name", shipped_recipes())
def test_help_of_a_recipe_shows_its_values_and_their_meaning(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120
    recipe = Recipe.read(name)
    assert f"  model = {recipe.given['model']['class'].removeprefix('worldtokens.')}\n" in out
    assert f"  optim.lr = {recipe.optim.lr}" in out and f"  train.steps = {recipe.train.steps}" in out
    for section in ("optim", "train"):  # every setting has a line with its meaning
        for key in recipe.values[section]:
            assert re.search(rf"(?m)^  {section}\.{key} = \S.*  \S+ \S+", out), key
    assert recipe.given["data"]["train"]["source"] in out


def test_help_of_a_recipe_shows_overrides_and_the_header(capsys):
    assert main(["clip_emoji", "--optim.lr", "5e-4", "--model.trunk.depth", "7", "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"optim\.lr = 0\.0005 +peak learning rate", out)
    assert re.search(r"model\.trunk = Transformer\(dim=192, depth=7, heads=3, drop_path=0\.1\)", out)
    assert "model.dim = 256" in out and "data.augment.image.0 = torchvision" in out
    assert "emoji" in out.splitlines()[2]


def test_print_config_prints_an_equivalent_recipe(capsys, tmp_path):
    assert main(["clip_emoji", "--print_config", "--optim.lr", "2e-3"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(text)
    a, b = Recipe.read("clip_emoji", ["--optim.lr=2e-3"]), Recipe.read(str(tmp_path / "again.yaml"))
    assert a.values == b.values and a.optim == b.optim and a.train == b.train and a.optim.lr == 0.002
    complete = yaml.safe_load(text)
    assert complete["model"]["args"]["trunk"]["args"]["norm"] == "layer"  # defaults are included
    text_tokenizer = complete["model"]["args"]["tokenizers"]["text"]["args"]["tokenizer"]
    assert text_tokenizer["args"]["vocabulary"] == {"train": 2000}
    assert complete["data"]["validation"]["source"] == complete["data"]["train"]["source"]
    assert "class_path" not in text
    task, augment = b.build(b.rows()[0])
    assert task.tokenizers["text"].tokenizer.vocab_size <= 2000 and len(augment["image"].transforms) == 1


def test_a_run_on_own_files_saves_models_and_resumes(tmp_path, capsys):
    """6 steps on a folder of captioned images, then on to 9 from the saved run."""
    write_folder(open_rows("emoji", split="train")[:80], tmp_path / "images")
    out = tmp_path / "out"
    argv = ["clip_emoji", "--data.train", str(tmp_path / "images"), "--data.validation.split", "validation"]
    argv += [
        "--data.validation.source",
        str(tmp_path / "images"),
        "--train.out",
        str(out),
        "--train.device",
        "cpu",
    ]
    argv += ["--train.tensorboard", "false", "--train.batch_size", "16", "--train.eval_every", "3"]
    argv += ["--model.trunk.depth", "1", "--model.dim", "32"]
    assert main([*argv, "--train.steps", "6"]) == 0
    printed = capsys.readouterr().out
    assert f"checkpoints: {out / 'last'}, {out / 'best'} (step " in printed
    assert wt.load(out / "last").embed("text", ["a red heart"]).shape == (1, 32)
    assert wt.load(out / "best").evaluate(open_rows("emoji", split="validation")[:9])
    assert (
        Recipe.read(str(out / "recipe.yaml")).values
        == Recipe.read(argv[0], [*argv[1:], "--train.steps", "6"]).values
    )
    with pytest.raises(InputError, match="already holds a run"):
        main([*argv, "--train.steps", "6"])
    state = json.loads((out / "last" / "state.json").read_text())
    assert main([*argv, "--resume", "--train.steps", "9"]) == 0
    assert state["step"] == 6
    assert json.loads((out / "last" / "state.json").read_text())["step"] == 9


def test_the_recipe_comes_first():
    with pytest.raises(InputError, match="the recipe comes first"):
        main(["--optim.lr", "1"])
