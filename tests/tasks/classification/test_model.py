"""Classifier: losses and metrics by hand, labels by name or index, any tokenizer, save and load."""

import json
import math
import wave

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.training.recipe import Recipe


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_cross_entropy_with_label_smoothing_and_reaches_every_parameter(
    smoothing, make_classifier, collate, labelled_rows
):
    pool = wt.AttentionPool(32, heads=2, skip=3)
    model = make_classifier(pool=pool, pool_norm=True, label_smoothing=smoothing)
    batch = collate(model, labelled_rows())
    target = torch.tensor([i % 3 for i in range(8)])
    assert batch["label"].tolist() == target.tolist()
    logp = model(batch).log_softmax(-1)
    correct = logp.gather(1, target[:, None])[:, 0]
    want = -((1 - smoothing) * correct + smoothing * logp.mean(-1)).mean()
    out = model.loss(batch)
    assert abs(float((out["loss"] - want).detach())) < 1e-6
    assert float(out["top1"]) == float((logp.argmax(-1) == target).float().mean())
    out["loss"].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_classes_by_name_index_and_table_cell(make_classifier):
    model = make_classifier()
    assert [model.class_index(v) for v in ("animal", 1, "1", torch.tensor(1))] == [1, 1, 1, 1]
    for wrong in ("cloud", 3, -1, 1.0, True, "3", None):
        with pytest.raises(wt.InputError, match="label is"):
            model.class_index(wrong)
    assert make_classifier(classes=4).class_index(3) == 3


def test_predict_and_evaluate_by_hand(tmp_path, make_classifier, emoji_rows):
    model = make_classifier(classes=[f"c{i}" for i in range(7)]).eval()
    path = tmp_path / "one.png"
    path.write_bytes(emoji_rows[0]["image"])
    images = [path] + [r["image"] for r in emoji_rows[1:12]]
    logits = model(
        {"image": model.tokenizers["image"].collate([model.tokenizers["image"].read(p) for p in images])}
    )
    names, p = model.predict(images, top=3, batch_size=5)
    order = logits.detach().argsort(-1, descending=True)
    assert names == [[f"c{i}" for i in row[:3]] for row in order.tolist()]
    assert (p - logits.softmax(-1).sort(-1, descending=True).values[:, :3]).abs().max() < 1e-6
    assert model.predict(str(path)).names[0][:3] == names[0]
    assert model.predict(images[:1], top=99).probabilities.sum() == pytest.approx(1)
    # true classes: the second-best class of six images, the sixth-best of the other six
    targets = [int(row[1 if i < 6 else 5]) for i, row in enumerate(order)]
    rows = [{"image": s, "label": t} for s, t in zip(images, targets, strict=True)]
    model.train()
    got = model.evaluate(rows, batch_size=5)
    assert model.training
    want = float(F.cross_entropy(logits.detach(), torch.tensor(targets)))
    assert got == {"top1": 0.0, "top5": 0.5, "macro": 0.0, "loss": pytest.approx(want, abs=1e-5)}
    for missing in (None, -100):
        with pytest.raises(wt.InputError, match="row 1 lacks"):
            model.evaluate([rows[0], {"image": path, "label": missing}])


def test_it_memorises_a_dozen_images(make_classifier, collate, labelled_rows):
    model, rows = make_classifier(), labelled_rows(12)
    before = model.evaluate(rows)
    optim = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = collate(model, rows)
    for _ in range(80):
        optim.zero_grad()
        model.loss(batch)["loss"].backward()
        optim.step()
    after = model.evaluate(rows)
    assert after["top1"] == 1.0 and before["top1"] < 0.7 and after["loss"] < before["loss"] / 4


def test_any_tokenizer_under_any_column_name(collate):
    torch.manual_seed(0)
    front = wt.TextTokenizer.clip(dim=32)
    model = wt.Classifier({"caption": front}, wt.Transformer(32, 2, 2), ["short", "long"]).eval()
    texts = ["a", "a cat that sits on a mat and looks at the moon", "two dogs"]
    together = model.logits(texts)
    alone = torch.cat([model.logits([t]) for t in texts])
    assert model.pool == "last" and (together - alone).abs().max() < 1e-5
    out = model.loss(
        collate(model, [{"caption": texts[0], "label": 0}, {"caption": texts[1], "label": "long"}])
    )
    assert out["loss"].isfinite()
    lstm = wt.Classifier(front, wt.Recurrent("lstm", 32, 1), 2, pool="mean", pool_norm=True)
    assert lstm.logits(texts).shape == (3, 2)
    with pytest.raises(wt.InputError, match="the column 'caption'"):
        model({"text": texts})
    with pytest.raises(ValueError, match="one column"):
        wt.Classifier({"a": front, "b": front}, wt.Transformer(32, 1, 2), 2)


@pytest.mark.parametrize("pool", ["patches", "attention"])
def test_save_and_load(pool, tmp_path, make_classifier, emoji_rows, class_names):
    how = wt.AttentionPool(32, heads=2, skip=3) if pool == "attention" else pool
    model = make_classifier(column="photo", pool=how, pool_norm=True).eval()
    again = wt.load(model.save(tmp_path / "m"))
    images = [r["image"] for r in emoji_rows[:3]]
    assert torch.equal(model.logits(images), again.logits(images))
    assert again.names == class_names and again.column == "photo"


def test_without_a_head_it_returns_features(make_classifier, emoji_rows):
    model = make_classifier(classes=0).eval()
    assert model.logits([emoji_rows[0]["image"]]).shape == (1, 32)
    with pytest.raises(wt.InputError, match="no head"):
        model.predict([emoji_rows[0]["image"]])


def test_rows_without_a_class_do_not_contribute_to_the_loss(make_classifier, collate, labelled_rows):
    model, rows = make_classifier(label_smoothing=0.1).eval(), labelled_rows(6)
    known = model.loss(collate(model, rows[:4]))
    unlabelled = [{**rows[4], "label": None}, {**rows[5], "label": -100}]
    batch = collate(model, rows[:4] + unlabelled)
    assert batch["label"].tolist() == [0, 1, 2, 0, -100, -100] and batch["weight"] == 4
    both = model.loss(batch)
    assert abs(float((both["loss"] - known["loss"]).detach())) < 1e-6 and both["top1"] == known["top1"]


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_without_any_class_the_loss_is_zero_with_a_graph(mixup, make_classifier, collate, emoji_rows):
    model = make_classifier(mixup=mixup)
    batch = collate(model, [{"image": r["image"]} for r in emoji_rows[:4]])
    assert batch["weight"] == 0
    for variant in (batch, {k: v for k, v in batch.items() if k != "label"}):
        out = model.loss(variant)
        assert float(out["loss"].detach()) == 0 and float(out["top1"]) == 0
        out["loss"].backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.head.parameters())


def test_rows_without_the_column_train(make_classifier, labelled_rows):
    model, rows = make_classifier().eval(), [make_classifier().read(r) for r in labelled_rows(3)]
    whole = model.loss(model.collate(rows))["loss"]
    batch = model.collate([rows[0], {"label": 2}, rows[1], {}, rows[2]])
    assert batch["label"].tolist() == [0, 1, 2] and batch["weight"] == 3
    assert torch.equal(model.loss(batch)["loss"], whole)
    none = model.collate([{"label": 1}, {}])
    assert none["weight"] == 0
    loss = model.loss(none)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0 and not any(p.grad.any() for p in model.parameters())


def test_training_accepts_unlabelled_batches(tmp_path, make_classifier, labelled_rows, emoji_rows):
    rows = labelled_rows(4) + [{"image": r["image"]} for r in emoji_rows[4:12]]
    report = wt.train(
        make_classifier(),
        rows,
        train=wt.TrainSettings(out=str(tmp_path), epochs=4, batch_size=2, tensorboard=False),
    )
    assert report.steps == 24 and report.skipped_steps == 0 and math.isfinite(report.loss)


def test_a_frozen_trunk_keeps_its_weights_while_the_head_trains(tmp_path, make_classifier, labelled_rows):
    model = make_classifier(pool="mean")
    model.tokenizers.requires_grad_(False)
    model.trunk.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wt.train(
        model,
        labelled_rows(12),
        train=wt.TrainSettings(out=str(tmp_path), steps=3, batch_size=4, tensorboard=False),
    )
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"head.weight", "head.bias"}


def test_confusion_counts_true_classes_by_row_and_predictions_by_column(
    make_classifier, labelled_rows, class_names
):
    model = make_classifier().eval()
    rows = labelled_rows(12)
    predictions = model.predict([r["image"] for r in rows], top=1).names
    want = torch.zeros(3, 3, dtype=torch.long)
    for row, (name,) in zip(rows, predictions, strict=True):
        want[class_names.index(row["label"]), class_names.index(name)] += 1
    matrix = model.confusion(rows, batch_size=5)
    assert torch.equal(matrix, want)
    got = model.evaluate(rows)
    assert got["top1"] == pytest.approx(float(want.diagonal().sum()) / 12)
    assert got["macro"] == pytest.approx(float((want.diagonal() / want.sum(1)).mean()))


@pytest.mark.parametrize("modality", ["audio", "video", "points"])
def test_logits_of_audio_video_and_points_do_not_depend_on_the_batch(
    modality, make_sources, collate, class_names
):
    torch.manual_seed(0)
    front, sources = make_sources(modality)
    for pool in (None, wt.AttentionPool(32, heads=2)):
        model = wt.Classifier(front, wt.Transformer(32, 2, 2), class_names, pool=pool).eval()
        together = model.logits(sources)
        alone = torch.cat([model.logits([s]) for s in sources])
        assert (together - alone).abs().max() < 1e-5
    model.train()
    out = model.loss(collate(model, [{modality: s, "label": i % 3} for i, s in enumerate(sources)]))
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


RECIPE = """
model:
  class: worldtokens.Classifier
  args:
    tokenizer: {class: worldtokens.ImageTokenizer, args: {dim: 32, patch: 16, size: 32}}
    trunk: {class: worldtokens.Transformer, args: {dim: 32, depth: 1, heads: 2}}
    classes: [low, high]
data: {train: rows.jsonl, validation: {}}
train: {steps: 12, batch_size: 4, tensorboard: false}
optim: {lr: 1.0e-2}
"""


def test_another_tokenizer_is_one_line_of_a_recipe(tmp_path, monkeypatch, emoji_rows):
    """The same rows as images or as audio: only the tokenizer's line of the recipe differs."""
    rows = []
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(emoji_rows[i]["image"])
        tone = np.sin(np.arange(3000) * (0.1 if i % 2 else 0.8)) * 20000
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(tone.astype("<i2").tobytes())
        row = {"image": f"{i}.png", "audio": f"{i}.wav", "label": "low" if i % 2 else "high"}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    line = next(line for line in RECIPE.splitlines() if "tokenizer:" in line)
    audio = "    tokenizer: {class: worldtokens.AudioTokenizer, args: {dim: 32, sample_rate: 8000, n_mels: 20, seconds: 1}}"
    for name, text in (("image", RECIPE), ("audio", RECIPE.replace(line, audio))):
        (tmp_path / f"{name}.yaml").write_text(text)
        recipe = Recipe.read(f"{name}.yaml", ["--train.out", name])
        task, report = recipe.run()
        assert task.column == name and report.steps == 12
        again = wt.load(tmp_path / name / "best")
        assert len(again.predict([f"0.{'png' if name == 'image' else 'wav'}"]).names[0]) == 2
    assert report.metrics["top1"] == 1.0, "the two tones are separable"
