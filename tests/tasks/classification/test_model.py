"""Classifier and pooling: losses and figures by hand, labels by name or number, any front-end, save and load."""

import json
import math
import wave

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

import worldtokens as wt
from worldtokens.backbone.pooling import behind, pool_tokens
from worldtokens.data import samples
from worldtokens.data.sets import motion
from worldtokens.figures.confusion import confusion_figure
from worldtokens.tasks.classification.mixing import Mix, soft, soft_cross_entropy
from worldtokens.training.optim import Average
from worldtokens.training.recipe import Recipe

ROWS = samples.open("emoji", split="validation")[:24]
NAMES = ["face", "animal", "food"]


def make(classes=NAMES, column=None, **options):
    torch.manual_seed(0)
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2, draft=False)
    return wt.Classifier(
        front if column is None else {column: front}, wt.Transformer(32, 2, 2), classes, **options
    )


def labelled(n=8):
    return [{"image": r["image"], "label": NAMES[i % 3]} for i, r in enumerate(ROWS[:n])]


def batch_of(model, rows):
    return model.collate([model.read(r) for r in rows])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_cross_entropy_with_smoothing_and_reaches_every_parameter(smoothing):
    pool = wt.AttentionPool(32, heads=2, skip=3)
    model = make(pool=pool, pool_norm=True, label_smoothing=smoothing)
    batch = batch_of(model, labelled())
    target = torch.tensor([i % 3 for i in range(8)])
    assert batch["label"].tolist() == target.tolist()
    logp = model(batch).log_softmax(-1)
    right = logp.gather(1, target[:, None])[:, 0]
    want = -((1 - smoothing) * right + smoothing * logp.mean(-1)).mean()
    out = model.loss(batch)
    assert abs(float((out["loss"] - want).detach())) < 1e-6
    assert float(out["top1"]) == float((logp.argmax(-1) == target).float().mean())
    out["loss"].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_labels_by_name_number_and_cell():
    model = make()
    assert [model.number(v) for v in ("animal", 1, "1", torch.tensor(1))] == [1, 1, 1, 1]
    for wrong in ("cloud", 3, -1, 1.0, True, "3", None):
        with pytest.raises(wt.InputError, match="label is"):
            model.number(wrong)
    assert make(classes=4).number(3) == 3


def test_predict_and_evaluate_by_hand(tmp_path):
    model = make(classes=[f"c{i}" for i in range(7)]).eval()
    path = tmp_path / "one.png"
    path.write_bytes(ROWS[0]["image"])
    pictures = [path] + [r["image"] for r in ROWS[1:12]]
    logits = model(
        {"image": model.tokenizers["image"].collate([model.tokenizers["image"].read(p) for p in pictures])}
    )
    names, p = model.predict(pictures, top=3, batch_size=5)
    order = logits.detach().argsort(-1, descending=True)
    assert names == [[f"c{i}" for i in row[:3]] for row in order.tolist()]
    assert (p - logits.softmax(-1).sort(-1, descending=True).values[:, :3]).abs().max() < 1e-6
    assert model.predict(str(path)).names[0][:3] == names[0]
    assert model.predict(pictures[:1], top=99).probabilities.sum() == pytest.approx(1)
    # the second-best class as the truth of six images, the sixth-best of six
    truth = [int(row[1 if i < 6 else 5]) for i, row in enumerate(order)]
    rows = [{"image": s, "label": t} for s, t in zip(pictures, truth, strict=True)]
    model.train()
    got = model.evaluate(rows, batch_size=5)
    assert model.training
    want = float(F.cross_entropy(logits.detach(), torch.tensor(truth)))
    assert got == {"top1": 0.0, "top5": 0.5, "macro": 0.0, "loss": pytest.approx(want, abs=1e-5)}
    for lacking in (None, -100):
        with pytest.raises(wt.InputError, match="row 1 lacks"):
            model.evaluate([rows[0], {"image": path, "label": lacking}])


def test_it_learns_a_dozen_pictures_by_heart():
    model, rows = make(), labelled(12)
    before = model.evaluate(rows)
    optim = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = batch_of(model, rows)
    for _ in range(80):
        optim.zero_grad()
        model.loss(batch)["loss"].backward()
        optim.step()
    after = model.evaluate(rows)
    assert after["top1"] == 1.0 and before["top1"] < 0.7 and after["loss"] < before["loss"] / 4


def test_any_front_end_under_any_name():
    torch.manual_seed(0)
    front = wt.TextTokenizer.clip(dim=32)
    model = wt.Classifier({"caption": front}, wt.Transformer(32, 2, 2), ["short", "long"]).eval()
    texts = ["a", "a cat that sits on a mat and looks at the moon", "two dogs"]
    together = model.logits(texts)
    alone = torch.cat([model.logits([t]) for t in texts])
    assert model.pool == "last" and (together - alone).abs().max() < 1e-5
    out = model.loss(
        batch_of(model, [{"caption": texts[0], "label": 0}, {"caption": texts[1], "label": "long"}])
    )
    assert out["loss"].isfinite()
    lstm = wt.Classifier(front, wt.Recurrent("lstm", 32, 1), 2, pool="mean", pool_norm=True)
    assert lstm.logits(texts).shape == (3, 2)
    with pytest.raises(wt.InputError, match="the column 'caption'"):
        model({"text": texts})
    with pytest.raises(ValueError, match="one column"):
        wt.Classifier({"a": front, "b": front}, wt.Transformer(32, 1, 2), 2)


@pytest.mark.parametrize("pool", ["patches", "attention"])
def test_save_and_load(pool, tmp_path):
    how = wt.AttentionPool(32, heads=2, skip=3) if pool == "attention" else pool
    model = make(column="photo", pool=how, pool_norm=True).eval()
    again = wt.load(model.save(tmp_path / "m"))
    pictures = [r["image"] for r in ROWS[:3]]
    assert torch.equal(model.logits(pictures), again.logits(pictures))
    assert again.names == NAMES and again.column == "photo"


def test_without_a_head_it_gives_features():
    model = make(classes=0).eval()
    assert model.logits([ROWS[0]["image"]]).shape == (1, 32)
    with pytest.raises(wt.InputError, match="no head"):
        model.predict([ROWS[0]["image"]])


# ---- rows without a class, mixtures, frozen parts ------------------------------------------------------------


def test_rows_without_a_class_are_read_and_not_learnt_from():
    model, rows = make(label_smoothing=0.1).eval(), labelled(6)
    known = model.loss(batch_of(model, rows[:4]))
    unlabelled = [{**rows[4], "label": None}, {**rows[5], "label": -100}]
    batch = batch_of(model, rows[:4] + unlabelled)
    assert batch["label"].tolist() == [0, 1, 2, 0, -100, -100] and batch["weight"] == 4
    both = model.loss(batch)
    assert abs(float((both["loss"] - known["loss"]).detach())) < 1e-6 and both["top1"] == known["top1"]


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_without_any_class_the_loss_is_zero_and_has_a_graph(mixup):
    model = make(mixup=mixup)
    batch = batch_of(model, [{"image": r["image"]} for r in ROWS[:4]])
    assert batch["weight"] == 0
    for given in (batch, {k: v for k, v in batch.items() if k != "label"}):
        out = model.loss(given)
        assert float(out["loss"].detach()) == 0 and float(out["top1"]) == 0
        out["loss"].backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.head.parameters())


def test_a_batch_that_lacks_the_column_in_some_or_all_rows_trains():
    model, rows = make().eval(), [make().read(r) for r in labelled(3)]
    whole = model.loss(model.collate(rows))["loss"]
    batch = model.collate([rows[0], {"label": 2}, rows[1], {}, rows[2]])
    assert batch["label"].tolist() == [0, 1, 2] and batch["weight"] == 3
    assert torch.equal(model.loss(batch)["loss"], whole)
    none = model.collate([{"label": 1}, {}])
    assert none["weight"] == 0
    loss = model.loss(none)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0 and not any(p.grad.any() for p in model.parameters())


def test_the_loop_trains_over_unlabelled_batches(tmp_path):
    rows = labelled(4) + [{"image": r["image"]} for r in ROWS[4:12]]
    report = wt.train(
        make(), rows, train=wt.TrainSettings(out=str(tmp_path), epochs=4, batch_size=2, tensorboard=False)
    )
    assert report.steps == 24 and report.skipped_steps == 0 and math.isfinite(report.loss)


@pytest.mark.parametrize("way", ["MixUp", "CutMix"])
def test_mixtures_are_torchvisions_and_only_in_training(way):
    model = make(**{way.lower(): 0.8}, label_smoothing=0.1)
    plain = make(label_smoothing=0.1)
    batch = batch_of(model, labelled(6))
    torch.manual_seed(5)
    got = model.loss(batch)["loss"]
    # by hand: the images as the front-end normalises them, torchvision's transform, soft cross-entropy
    front = model.tokenizers["image"]
    mean, std = (torch.tensor(v)[:, None, None] for v in (front.mean, front.std))
    pictures = (batch["image"]["pixels"].float() / 255 - mean) / std
    torch.manual_seed(5)
    mixed, target = getattr(v2, way)(alpha=0.8, num_classes=3)(pictures, batch["label"])
    want = F.cross_entropy(model({"image": mixed}), target, label_smoothing=0.1)
    assert abs(float((got - want).detach())) < 1e-5
    other = model.loss(batch)["loss"]
    assert got != other, "each step draws anew"
    assert torch.equal(model.eval().loss(batch)["loss"], plain.eval().loss(batch)["loss"])


def test_mixing_keeps_the_mass_of_labels():
    torch.manual_seed(0)
    labels = soft(torch.tensor([2, -100, 0, 1]), 3)
    assert labels.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    bands = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8)
    cut = []
    for _ in range(20):
        pictures, mixed = Mix(0.4, 1.0)(bands, labels)
        assert mixed.sum() == pytest.approx(3, abs=1e-5) and mixed.shape == (4, 3)
        cut.append(bool((pictures == pictures.round()).all()))
    assert len(set(cut)) == 2, "with both, some batches are cut and some blended"
    assert not Mix() and Mix(0.1)
    with pytest.raises(ValueError, match="cutmix=-1"):
        Mix(cutmix=-1)
    logits = torch.randn(4, 3)
    hard = F.cross_entropy(logits, torch.tensor([2, -100, 0, 1]), label_smoothing=0.2)
    assert abs(float(soft_cross_entropy(logits, labels, 0.2) - hard)) < 1e-6


def test_mixing_needs_pictures_of_one_shape():
    front = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=16, draft=False)
    native = wt.Classifier(front, wt.Transformer(32, 1, 2), NAMES, cutmix=1.0)
    with pytest.raises(wt.InputError, match=r"of one shape.*fixed size"):
        native.loss(batch_of(native, labelled(3)))
    sound = wt.Classifier(AUDIO(), wt.Transformer(32, 1, 2), NAMES, mixup=1.0)
    with pytest.raises(wt.InputError, match="set both to 0"):
        sound.loss(batch_of(sound, SOUNDS))
    assert sound.eval().loss(batch_of(sound, SOUNDS))["loss"].isfinite()


def test_a_run_with_mixtures_and_averages_is_reproducible_and_averages_in_float32(tmp_path):
    """The same seeds give the same weights to the bit; what is evaluated and saved are the averaged weights."""
    runs = []
    for name in "ab":
        model = make(mixup=0.3, cutmix=0.5)
        settings = wt.TrainSettings(
            out=str(tmp_path / name), steps=4, batch_size=4, precision="bf16", tensorboard=False
        )
        report = wt.train(
            model, labelled(12), labelled(12), train=settings, optim=wt.OptimSettings(lr=0.02, ema=0.9)
        )
        runs.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
    saved = wt.load(tmp_path / "a" / "best")
    assert all(torch.equal(runs[0][n], p) and p.dtype == torch.float32 for n, p in saved.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert saved.evaluate(labelled(12)) == report.figures


def test_averages_of_half_precision_weights_move_by_less_than_their_grain():
    """A change of 2**-9 of a bfloat16 value at decay 0.99 is far below its grain: only a float32 average sees it."""
    lin = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(lin.weight)
    average = Average(lin, 0.99)
    with torch.no_grad():
        lin.weight.fill_(1 + 2**-7)
    for _ in range(3):
        average.update(10_000)
    (value,) = average.values.values()
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(1 + 2**-7 * (1 - 0.99**3), abs=1e-6)


def test_a_frozen_trunk_keeps_its_weights_while_the_head_learns(tmp_path):
    model = make(pool="mean")
    model.tokenizers.requires_grad_(False)
    model.trunk.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wt.train(
        model,
        labelled(12),
        train=wt.TrainSettings(out=str(tmp_path), steps=3, batch_size=4, tensorboard=False),
    )
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"head.weight", "head.bias"}


# ---- confusion -------------------------------------------------------------------------------------------


def test_confusion_counts_truth_down_and_answers_across(tmp_path):
    model = make().eval()
    rows = labelled(12)
    answers = model.predict([r["image"] for r in rows], top=1).names
    want = torch.zeros(3, 3, dtype=torch.long)
    for row, (answer,) in zip(rows, answers, strict=True):
        want[NAMES.index(row["label"]), NAMES.index(answer)] += 1
    matrix = model.confusion(rows, batch_size=5)
    assert torch.equal(matrix, want)
    got = model.evaluate(rows)
    assert got["top1"] == pytest.approx(float(want.diagonal().sum()) / 12)
    assert got["macro"] == pytest.approx(float((want.diagonal() / want.sum(1)).mean()))


def test_the_confusion_picture_is_dark_where_classes_are_told_right(tmp_path):
    matrix = torch.tensor([[9, 1], [0, 4]])
    path = confusion_figure(matrix, ["yes", "no"], tmp_path / "new" / "confusion.png", "trial")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0] > 60).mean()
    assert 0.1 < blue < 0.6
    swapped = confusion_figure(matrix.flip(1), None, tmp_path / "b.png")
    assert path.read_bytes() != swapped.read_bytes()
    with pytest.raises(wt.InputError, match="3 names"):
        confusion_figure(matrix, ["a", "b", "c"], tmp_path / "c.png")
    with pytest.raises(wt.InputError, match=r"\(2, 3\)"):
        confusion_figure(torch.zeros(2, 3), None, tmp_path / "c.png")


# ---- other front-ends ------------------------------------------------------------------------------------


def AUDIO():
    return wt.AudioTokenizer(32, sample_rate=8000, n_mels=20, seconds=1.0)


SOUNDS = [
    {"audio": (np.sin(np.arange(n) * f).astype("float32"), 8000), "label": i % 3}
    for i, (n, f) in enumerate([(4000, 0.1), (900, 0.4), (7, 0.2), (8000, 0.9)])
]


def clouds():
    torch.manual_seed(3)
    return [torch.randn(n, 3).double() for n in (100, 5, 40)]


FRONTS = {
    "audio": (AUDIO, lambda: [s["audio"] for s in SOUNDS]),
    "video": (
        lambda: wt.VideoTokenizer(32, tubelet=(2, 8, 8), frames=8, size=None),
        lambda: [motion.open_motion("test", "emoji")[i]["video"][:t] for i, t in enumerate((16, 5, 2))],
    ),
    "points": (lambda: wt.PointTokenizer(32, points=64, patches=8, neighbours=4, hidden=(8, 8, 8)), clouds),
}


@pytest.mark.parametrize("kind", FRONTS)
def test_sounds_clips_and_points_one_by_one_and_together(kind):
    torch.manual_seed(0)
    front, sources = FRONTS[kind][0](), FRONTS[kind][1]()
    for pool in (None, wt.AttentionPool(32, heads=2)):
        model = wt.Classifier(front, wt.Transformer(32, 2, 2), NAMES, pool=pool).eval()
        together = model.logits(sources)
        alone = torch.cat([model.logits([s]) for s in sources])
        assert (together - alone).abs().max() < 1e-5
    model.train()
    out = model.loss(batch_of(model, [{kind: s, "label": i % 3} for i, s in enumerate(sources)]))
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


def test_another_front_end_is_one_line_of_a_recipe(tmp_path, monkeypatch):
    """The same rows by their images or by their sounds: nothing but the front-end's line differs."""
    rows = []
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(ROWS[i]["image"])
        tone = np.sin(np.arange(3000) * (0.1 if i % 2 else 0.8)) * 20000
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(tone.astype("<i2").tobytes())
        row = {"image": f"{i}.png", "audio": f"{i}.wav", "label": "low" if i % 2 else "high"}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    line = next(line for line in RECIPE.splitlines() if "tokenizer:" in line)
    sound = "    tokenizer: {class: worldtokens.AudioTokenizer, args: {dim: 32, sample_rate: 8000, n_mels: 20, seconds: 1}}"
    for name, text in (("image", RECIPE), ("audio", RECIPE.replace(line, sound))):
        (tmp_path / f"{name}.yaml").write_text(text)
        recipe = Recipe.read(f"{name}.yaml", ["--train.out", name])
        task, report = recipe.run()
        assert task.column == name and report.steps == 12
        again = wt.load(tmp_path / name / "best")
        assert len(again.predict([f"0.{'png' if name == 'image' else 'wav'}"]).names[0]) == 2
    assert report.figures["top1"] == 1.0, "two tones are told apart"


# ---- pooling and what front-ends and trunk gained ----------------------------------------------------------


def ragged():
    torch.manual_seed(1)
    x = torch.randn(3, 6, 32)
    lengths = [6, 4, 2]
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    x[~valid] = float("nan")
    return wt.Tokens(x=x, valid=valid, layout=wt.Layout.simple(lengths, "bidirectional"))


def test_pooling_ignores_padding_packing_and_skipped_tokens():
    tokens = ragged()
    pool = wt.AttentionPool(32, heads=4, skip=1)
    got = pool(tokens)
    for i, n in enumerate([6, 4, 2]):
        alone = wt.Tokens(x=tokens.x[i : i + 1, 1:n])
        assert (got[i] - wt.AttentionPool.forward(_without_skip(pool), alone)[0]).abs().max() < 1e-5
        assert (pool_tokens(tokens, "patches", 1)[i] - tokens.x[i, 1:n].mean(0)).abs().max() < 1e-6
    packed = tokens.pack(8)
    assert len(packed) == 2
    assert (pool(packed) - got).abs().max() < 1e-5
    assert (pool_tokens(packed, "patches", 1) - pool_tokens(tokens, "patches", 1)).abs().max() < 1e-6
    assert (pool(tokens.replace(layout=None)) - got).abs().max() < 1e-5
    assert behind(tokens, 3).layout.lengths == ((3,), (1,), ())
    # a sample with nothing behind its first tokens gives zeros, and gradients stay finite
    pool.skip = 3
    out = pool(tokens)
    assert out[2].abs().max() == 0 and out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in pool.parameters())


def _without_skip(pool):
    other = wt.AttentionPool(32, heads=4)
    other.load_state_dict(pool.state_dict())
    return other


def test_registers_stand_behind_the_class_token():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2)
    tokens = front.tokens([ROWS[0]["image"]])
    assert tokens.shape[1] == 3 + 16 and front.prefix == 3
    assert torch.equal(tokens.x[0, 0], front.class_token[0, 0])
    assert torch.equal(tokens.x[0, 1:3], front.registers[0])
    assert tokens.pos[0, :3].tolist() == [[0, 0, 0], [-1, 0, 0], [-2, 0, 0]]
    wt.testing.check_tokenizer(front, [r["image"] for r in ROWS[:3]])
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=20, registers=1, span=4)
    wt.testing.check_tokenizer(native, [r["image"] for r in ROWS[:3]])


def test_span_counts_every_grid_alike():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, span=(8, 16))
    pos = front(torch.zeros(1, 3, 16, 32)).pos[0]  # 2 rows, 4 columns
    assert pos[:, 1].unique().tolist() == [0, 4] and pos[:, 2].unique().tolist() == [0, 4, 8, 12]
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, span=(8, 16))
    batch = native.collate(
        [torch.zeros(3, 16, 32, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8)]
    )
    assert torch.equal(native(batch).pos[0], pos)
    with pytest.raises(wt.InputError, match="crop is"):
        wt.ImageTokenizer(dim=32, size=None, crop=0.9)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_before_the_first_block_and_inside_the_feed_forward(norm):
    torch.manual_seed(0)
    trunk = wt.Transformer(32, 1, 2, norm=norm, first_norm=True, mlp_norm=True, activation="gelu_tanh")
    for p in trunk.parameters():
        torch.nn.init.normal_(p, std=0.3)
    plain = wt.Transformer(32, 1, 2, norm=norm, mlp_norm=True, activation="gelu_tanh")
    plain.load_state_dict({k: v for k, v in trunk.state_dict().items() if not k.startswith("first_norm")})
    tokens = ragged()
    whole = wt.Tokens(
        x=torch.where(tokens.valid[..., None], tokens.x, 0.0), valid=tokens.valid, layout=tokens.layout
    )
    want = plain(whole.replace(x=trunk.first_norm(whole.x)))
    assert (trunk(tokens).x - want.x).abs().max() < 1e-5
    mlp, x = trunk.blocks[0].mlp, torch.randn(5, 32)
    want = mlp.fc2(mlp.norm(F.gelu(mlp.fc1(x), approximate="tanh")))
    assert torch.equal(mlp(x), want)
