"""from_hf: transformers' numbers from our parts, every parameter away from its start; vocabularies, preprocessing; strict.

Largest absolute differences in float32 (outputs of a few units): `pytest -s` prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image
from tokenizers import processors
from torch import nn
from transformers.activations import ACT2FN

import worldtokens as wt
from worldtokens.backbone.config import ACTIVATIONS as OURS
from worldtokens.data import samples
from worldtokens.pretrained import hf_bert, hf_clip, hf_source, hf_vit
from worldtokens.tokenizers import clip_text

HOPPER = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
ROWS = samples.open("emoji", split="validation", languages=("en", "fr", "ru", "ja"))[:40]
CAPTIONS = [c for r in ROWS for c in r["text"]]
EMOJI = [r["image"] for r in ROWS[:4]]
TEXTS = [*CAPTIONS[:9], "", "It's  a CAT, né? 1,234.5 <SEP>", "word " * 60]
SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = 40


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter away from its start: gains and biases too."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.15 * torch.randn(p.shape, generator=g) + (0.5 if p.ndim == 1 else 0.0))
    return model.eval()


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
    with pytest.raises(wt.InputError, match="'head.x' matches no weight"):
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
    """Its cut at 16 ids, its pooling, its map with tanh, unit length; the pooler, which it doesn't read, isn't taken."""
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
