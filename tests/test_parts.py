"""Saving and loading: round trips, errors that name the cause, atomic writes, settings as plain values."""

from dataclasses import fields

import pytest
import torch

import worldtokens as wt
from worldtokens.testing import randomised


def test_save_and_load(tmp_path):
    torch.manual_seed(0)
    trunk = randomised(wt.Transformer.size("tiny", depth=2, norm="rms", config={"layer_scale": 1e-4}))
    trunk.save(tmp_path)
    again = wt.load(tmp_path)
    assert again.cfg == trunk.cfg
    t = wt.Tokens(torch.randn(2, 5, 192))
    assert torch.equal(again(t).x, trunk.eval()(t).x)
    assert not again.training


def test_load_raises_for_damaged_and_mixed_folders(tmp_path):
    wt.Transformer(32, 1, 4).save(tmp_path / "a")
    wt.Transformer(32, 2, 4).save(tmp_path / "b")
    with pytest.raises(wt.InputError, match="is not a saved model"):
        wt.load(tmp_path)
    (tmp_path / "a" / "config.json").write_bytes((tmp_path / "b" / "config.json").read_bytes())
    with pytest.raises(wt.InputError, match="not written by the same save"):
        wt.load(tmp_path / "a")
    weights = (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "b" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(wt.InputError, match="damaged"):
        wt.load(tmp_path / "b")


def test_a_config_may_only_name_parts(tmp_path):
    with pytest.raises(wt.InputError, match="not a worldtokens Part"):
        wt.build({"class": "subprocess.Popen", "args": {"args": ["true"]}})
    with pytest.raises(wt.InputError, match="cannot be imported"):
        wt.build({"class": "worldtokens.NoSuchThing", "args": {}})
    with pytest.raises(wt.InputError, match="dpeth"):
        wt.build({"class": "worldtokens.Transformer", "args": {"dim": 8, "depth": 1, "heads": 1, "dpeth": 1}})


def test_a_compiled_block_is_saved_under_plain_names(tmp_path):
    trunk = wt.Transformer(32, 1, 4)
    plain = set(trunk.state_dict())
    trunk.blocks[0] = torch.compile(trunk.blocks[0])
    assert any("_orig_mod" in k for k in trunk.state_dict())
    trunk.save(tmp_path)
    assert set(wt.load(tmp_path).state_dict()) == plain


def test_an_interrupted_save_keeps_the_previous_files(tmp_path, monkeypatch):
    trunk = wt.Transformer(32, 1, 4)
    trunk.save(tmp_path)
    before = trunk.state_dict()["blocks.0.attn.qkv.weight"].clone()
    randomised(trunk)
    from worldtokens import parts

    def killed(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        trunk.save(tmp_path)
    monkeypatch.undo()
    assert torch.equal(wt.load(tmp_path).state_dict()["blocks.0.attn.qkv.weight"], before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_settings_are_saved_whole(tmp_path):
    """A dataclass and a dict of its fields build the same module; defaults are written, so that a later default changes nothing."""
    config = wt.TransformerConfig(pre_norm=False, rope_scaling=(8.0, 1.0, 4.0, 64.0), eps=1e-5)
    plain = {"pre_norm": False, "rope_scaling": [8.0, 1.0, 4.0, 64.0]}
    trunk = wt.Transformer(32, 1, 4, rope=1, config=config)
    saved = trunk.config()["args"]["config"]
    assert saved.items() >= plain.items() and set(saved) == {f.name for f in fields(wt.TransformerConfig)}
    assert wt.Transformer(32, 1, 4).config()["args"]["config"]["eps"] == 1e-5
    assert wt.Transformer(32, 1, 4, rope=1, config=plain).config() == trunk.config()
    trunk.save(tmp_path)
    again = wt.load(tmp_path)
    assert again.cfg == trunk.cfg == wt.Transformer(32, 1, 4, rope=1, config=plain).cfg
    with pytest.raises(wt.InputError, match="config is a str, expected TransformerConfig"):
        wt.Transformer(32, 1, 4, config="pre_norm")
