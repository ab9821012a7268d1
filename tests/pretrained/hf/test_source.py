"""from_hf: where a model comes from, and strict loading: each unknown setting, class or weight is an error that names it."""

from __future__ import annotations

import json
import sys

import huggingface_hub
import pytest
import torch
import transformers as hf
from torch import nn
from transformers.activations import ACT2FN

import worldtokens as wt
from worldtokens.backbone.config import ACTIVATIONS as OURS
from worldtokens.pretrained.hf import bert, clip, source, vit


def test_what_cannot_be_converted_is_an_error_that_names_it(wordpiece, make_bert, tmp_path):
    def refused(source, match, **more):
        with pytest.raises(wt.InputError, match=match):
            wt.from_hf(source, **more)

    theirs = make_bert(wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def with_config(match, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        refused(tmp_path, match)

    with_config("model_type 'deberta'; from_hf knows .*bert, clip.*vit", model_type="deberta")
    with_config(
        "position_embedding_type='relative_key' is not supported", position_embedding_type="relative_key"
    )
    with_config("is_decoder=True", is_decoder=True)
    with_config("add_cross_attention=True", add_cross_attention=True)
    with_config("pruned_heads", pruned_heads={"0": [1]})
    with_config("activation 'relu' is not supported; supported: gelu", hidden_act="relu")
    with_config(
        "BertForTokenClassification.*supported classes of its family: BertModel",
        architectures=["BertForTokenClassification"],
    )
    with_config("code of its own", auto_map={"AutoModel": "x.py"})
    with_config(r"is \(400, 48\), expected \(500, 48\)", vocab_size=500)
    with_config("300 token embeddings, but 400 tokens", vocab_size=300)
    with_config(r"missing \['trunk.blocks.2", num_hidden_layers=3)
    with_config("cannot map|does not fit", num_hidden_layers=1)
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "is not JSON")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "no config.json")
    refused(tmp_path / "model.safetensors", "weights alone")
    refused(nn.Linear(2, 2), "is not a model of transformers")
    extra = make_bert(wordpiece)
    extra.encoder.layer[1].adapter = nn.Linear(2, 2)
    refused(extra, r"encoder.layer.1.adapter.weight", tokenizer=wordpiece)
    refused(theirs, "no vocabulary at 'nowhere.json'", tokenizer="nowhere.json")


def test_an_unknown_published_name(monkeypatch):
    def absent(name, **more):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", absent)
    with pytest.raises(wt.InputError, match=r"no folder 'nobody/nothing', and the Hugging Face hub"):
        wt.from_hf("nobody/nothing")


def test_a_published_name_is_downloaded(monkeypatch, wordpiece, texts, make_bert, tmp_path):
    """Only what is needed: one copy of the weights, none for other frameworks."""
    theirs = make_bert(wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    request = {}

    def snapshot(name, **more):
        request.update(more, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["model.safetensors", "x.bin"])
    ours = wt.from_hf("somebody/something")
    assert torch.equal(ours.embed(texts), wt.from_hf(theirs, tokenizer=wordpiece).embed(texts))
    assert request["name"] == "somebody/something" and "onnx/*" in request["ignore_patterns"]
    assert "*.bin" not in request["allow_patterns"] and "*.safetensors" in request["allow_patterns"]


def test_a_folder_is_read_without_transformers(monkeypatch, wordpiece, texts, make_bert, tmp_path):
    theirs = make_bert(wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    want = wt.from_hf(theirs, tokenizer=wordpiece).embed(texts)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it raises
    assert torch.equal(wt.from_hf(tmp_path).embed(texts), want)


def test_two_files_that_disagree_on_case_are_an_error(wordpiece, make_bert, tmp_path):
    make_bert(wordpiece).save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"do_lower_case": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(wt.InputError, match=r"do_lower_case=False, tokenizer\.json lowercase=True"):
        wt.from_hf(tmp_path)
    assert wt.from_hf(tmp_path, tokenizer=wordpiece).embed(["a"]).shape == (1, 48)


def test_a_vocabulary_without_tokenizer_json_is_an_error(wordpiece, make_bert, tmp_path):
    make_bert(wordpiece).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(wt.InputError, match=r"vocabulary is vocab\.json.*AutoTokenizer"):
        wt.from_hf(tmp_path)


def test_activation_names_map_to_the_same_function():
    x = torch.linspace(-6, 6, 2001)
    for theirs, ours in source.ACTIVATIONS.items():
        assert (ACT2FN[theirs](x) - OURS[ours](x)).abs().max() < 1e-6, theirs


def test_defaults_of_a_config_are_those_of_transformers():
    """Configs are saved as differences from the defaults of their class."""
    classes = {
        "bert": hf.BertConfig,
        "roberta": hf.RobertaConfig,
        "xlm-roberta": hf.XLMRobertaConfig,
        "distilbert": hf.DistilBertConfig,
    }
    pairs = [(cls(), bert.DEFAULTS[kind]) for kind, cls in classes.items()]
    pairs += [(hf.ViTConfig(), vit.DEFAULTS)]
    towers = {
        ("clip", "text"): hf.CLIPTextConfig,
        ("clip", "image"): hf.CLIPVisionConfig,
        ("siglip", "text"): hf.SiglipTextConfig,
        ("siglip", "image"): hf.SiglipVisionConfig,
    }
    pairs += [(cls(), clip.DEFAULTS[kind]) for kind, cls in towers.items()]
    for theirs, ours in pairs:
        for key, value in ours.items():
            default = getattr(theirs, key, "absent")
            # SigLIP has no projection_dim, and its projection_size is as wide as its tokens
            if default != "absent" and key != "projection_size":
                assert default == value, (type(theirs).__name__, key)
