"""from_hf: sentence-transformers folders, from their pooling to the real all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import randomised


def sentence_folder(
    folder: Path, theirs: nn.Module, tokenizer, modules: list[str], mode: str = "mean_tokens"
) -> Path:
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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


def test_a_folder_with_pooling_projection_and_normalisation_matches(wordpiece, texts, make_bert, tmp_path):
    """Truncated at 16 ids, pooled, projected with tanh, normalised; BERT's pooler, which it does not use, is dropped."""
    theirs = make_bert(wordpiece)
    steps = ["Transformer", "Pooling", "Dense", "Normalize"]
    folder = sentence_folder(tmp_path / "a", theirs, wordpiece, steps, "mean_tokens")
    (folder / "2_Dense").mkdir()
    dense = randomised(nn.Linear(48, 24))
    torch.save(
        {f"linear.{k}": v for k, v in dense.state_dict().items()}, folder / "2_Dense/pytorch_model.bin"
    )
    settings = {"in_features": 48, "out_features": 24, "bias": True}
    settings["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense/config.json").write_text(json.dumps(settings))
    ours = wt.from_hf(folder)
    inputs = wordpiece(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
    m = inputs["attention_mask"][..., None]
    with torch.no_grad():
        hidden = theirs(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        want = F.normalize(dense((hidden * m).sum(1) / m.sum(1)).tanh(), dim=-1)
    assert ours.dim == 24 and (ours.embed(texts) - want).abs().max() < 1e-5
    assert torch.equal(wt.load(ours.save(tmp_path / "b")).embed(texts), ours.embed(texts))
    first = wt.from_hf(sentence_folder(tmp_path / "c", theirs, wordpiece, steps[:2], "cls_token"))
    assert (first.embed(texts) - hidden[:, 0]).abs().max() < 1e-5
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../a/1_Pooling"
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(wt.InputError, match="expected a subfolder"):
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


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        return wt.weights("minilm")
    except wt.InputError as e:
        pytest.skip(f"all-MiniLM-L6-v2 cannot be fetched: {e}")


@pytest.mark.slow
def test_minilm_embeddings_match(minilm, captions, tmp_path):
    """all-MiniLM-L6-v2 as sentence-transformers runs it: mean of tokens, unit length, truncated at 256 ids."""
    sentences = [
        *captions[:60],
        "",
        "word " * 300,
        "naïve café — 東京 🙂",
        "[MASK] is <b>bold</b>".replace("[MASK]", "it"),
    ]
    ours = wt.from_hf(minilm)
    assert (ours.tokenizer.context, ours.pool, ours.normalize, ours.dim) == (256, "mean", True, 384)
    tokenizer, theirs = hf.AutoTokenizer.from_pretrained(minilm), hf.AutoModel.from_pretrained(minilm).eval()
    want = []
    for i in range(0, len(sentences), 16):
        inputs = tokenizer(
            sentences[i : i + 16], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        m = inputs["attention_mask"][..., None]
        with torch.no_grad():
            hidden = theirs(**inputs).last_hidden_state
        want.append(F.normalize((hidden * m).sum(1) / m.sum(1), dim=-1))
    want, got = torch.cat(want), ours.embed(sentences)
    print(f"\nall-MiniLM-L6-v2 {float((want - got).abs().max()):.1e}")
    assert (want - got).abs().max() < 2e-6
    live = wt.from_hf(theirs, tokenizer=tokenizer)  # found by name_or_path, pooling included
    assert torch.equal(live.embed(sentences), got)
    assert torch.equal(wt.load(ours.save(tmp_path)).embed(sentences), got)


def bag_of_words(documents: list[str], queries: list[str]) -> torch.Tensor:
    """Cosine similarities of tf-idf vectors: (Q, D)."""
    split = [Counter(re.findall(r"\w+", t.lower())) for t in documents + queries]
    counts = Counter(w for d in split[: len(documents)] for w in d)
    index = {w: i for i, w in enumerate(counts)}
    x = torch.zeros(len(split), len(index))
    for row, counts_of in zip(x, split, strict=True):
        for w, n in counts_of.items():
            if w in index:
                row[index[w]] = n * math.log(len(documents) / counts[w])
    x = F.normalize(x, dim=1)
    return x[len(documents) :] @ x[: len(documents)].T


def recall(scores: torch.Tensor, k: int = 10) -> float:
    """Recall@k of each query's own document; ties count half."""
    own = scores.diag()[:, None]
    rank = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return float((rank < k).float().mean())


@pytest.mark.slow
def test_minilm_retrieves_emoji_by_their_keywords(minilm):
    """1,735 emoji names ranked by keywords, and by only the keywords that the name does not hold."""
    rows = [r for r in samples.open("emoji", skin_tones=False) if len(r["text"]) == 3]
    names, keywords = [r["text"][0] for r in rows], [", ".join(r["tags"]) for r in rows]
    unseen = [r["text"][2] for r in rows]  # only those that are not in the name
    model = wt.from_hf(minilm)
    documents = model.embed(names)
    for what, queries, least in (("keywords", keywords, 1.15), ("keywords not in the name", unseen, 20.0)):
        ours, baseline = recall(model.embed(queries) @ documents.T), recall(bag_of_words(names, queries))
        print(f"\n{what}: R@10 of {len(rows)}: {ours:.3f}, bag of words {baseline:.3f}")
        assert ours > 0.4 and ours > least * baseline
    asked = {"a place where sick people are treated": "hospital", "you cut paper with it": "scissors"}
    order = model.rank(list(asked), documents).order
    for row, name in zip(order.tolist(), asked.values(), strict=True):
        assert name in [names[i] for i in row[:3]]
