"""from_hf: transformers' numbers from our parts, every parameter away from its start; vocabularies, preprocessing; strict.

Largest absolute differences in float32 (outputs of a few units): `pytest -s` prints them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from tokenizers import processors
from torch import nn
from transformers.activations import ACT2FN

import worldtokens as wt
from worldtokens.backbone.config import ACTIVATIONS as OURS
from worldtokens.data import samples
from worldtokens.pretrained.hf import bert as hf_bert
from worldtokens.pretrained.hf import clip as hf_clip
from worldtokens.pretrained.hf import source as hf_source
from worldtokens.pretrained.hf import vit as hf_vit
from worldtokens.testing import randomised
from worldtokens.tokenizers.base import Batch

ROWS = samples.open("emoji", split="validation", languages=("en", "fr", "ru", "ja"))[:40]
CAPTIONS = [c for r in ROWS for c in r["text"]]
TEXTS = [*CAPTIONS[:9], "", "It's  a CAT, né? 1,234.5 <SEP>", "word " * 60]
SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = 40


@pytest.fixture(scope="module")
def wordpiece() -> hf.PreTrainedTokenizerFast:
    made = tokenizers.BertWordPieceTokenizer(lowercase=True)
    made.train_from_iterator(CAPTIONS, vocab_size=400, min_frequency=1, show_progress=False)
    ids = {t: made.token_to_id(t) for t in ("[SEP]", "[CLS]")}
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    names = {f"{k}_token": f"[{k.upper()}]" for k in ("unk", "sep", "cls", "pad", "mask")}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, model_max_length=PLACES, **names)


@pytest.fixture(scope="module")
def bytepairs() -> hf.PreTrainedTokenizerFast:
    made = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(CAPTIONS, 500, 1, show_progress=False, special_tokens=specials)
    made._tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer,
        model_max_length=PLACES,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
    )


# ---- BERT's family -------------------------------------------------------------------------------------------

BERTS = {  # what it shows: (class, its settings)
    "BERT, pooler": (hf.BertModel, {}),
    "BERT, no pooler": (hf.BertModel, {"add_pooling_layer": False}),
    "BERT, tanh GELU, eps 1e-5, four parts": (
        hf.BertModel,
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 4},
    ),
    "BERT, more embeddings than words": (hf.BertModel, {"vocab_size": 450}),
    "RoBERTa": (hf.RobertaModel, {"type_vocab_size": 1}),
    "XLM-R, two parts": (hf.XLMRobertaModel, {}),
    "DistilBERT": (hf.DistilBertModel, {}),
}


def bert(what: str, vocabulary) -> nn.Module:
    made, options = BERTS[what]
    options = dict(options)
    inner = {k: options.pop(k) for k in ("add_pooling_layer",) if k in options}
    config = made.config_class
    if made is hf.DistilBertModel:
        size = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, "max_position_embeddings": PLACES}
    else:
        places = PLACES if made is hf.BertModel else PLACES + 2
        size = SIZE | {"max_position_embeddings": places}
    pad = vocabulary.pad_token_id
    cfg = config(**{**size, "vocab_size": len(vocabulary), "pad_token_id": pad, **options})
    return randomised(made(cfg, **inner))


@pytest.mark.parametrize("what", BERTS)
def test_texts_equal_berts_within_1e_5(what, wordpiece, bytepairs, tmp_path):
    """Padded batches of real captions; one by one; from a folder; after save and load."""
    words = bytepairs if "Ro" in what or "XLM" in what else wordpiece
    theirs = bert(what, words)
    theirs.save_pretrained(tmp_path / "theirs")
    words.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, tokenizer=words)
    inputs = words(TEXTS, padding=True, truncation=True, max_length=PLACES, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = theirs(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        tokens = ours(ours.tokenizer.collate([ours.tokenizer.read(t) for t in TEXTS]))
    assert torch.equal(tokens.ids[mask], inputs["input_ids"][mask])  # the very ids, cut alike
    assert torch.equal(tokens.valid, mask)
    worst = float((tokens.x - want.last_hidden_state)[mask].abs().max())
    pooled = getattr(want, "pooler_output", None)
    if pooled is None:
        m = mask[..., None].float()
        pooled = (want.last_hidden_state * m).sum(1) / m.sum(1)
    got = ours.embed(TEXTS, batch_size=5)
    worst = max(worst, float((got - pooled).abs().max()))
    alone = torch.cat([ours.embed([t]) for t in TEXTS])
    worst = max(worst, float((got - alone).abs().max()))
    print(f"\n{what:45} {worst:.1e} of {float(want.last_hidden_state.abs().max()):.1f}")
    assert worst < 1e-5 and float(pooled.abs().max()) > 0.5
    assert (got[0] - got[1]).abs().max() > 1e-3
    again = wt.load(ours.save(tmp_path / "ours"))
    assert torch.equal(again.embed(TEXTS, batch_size=5), got)
    assert torch.equal(wt.from_hf(tmp_path / "theirs").embed(TEXTS, batch_size=5), got)


@pytest.mark.parametrize("what", ["BERT, pooler", "RoBERTa", "BERT, tanh GELU, eps 1e-5, four parts"])
def test_two_texts_are_read_as_their_parts(what, wordpiece, bytepairs):
    words = bytepairs if what == "RoBERTa" else wordpiece
    theirs = bert(what, words)
    ours = wt.from_hf(theirs, tokenizer=words)
    pairs = [("grinning face", "a cat"), ("a", CAPTIONS[3]), ("word " * 30, "x"), ("word " * 30, "cat " * 50)]
    cut = {"padding": True, "truncation": True, "max_length": PLACES, "return_token_type_ids": True}
    inputs = dict(words(*map(list, zip(*pairs, strict=True)), return_tensors="pt", **cut))
    mask = inputs["attention_mask"].bool()
    batch = ours.tokenizer.collate([ours.tokenizer.read(p) for p in pairs])
    assert torch.equal(batch["ids"][mask], inputs["input_ids"][mask])
    if what == "RoBERTa":
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        want, got = theirs(**inputs).last_hidden_state, ours(batch)
        assert (want - got.x)[mask].abs().max() < 1e-5
        # ids made elsewhere, padded: the last end token ends a row
        assert torch.equal(ours(inputs["input_ids"]).valid, mask)
    with pytest.raises(wt.InputError, match="a tuple of two"):
        ours.tokenizer.read(("a", "b", "c"))


def test_a_live_model_without_vocabulary_reads_numbers(wordpiece, tmp_path):
    theirs = bert("BERT, pooler", wordpiece)
    ours = wt.from_hf(theirs)
    ids = torch.tensor([[2, 20, 30, 3], [2, 9, 8, 3]])
    with torch.no_grad():
        want = theirs(ids).pooler_output
    assert (ours.embed(["2 20 30 3", "2 9 8 3"]) - want).abs().max() < 1e-5
    assert (ours.embed(ids) - want).abs().max() < 1e-5
    padded = torch.tensor([[2, 20, 30, 3], [2, 3, 0, 0]])
    with torch.no_grad():
        want_padded = theirs(padded, attention_mask=(padded != 0).long()).pooler_output
    assert (ours.embed(padded) - want_padded).abs().max() < 1e-5
    assert (ours.embed(["2 20 30 3", "2 3"]) - want_padded).abs().max() < 1e-5
    with pytest.raises(wt.InputError, match="vocabulary"):
        ours.embed(["a cat"])
    assert torch.equal(wt.load(ours.save(tmp_path)).embed(ids), ours.embed(ids))


def test_a_head_is_left_out_only_where_asked(wordpiece, tmp_path):
    cfg = hf.BertConfig(**SIZE, vocab_size=len(wordpiece), max_position_embeddings=PLACES)
    theirs = randomised(hf.BertForMaskedLM(cfg))
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(wt.InputError, match=r"cls\.predictions.*ignore=\['cls\*'\]"):
            wt.from_hf(source, tokenizer=wordpiece)
    ours = wt.from_hf(tmp_path, ignore=["cls.*"])
    inputs = wordpiece(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        want = theirs.bert(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    m = inputs["attention_mask"][..., None]
    assert (ours.embed(TEXTS) - (want * m).sum(1) / m.sum(1)).abs().max() < 1e-5
    with pytest.raises(wt.InputError, match=r"'head\.x' matches no weight"):
        wt.from_hf(tmp_path, ignore=["cls.*", "head.x"])


def test_old_names_buffers_and_shards(wordpiece, tmp_path):
    """gamma and beta, a counting buffer, a class's prefix, pytorch_model.bin in two shards, vocab.txt alone."""
    theirs = bert("BERT, pooler", wordpiece)
    weights = {}
    for key, value in theirs.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[f"bert.{key}"] = value.clone()
    weights["bert.embeddings.position_ids"] = torch.arange(PLACES)[None]
    names = sorted(weights)
    placed = {k: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, k in enumerate(names)}
    for shard in set(placed.values()):
        torch.save({k: weights[k] for k in names if placed[k] == shard}, tmp_path / shard)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    theirs.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocab = wordpiece.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    want = wt.from_hf(theirs, tokenizer=wordpiece).embed(TEXTS)
    assert torch.equal(wt.from_hf(tmp_path).embed(TEXTS), want)
    weights["bert.embeddings.position_ids"] = torch.arange(PLACES)[None] + 1
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(wt.InputError, match="position_ids"):
        wt.from_hf(tmp_path)


# ---- sentence-transformers' folders --------------------------------------------------------------------------


def sentence_folder(
    folder: Path, theirs: nn.Module, words, modules: list[str], mode: str = "mean_tokens"
) -> Path:
    theirs.save_pretrained(folder)
    words.save_pretrained(folder)
    paths = {
        "Transformer": "",
        "Pooling": "1_Pooling",
        "Dense": "2_Dense",
        "Normalize": f"{len(modules) - 1}_Normalize",
    }
    listed = [
        {"idx": i, "name": str(i), "path": paths[m], "type": f"sentence_transformers.models.{m}"}
        for i, m in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens"), False)
    modes = {f"pooling_mode_{k}": v for k, v in (modes | {mode: True}).items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 16, "do_lower_case": False})
    )
    return folder


def test_a_sentence_transformers_folder_is_followed(wordpiece, tmp_path):
    """Its cut at 16 ids, its pooling, its map with tanh, unit length; the pooler, which it does not read, is not taken."""
    theirs = bert("BERT, pooler", wordpiece)
    steps = ["Transformer", "Pooling", "Dense", "Normalize"]
    folder = sentence_folder(tmp_path / "a", theirs, wordpiece, steps, "mean_tokens")
    (folder / "2_Dense").mkdir()
    dense = randomised(nn.Linear(48, 24))
    torch.save(
        {f"linear.{k}": v for k, v in dense.state_dict().items()}, folder / "2_Dense/pytorch_model.bin"
    )
    said = {"in_features": 48, "out_features": 24, "bias": True}
    said["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense/config.json").write_text(json.dumps(said))
    ours = wt.from_hf(folder)
    inputs = wordpiece(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    m = inputs["attention_mask"][..., None]
    with torch.no_grad():
        hidden = theirs(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        want = F.normalize(dense((hidden * m).sum(1) / m.sum(1)).tanh(), dim=-1)
    assert ours.dim == 24 and (ours.embed(TEXTS) - want).abs().max() < 1e-5
    assert torch.equal(wt.load(ours.save(tmp_path / "b")).embed(TEXTS), ours.embed(TEXTS))
    first = wt.from_hf(sentence_folder(tmp_path / "c", theirs, wordpiece, steps[:2], "cls_token"))
    assert (first.embed(TEXTS) - hidden[:, 0]).abs().max() < 1e-5
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../a/1_Pooling"
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(wt.InputError, match="a folder inside"):
        wt.from_hf(folder)
    for i, (change, match) in enumerate(
        (
            (["Transformer", "Pooling", "LayerNorm"], "modules.json lists"),
            ("max_tokens", "pooling_mode_max_tokens"),
        )
    ):
        args = (change, "mean_tokens") if isinstance(change, list) else (steps[:2], change)
        with pytest.raises(wt.InputError, match=match):
            wrong = tmp_path / f"w{i}"
            if isinstance(change, list):
                sentence_folder(wrong, theirs, wordpiece, steps[:2])
                listed = [{"path": "1_Pooling", "type": f"x.{k}"} for k in change]
                (wrong / "modules.json").write_text(json.dumps(listed))
            else:
                sentence_folder(wrong, theirs, wordpiece, *args)
            wt.from_hf(wrong)


# ---- strict --------------------------------------------------------------------------------------------------


def test_what_cannot_be_carried_is_an_error_that_names_it(wordpiece, tmp_path):
    def refused(source, match, **more):
        with pytest.raises(wt.InputError, match=match):
            wt.from_hf(source, **more)

    theirs = bert("BERT, pooler", wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())

    def told(match, **changes):
        (tmp_path / "config.json").write_text(json.dumps(written | changes))
        refused(tmp_path, match)

    told("model_type 'deberta'; from_hf knows .*bert, clip.*vit", model_type="deberta")
    told("position_embedding_type='relative_key' isn't supported", position_embedding_type="relative_key")
    told("is_decoder=True", is_decoder=True)
    told("add_cross_attention=True", add_cross_attention=True)
    told("pruned_heads", pruned_heads={"0": [1]})
    told("activation 'relu' isn't supported; these are: gelu", hidden_act="relu")
    told(
        "BertForTokenClassification.*of its family these are: BertModel",
        architectures=["BertForTokenClassification"],
    )
    told("code of its own", auto_map={"AutoModel": "x.py"})
    told(r"is \(400, 48\), expected \(500, 48\)", vocab_size=500)
    told("300 token embeddings, but 400 tokens", vocab_size=300)
    told(r"missing \['trunk.blocks.2", num_hidden_layers=3)
    told("no place for|doesn't fit", num_hidden_layers=1)
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "isn't JSON")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "no config.json")
    refused(tmp_path / "model.safetensors", "weights alone")
    refused(nn.Linear(2, 2), "isn't a model of transformers")
    extra = bert("BERT, pooler", wordpiece)
    extra.encoder.layer[1].adapter = nn.Linear(2, 2)
    refused(extra, r"encoder.layer.1.adapter.weight", tokenizer=wordpiece)
    refused(theirs, "no vocabulary at 'nowhere.json'", tokenizer="nowhere.json")


def test_a_name_that_nobody_gives(monkeypatch):
    import huggingface_hub

    def absent(name, **more):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", absent)
    with pytest.raises(wt.InputError, match=r"no folder 'nobody/nothing', and the Hugging Face hub"):
        wt.from_hf("nobody/nothing")


def test_a_published_name_is_fetched_and_read(monkeypatch, wordpiece, tmp_path):
    """Only what is needed: no second copy of the weights, none for other programs."""
    import huggingface_hub

    theirs = bert("BERT, pooler", wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    asked = {}

    def snapshot(name, **more):
        asked.update(more, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["model.safetensors", "x.bin"])
    ours = wt.from_hf("somebody/something")
    assert torch.equal(ours.embed(TEXTS), wt.from_hf(theirs, tokenizer=wordpiece).embed(TEXTS))
    assert asked["name"] == "somebody/something" and "onnx/*" in asked["ignore_patterns"]
    assert "*.bin" not in asked["allow_patterns"] and "*.safetensors" in asked["allow_patterns"]


def test_a_folder_is_read_without_transformers(monkeypatch, wordpiece, tmp_path):
    theirs = bert("BERT, pooler", wordpiece)
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    want = wt.from_hf(theirs, tokenizer=wordpiece).embed(TEXTS)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it raises
    assert torch.equal(wt.from_hf(tmp_path).embed(TEXTS), want)


def test_two_files_that_disagree_on_case_are_an_error(wordpiece, tmp_path):
    bert("BERT, pooler", wordpiece).save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"do_lower_case": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(wt.InputError, match=r"do_lower_case=False, tokenizer\.json lowercase=True"):
        wt.from_hf(tmp_path)
    assert wt.from_hf(tmp_path, tokenizer=wordpiece).embed(["a"]).shape == (1, 48)


def test_a_vocabulary_in_an_old_form_is_never_overlooked(wordpiece, tmp_path):
    bert("BERT, pooler", wordpiece).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(wt.InputError, match=r"vocabulary is vocab\.json.*AutoTokenizer"):
        wt.from_hf(tmp_path)


def test_every_activation_is_the_function_that_its_name_means():
    x = torch.linspace(-6, 6, 2001)
    for theirs, ours in hf_source.ACTIVATIONS.items():
        assert (ACT2FN[theirs](x) - OURS[ours](x)).abs().max() < 1e-6, theirs


def test_what_a_short_config_leaves_out_is_what_transformers_takes():
    """Configs are saved as differences from the class's own; ours must fill in the same."""
    classes = {
        "bert": hf.BertConfig,
        "roberta": hf.RobertaConfig,
        "xlm-roberta": hf.XLMRobertaConfig,
        "distilbert": hf.DistilBertConfig,
    }
    pairs = [(made(), hf_bert.DEFAULTS[kind]) for kind, made in classes.items()]
    pairs += [(hf.ViTConfig(), hf_vit.DEFAULTS)]
    towers = {
        ("clip", "text"): hf.CLIPTextConfig,
        ("clip", "image"): hf.CLIPVisionConfig,
        ("siglip", "text"): hf.SiglipTextConfig,
        ("siglip", "image"): hf.SiglipVisionConfig,
    }
    pairs += [(made(), hf_clip.DEFAULTS[kind]) for kind, made in towers.items()]
    for theirs, ours in pairs:
        for key, value in ours.items():
            said = getattr(theirs, key, "absent")
            # SigLIP has no projection_dim, and its projection_size is as wide as its tokens
            if said != "absent" and key != "projection_size":
                assert said == value, (type(theirs).__name__, key)


def test_eps_is_carried(wordpiece):
    """Tokens as small as eps itself: another eps would show."""
    cfg = hf.BertConfig(**SIZE, vocab_size=400, max_position_embeddings=PLACES, layer_norm_eps=1e-3)
    theirs = randomised(hf.BertModel(cfg))
    with torch.no_grad():
        for p in theirs.embeddings.parameters():
            p.mul_(0.1 if p.ndim > 1 else 1.0)
    ours = wt.from_hf(theirs, tokenizer=wordpiece)
    ids = torch.tensor([[2, 20, 30, 3]])
    with torch.no_grad():
        want = theirs(ids).last_hidden_state
        assert (ours(ids).x - want).abs().max() < 1e-5
        for m in ours.modules():
            if isinstance(m, nn.LayerNorm):
                m.eps = 1e-12
        assert (ours(ids).x - want).abs().max() > 1e-3


def test_typed_control_tokens_stay_text(wordpiece):
    ours = wt.from_hf(bert("BERT, pooler", wordpiece), tokenizer=wordpiece)
    ids = ours.tokenizer.read("a [SEP] b [CLS]")
    assert int((ids == wordpiece.sep_token_id).sum()) == 1 and ids[-1] == wordpiece.sep_token_id
    assert int((ids == wordpiece.cls_token_id).sum()) == 1


def test_training_a_converted_model_moves_it_as_theirs(wordpiece):
    theirs = bert("BERT, pooler", wordpiece)
    ours = wt.from_hf(theirs, tokenizer=wordpiece)
    inputs = wordpiece(TEXTS, padding=True, truncation=True, max_length=PLACES, return_tensors="pt")
    theirs(inputs["input_ids"], inputs["attention_mask"]).pooler_output.square().sum().backward()
    ours.features(ours.tokenizer.batch(TEXTS)).square().sum().backward()
    layer = theirs.encoder.layer[0]
    query = layer.attention.self.query.weight.grad
    pairs = [
        (theirs.embeddings.word_embeddings.weight.grad, ours.tokenizer.embedding.weight.grad),
        (theirs.embeddings.token_type_embeddings.weight.grad, ours.tokenizer.types.weight.grad),
        (query, ours.trunk.blocks[0].attn.qkv.weight.grad[: len(query)]),
        (layer.output.LayerNorm.weight.grad, ours.trunk.blocks[0].norm2.weight.grad),
        (theirs.pooler.dense.weight.grad, ours.head.weight.grad),
    ]
    pad = wordpiece.pad_token_id
    for i, (a, b) in enumerate(pairs):
        a = a.index_fill(0, torch.tensor([pad]), 0) if i == 0 else a
        assert (a - b).abs().max() < 1e-5 * max(1.0, float(a.abs().max()))
        assert float(a.abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", [hf.BertModel, hf.RobertaModel, hf.DistilBertModel], ids=lambda m: m.__name__
)
def test_published_sizes_within_1e_4(made):
    """As wide and deep as published, every parameter random, a padded batch of ids."""
    theirs, g = made(made.config_class()).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(p.shape[-1] ** -0.5 * noise) if p.ndim > 1 else p.copy_(p.clamp(min=0.2) + 0.1 * noise)
    ours = wt.from_hf(theirs)
    ids = torch.randint(5, 30000, (3, 200), generator=g)
    lengths = (200, 57, 3)
    mask = torch.arange(200) < torch.tensor(lengths)[:, None]
    ids = ids.masked_fill(~mask, theirs.config.pad_token_id)
    with torch.no_grad():
        want = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        got = ours(Batch(ids=ids, lengths=lengths)).x
    worst = float((want - got)[mask].abs().max())
    print(f"\n{made.__name__:30} {worst:.1e} of {float(want.abs().max()):.1f}")
    assert worst < 1e-4


# ---- real weights --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        return wt.weights("minilm")
    except wt.InputError as e:
        pytest.skip(f"all-MiniLM-L6-v2 can't be fetched: {e}")


@pytest.mark.slow
def test_minilms_embeddings_equal_transformers(minilm, tmp_path):
    """all-MiniLM-L6-v2 as sentence-transformers runs it: mean of tokens, unit length, cut at 256 ids."""
    texts = [
        *CAPTIONS[:60],
        "",
        "word " * 300,
        "naïve café — 東京 🙂",
        "[MASK] is <b>bold</b>".replace("[MASK]", "it"),
    ]
    ours = wt.from_hf(minilm)
    assert (ours.tokenizer.context, ours.pool, ours.normalize, ours.dim) == (256, "mean", True, 384)
    words, theirs = hf.AutoTokenizer.from_pretrained(minilm), hf.AutoModel.from_pretrained(minilm).eval()
    want = []
    for i in range(0, len(texts), 16):
        inputs = words(texts[i : i + 16], padding=True, truncation=True, max_length=256, return_tensors="pt")
        m = inputs["attention_mask"][..., None]
        with torch.no_grad():
            hidden = theirs(**inputs).last_hidden_state
        want.append(F.normalize((hidden * m).sum(1) / m.sum(1), dim=-1))
    want, got = torch.cat(want), ours.embed(texts)
    print(f"\nall-MiniLM-L6-v2 {float((want - got).abs().max()):.1e}")
    assert (want - got).abs().max() < 2e-6
    live = wt.from_hf(theirs, tokenizer=words)  # found by name_or_path, pooling included
    assert torch.equal(live.embed(texts), got)
    assert torch.equal(wt.load(ours.save(tmp_path)).embed(texts), got)


def bag_of_words(documents: list[str], queries: list[str]) -> torch.Tensor:
    """Cosines of words weighted by rarity (tf-idf): (Q, D)."""
    cut = [Counter(re.findall(r"\w+", t.lower())) for t in documents + queries]
    seen = Counter(w for d in cut[: len(documents)] for w in d)
    place = {w: i for i, w in enumerate(seen)}
    x = torch.zeros(len(cut), len(place))
    for row, words in zip(x, cut, strict=True):
        for w, n in words.items():
            if w in place:
                row[place[w]] = n * math.log(len(documents) / seen[w])
    x = F.normalize(x, dim=1)
    return x[len(documents) :] @ x[: len(documents)].T


def found(scores: torch.Tensor, k: int = 10) -> float:
    """Share of queries whose own document is among the first k; ties count half."""
    own = scores.diag()[:, None]
    rank = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return float((rank < k).float().mean())


@pytest.mark.slow
def test_minilm_finds_emoji_by_what_is_said_of_them(minilm):
    """1,735 emoji, each sought by its keywords (also those that its name says) among all names."""
    rows = [r for r in samples.open("emoji", skin_tones=False) if len(r["text"]) == 3]
    names, keywords = [r["text"][0] for r in rows], [", ".join(r["tags"]) for r in rows]
    unsaid = [r["text"][2] for r in rows]  # only those that it does not say
    model = wt.from_hf(minilm)
    documents = model.embed(names)
    for what, queries, least in (("keywords", keywords, 1.15), ("unsaid keywords", unsaid, 20.0)):
        ours, words = found(model.embed(queries) @ documents.T), found(bag_of_words(names, queries))
        print(f"\n{what}: among the first ten of {len(rows)}: {ours:.3f}, bag of words {words:.3f}")
        assert ours > 0.4 and ours > least * words
    asked = {"a place where sick people are treated": "hospital", "you cut paper with it": "scissors"}
    order = model.rank(list(asked), documents).order
    for row, name in zip(order.tolist(), asked.values(), strict=True):
        assert name in [names[i] for i in row[:3]]
