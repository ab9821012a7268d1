"""from_hf: parity with BERT, RoBERTa, XLM-R and DistilBERT of transformers, every parameter randomised.

Largest absolute differences in float32 (outputs of a few units): `pytest -s` prints them.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from torch import nn

import worldtokens as wt
from worldtokens.testing import randomised
from worldtokens.tokenizers.base import Batch

SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = 40


BERTS = {  # case: (class, its settings)
    "BERT, pooler": (hf.BertModel, {}),
    "BERT, no pooler": (hf.BertModel, {"add_pooling_layer": False}),
    "BERT, tanh GELU, eps 1e-5, four token types": (
        hf.BertModel,
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 4},
    ),
    "BERT, more embeddings than tokens": (hf.BertModel, {"vocab_size": 450}),
    "RoBERTa": (hf.RobertaModel, {"type_vocab_size": 1}),
    "XLM-R, two token types": (hf.XLMRobertaModel, {}),
    "DistilBERT": (hf.DistilBertModel, {}),
}


@pytest.mark.parametrize("what", BERTS)
def test_embeddings_match_within_1e_5(what, wordpiece, bytepairs, texts, make_bert, tmp_path):
    """Padded batches of real captions; one by one; from a folder; after save and load."""
    tokenizer = bytepairs if "Ro" in what or "XLM" in what else wordpiece
    theirs = make_bert(tokenizer, BERTS[what][0], **BERTS[what][1])
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, tokenizer=tokenizer)
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = theirs(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        tokens = ours(ours.tokenizer.collate([ours.tokenizer.read(t) for t in texts]))
    assert torch.equal(tokens.ids[mask], inputs["input_ids"][mask])  # the same ids, truncated alike
    assert torch.equal(tokens.valid, mask)
    worst = float((tokens.x - want.last_hidden_state)[mask].abs().max())
    pooled = getattr(want, "pooler_output", None)
    if pooled is None:
        m = mask[..., None].float()
        pooled = (want.last_hidden_state * m).sum(1) / m.sum(1)
    got = ours.embed(texts, batch_size=5)
    worst = max(worst, float((got - pooled).abs().max()))
    alone = torch.cat([ours.embed([t]) for t in texts])
    worst = max(worst, float((got - alone).abs().max()))
    print(f"\n{what:45} {worst:.1e} of {float(want.last_hidden_state.abs().max()):.1f}")
    assert worst < 1e-5 and float(pooled.abs().max()) > 0.5
    assert (got[0] - got[1]).abs().max() > 1e-3
    again = wt.load(ours.save(tmp_path / "ours"))
    assert torch.equal(again.embed(texts, batch_size=5), got)
    assert torch.equal(wt.from_hf(tmp_path / "theirs").embed(texts, batch_size=5), got)


@pytest.mark.parametrize("what", ["BERT, pooler", "RoBERTa", "BERT, tanh GELU, eps 1e-5, four token types"])
def test_text_pairs_match(what, wordpiece, bytepairs, captions, make_bert):
    tokenizer = bytepairs if what == "RoBERTa" else wordpiece
    theirs = make_bert(tokenizer, BERTS[what][0], **BERTS[what][1])
    ours = wt.from_hf(theirs, tokenizer=tokenizer)
    pairs = [("grinning face", "a cat"), ("a", captions[3]), ("word " * 30, "x"), ("word " * 30, "cat " * 50)]
    cut = {"padding": True, "truncation": True, "max_length": POSITIONS, "return_token_type_ids": True}
    inputs = dict(tokenizer(*map(list, zip(*pairs, strict=True)), return_tensors="pt", **cut))
    mask = inputs["attention_mask"].bool()
    batch = ours.tokenizer.collate([ours.tokenizer.read(p) for p in pairs])
    assert torch.equal(batch["ids"][mask], inputs["input_ids"][mask])
    if what == "RoBERTa":
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        want, got = theirs(**inputs).last_hidden_state, ours(batch)
        assert (want - got.x)[mask].abs().max() < 1e-5
        # given ids that are padded: the last end token ends a row
        assert torch.equal(ours(inputs["input_ids"]).valid, mask)
    with pytest.raises(wt.InputError, match="a tuple of two"):
        ours.tokenizer.read(("a", "b", "c"))


def test_a_live_model_without_vocabulary_takes_ids_as_text(wordpiece, make_bert, tmp_path):
    theirs = make_bert(wordpiece)
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


def test_a_head_is_dropped_only_with_ignore(wordpiece, texts, tmp_path):
    cfg = hf.BertConfig(**SIZE, vocab_size=len(wordpiece), max_position_embeddings=POSITIONS)
    theirs = randomised(hf.BertForMaskedLM(cfg))
    theirs.save_pretrained(tmp_path)
    wordpiece.save_pretrained(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(wt.InputError, match=r"cls\.predictions.*ignore=\['cls\*'\]"):
            wt.from_hf(source, tokenizer=wordpiece)
    ours = wt.from_hf(tmp_path, ignore=["cls.*"])
    inputs = wordpiece(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        want = theirs.bert(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    m = inputs["attention_mask"][..., None]
    assert (ours.embed(texts) - (want * m).sum(1) / m.sum(1)).abs().max() < 1e-5
    with pytest.raises(wt.InputError, match=r"'head\.x' matches no weight"):
        wt.from_hf(tmp_path, ignore=["cls.*", "head.x"])


def test_old_names_position_buffers_and_shards(wordpiece, texts, make_bert, tmp_path):
    """gamma and beta, a position_ids buffer, a class prefix, pytorch_model.bin in two shards, vocab.txt alone."""
    theirs = make_bert(wordpiece)
    weights = {}
    for key, value in theirs.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[f"bert.{key}"] = value.clone()
    weights["bert.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    names = sorted(weights)
    shards = {k: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, k in enumerate(names)}
    for shard in set(shards.values()):
        torch.save({k: weights[k] for k in names if shards[k] == shard}, tmp_path / shard)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    theirs.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocab = wordpiece.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    want = wt.from_hf(theirs, tokenizer=wordpiece).embed(texts)
    assert torch.equal(wt.from_hf(tmp_path).embed(texts), want)
    weights["bert.embeddings.position_ids"] = torch.arange(POSITIONS)[None] + 1
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(wt.InputError, match="position_ids"):
        wt.from_hf(tmp_path)


def test_eps_is_converted(wordpiece):
    """Tokens are as small as eps: another eps would change the output."""
    cfg = hf.BertConfig(**SIZE, vocab_size=400, max_position_embeddings=POSITIONS, layer_norm_eps=1e-3)
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


def test_control_tokens_spelled_in_a_text_stay_text(wordpiece, make_bert):
    ours = wt.from_hf(make_bert(wordpiece), tokenizer=wordpiece)
    ids = ours.tokenizer.read("a [SEP] b [CLS]")
    assert int((ids == wordpiece.sep_token_id).sum()) == 1 and ids[-1] == wordpiece.sep_token_id
    assert int((ids == wordpiece.cls_token_id).sum()) == 1


def test_gradients_match(wordpiece, texts, make_bert):
    theirs = make_bert(wordpiece)
    ours = wt.from_hf(theirs, tokenizer=wordpiece)
    inputs = wordpiece(texts, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt")
    theirs(inputs["input_ids"], inputs["attention_mask"]).pooler_output.square().sum().backward()
    ours.features(ours.tokenizer.batch(texts)).square().sum().backward()
    layer = theirs.encoder.layer[0]
    query = layer.attention.self.query.weight.grad
    pairs = [
        (theirs.embeddings.word_embeddings.weight.grad, ours.tokenizer.embedding.weight.grad),
        (theirs.embeddings.token_type_embeddings.weight.grad, ours.tokenizer.type_embedding.weight.grad),
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
@pytest.mark.parametrize("cls", [hf.BertModel, hf.RobertaModel, hf.DistilBertModel], ids=lambda c: c.__name__)
def test_published_sizes_within_1e_4(cls):
    """The published width and depth, every parameter random, a padded batch of ids."""
    theirs, g = cls(cls.config_class()).eval(), torch.Generator().manual_seed(0)
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
    print(f"\n{cls.__name__:30} {worst:.1e} of {float(want.abs().max()):.1f}")
    assert worst < 1e-4
