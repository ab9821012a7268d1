"""MixUp and CutMix: equal to torchvision's, soft labels, images of one shape, reproducible training."""

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import v2

import worldtokens as wt
from worldtokens.tasks.classification.mixing import Mix, soft_cross_entropy, soft_labels


@pytest.mark.parametrize("method", ["MixUp", "CutMix"])
def test_mixing_equals_torchvision_and_is_off_in_evaluation(method, make_classifier, collate, labelled_rows):
    model = make_classifier(**{method.lower(): 0.8}, label_smoothing=0.1)
    plain = make_classifier(label_smoothing=0.1)
    batch = collate(model, labelled_rows(6))
    torch.manual_seed(5)
    got = model.loss(batch)["loss"]
    # by hand: the tokenizer's normalised images, torchvision's transform, soft cross-entropy
    front = model.tokenizers["image"]
    mean, std = (torch.tensor(v)[:, None, None] for v in (front.mean, front.std))
    images = (batch["image"]["pixels"].float() / 255 - mean) / std
    torch.manual_seed(5)
    mixed, target = getattr(v2, method)(alpha=0.8, num_classes=3)(images, batch["label"])
    want = F.cross_entropy(model({"image": mixed}), target, label_smoothing=0.1)
    assert abs(float((got - want).detach())) < 1e-5
    other = model.loss(batch)["loss"]
    assert got != other, "each step draws a new mix"
    assert torch.equal(model.eval().loss(batch)["loss"], plain.eval().loss(batch)["loss"])


def test_mixing_keeps_the_sum_of_labels():
    torch.manual_seed(0)
    labels = soft_labels(torch.tensor([2, -100, 0, 1]), 3)
    assert labels.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    bands = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8)
    cut = []
    for _ in range(20):
        images, mixed = Mix(0.4, 1.0)(bands, labels)
        assert mixed.sum() == pytest.approx(3, abs=1e-5) and mixed.shape == (4, 3)
        cut.append(bool((images == images.round()).all()))
    assert len(set(cut)) == 2, "with both, some batches use CutMix and some MixUp"
    assert not Mix() and Mix(0.1)
    with pytest.raises(ValueError, match="cutmix=-1"):
        Mix(cutmix=-1)
    logits = torch.randn(4, 3)
    hard = F.cross_entropy(logits, torch.tensor([2, -100, 0, 1]), label_smoothing=0.2)
    assert abs(float(soft_cross_entropy(logits, labels, 0.2) - hard)) < 1e-6


def test_mixing_needs_images_of_one_shape(make_sources, collate, labelled_rows, class_names):
    front = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=16, preprocess={"draft": False})
    native = wt.Classifier(front, wt.Transformer(32, 1, 2), class_names, cutmix=1.0)
    with pytest.raises(wt.InputError, match=r"of one shape.*fixed size"):
        native.loss(collate(native, labelled_rows(3)))
    front, sources = make_sources("audio")
    rows = [{"audio": s, "label": i % 3} for i, s in enumerate(sources)]
    audio = wt.Classifier(front, wt.Transformer(32, 1, 2), class_names, mixup=1.0)
    with pytest.raises(wt.InputError, match="set both to 0"):
        audio.loss(collate(audio, rows))
    assert audio.eval().loss(collate(audio, rows))["loss"].isfinite()


def test_training_with_mixing_and_ema_is_reproducible_and_averages_in_float32(
    tmp_path, make_classifier, labelled_rows
):
    """Equal seeds give bit-equal weights; the averaged weights are evaluated and saved."""
    runs = []
    for name in "ab":
        model = make_classifier(mixup=0.3, cutmix=0.5)
        settings = wt.TrainSettings(
            out=str(tmp_path / name), steps=4, batch_size=4, precision="bf16", tensorboard=False
        )
        report = wt.train(
            model,
            labelled_rows(12),
            labelled_rows(12),
            train=settings,
            optim=wt.OptimSettings(lr=0.02, ema=0.9),
        )
        runs.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
    saved = wt.load(tmp_path / "a" / "best")
    assert all(torch.equal(runs[0][n], p) and p.dtype == torch.float32 for n, p in saved.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert saved.evaluate(labelled_rows(12)) == report.metrics
