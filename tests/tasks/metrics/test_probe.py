"""Linear probe and zero-shot accuracy: the optimum, values by hand, no leakage between splits."""

import math

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.metrics.probe import logistic_regression


class Identity:
    """A model whose embeddings are the sources themselves, and whose class embeddings are unit vectors."""

    def __init__(self, classes=()):
        self.classes = list(classes)

    def embed(self, column, sources, batch_size=64):
        return torch.stack([torch.as_tensor(s, dtype=torch.float32) for s in sources])

    def class_vectors(self, classes, templates=("{}",), column="text"):
        return torch.eye(len(self.classes))[[self.classes.index(c) for c in classes]]


def clusters(n, classes=3, dim=5, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(9))
    return [
        {
            "x": centres[i % classes] + noise * torch.randn(dim, generator=generator),
            "class": f"c{i % classes}",
        }
        for i in range(n)
    ]


def test_logistic_regression_reaches_the_minimum():
    """The gradient of mean cross-entropy + s |W|^2 / 2 is zero, from either start, and every step away is worse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).long() + (x[:, 1] > 1).long()

    def objective(w, b):
        return F.cross_entropy(x @ w.T + b, y) + 0.01 / 2 * w.square().sum()

    w, b = logistic_regression(x, y, 3, 0.01)
    w2, b2 = w.clone().requires_grad_(), b.clone().requires_grad_()
    objective(w2, b2).backward()
    assert w2.grad.abs().max() < 1e-6 and b2.grad.abs().max() < 1e-6
    other, _ = logistic_regression(x, y, 3, 0.01, (torch.ones_like(w), b))
    assert (other - w).abs().max() < 1e-4
    for _ in range(20):
        step = 1e-2 * torch.randn(w.shape, generator=generator, dtype=torch.float64)
        assert objective(w + step, b) > objective(w, b)


def test_two_classes_on_a_line_by_hand():
    """x = -1 / +1, as many of each: minimise log(1 + exp(-2w)) + s w^2, i.e. weights w and -w of difference 2w."""
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    w, b = logistic_regression(x, torch.tensor([0, 1]), 2, 0.1)
    got = float(w[1, 0])
    assert float(w[0, 0]) == pytest.approx(-got, abs=1e-6)
    assert 2 / (1 + math.exp(2 * got)) == pytest.approx(2 * 0.1 * got, abs=1e-5)
    assert float(b[0]) == pytest.approx(float(b[1]), abs=1e-6)


def test_a_probe_separates_classes_and_reports_the_majority():
    probe = wt.linear_probe(Identity(), "x", clusters(120), clusters(60, seed=1))
    assert probe.top1 > 0.95 and probe.majority == pytest.approx(1 / 3)
    assert probe.classes == ["c0", "c1", "c2"] and probe.samples == (120, 60)
    # its weights apply to raw embeddings, not to standardised ones
    x = torch.stack([r["x"] for r in clusters(60, seed=1)]).double()
    predicted = (x @ probe.weight.T + probe.bias).argmax(1)
    assert float((predicted == torch.arange(60) % 3).double().mean()) == probe.top1


def test_a_probe_on_noise_is_at_chance():
    rows = [
        {"x": torch.randn(5, generator=torch.Generator().manual_seed(i)), "class": i % 4} for i in range(400)
    ]
    assert abs(wt.linear_probe(Identity(), "x", rows[:300], rows[300:]).top1 - 0.25) < 0.15


def test_scale_and_shift_of_an_embedding_do_not_matter():
    """Features are standardised, and a constant feature is not amplified."""
    rows, test = clusters(90, noise=1.0), clusters(60, noise=1.0, seed=1)

    def shifted(rows):
        return [{**r, "x": torch.cat([100 * r["x"] - 7, torch.tensor([3.0])])} for r in rows]

    a, b = (
        wt.linear_probe(Identity(), "x", rows, test),
        wt.linear_probe(Identity(), "x", shifted(rows), shifted(test)),
    )
    assert a.top1 == b.top1 and a.strength == b.strength


def test_validation_rows_choose_the_penalty_and_test_rows_do_not():
    """Noise in wide features selects a strong penalty; test rows change neither the choice nor the weights."""
    generator = torch.Generator().manual_seed(3)

    def rows(n):
        out = []
        for i in range(n):
            x = torch.randn(60, generator=generator)
            x[0] += 1.5 * (i % 2)
            out.append({"x": x, "class": i % 2})
        return out

    train, validation, test = rows(60), rows(200), rows(40)
    a = wt.linear_probe(Identity(), "x", train, test, validation_rows=validation)
    b = wt.linear_probe(Identity(), "x", train, rows(30), validation_rows=validation)
    assert a.strength == b.strength >= 0.01 and torch.equal(a.weight, b.weight)


def test_lists_missing_values_and_unknown_classes():
    rows = clusters(60)
    rows[0] = {"x": [rows[0]["x"], rows[3]["x"]], "class": "c0"}
    rows += [{"class": "c1"}, {"x": rows[1]["x"]}, {"x": [], "class": "c1"}]
    test = [*clusters(30, seed=1), {"x": clusters(1)[0]["x"], "class": "never seen"}]
    probe = wt.linear_probe(Identity(), "x", rows, test)
    assert probe.samples == (61, 31)
    assert probe.top1 <= 30 / 31 + 1e-9
    with pytest.raises(wt.InputError, match="no test row has both 'x' and 'class'"):
        wt.linear_probe(Identity(), "x", rows, [{"x": rows[1]["x"]}])
    with pytest.raises(wt.InputError, match="all training rows have the class 'c0'"):
        wt.linear_probe(Identity(), "x", clusters(30, classes=1), test)


def test_zero_shot_by_hand():
    model = Identity(["cat", "dog", "owl"])
    rows = [
        {"image": torch.tensor([1.0, 0.2, 0.0]), "class": "cat"},
        {"image": torch.tensor([0.1, 0.9, 0.3]), "class": "dog"},
        {"image": torch.tensor([0.8, 0.1, 0.1]), "class": "dog"},
        {"class": "owl"},
    ]
    metrics = wt.zero_shot_top1(model, rows)
    assert metrics == {
        "top1": pytest.approx(2 / 3),
        "chance": 0.5,
        "majority": pytest.approx(2 / 3),
        "classes": 2.0,
        "samples": 3.0,
    }
    assert wt.zero_shot_top1(model, rows, classes=["cat", "dog", "owl"])["chance"] == pytest.approx(1 / 3)
    with pytest.raises(wt.InputError, match="class 'dog'"):
        wt.zero_shot_top1(model, rows, classes=["cat"])


def test_a_clip_is_probed_by_column():
    """End to end: a linear probe separates an untrained model's embeddings of two colours."""
    torch.manual_seed(0)
    tokenizers = {"image": wt.ImageTokenizer(16, patch=16, size=32), "text": wt.TextTokenizer.clip(dim=16)}
    model = wt.CLIP(tokenizers, wt.Transformer(16, 1, 2), 8)

    def rows(n, seed):
        generator = torch.Generator().manual_seed(seed)
        out = []
        for i in range(n):
            base = torch.tensor([200, 60, 60] if i % 2 else [60, 60, 200]).view(3, 1, 1)
            noise = torch.randint(-40, 40, (3, 32, 32), generator=generator)
            out.append({"image": (base + noise).to(torch.uint8), "class": "red" if i % 2 else "blue"})
        return out

    assert wt.linear_probe(model, "image", rows(40, 0), rows(20, 1)).top1 == 1.0
    assert set(wt.zero_shot_top1(model, rows(10, 2))) == {"top1", "chance", "majority", "classes", "samples"}


def test_a_probe_uses_features_before_the_projection():
    """A model with `features` is probed by them, not by its projected embeddings."""

    class Projecting(Identity):
        def features(self, column, sources, batch_size=64):
            return super().embed(column, sources)

        def embed(self, column, sources, batch_size=64):
            return torch.ones(len(sources), 2)

    train, test = clusters(90), clusters(60, seed=1)
    assert (
        wt.linear_probe(Projecting(), "x", train, test).top1
        == wt.linear_probe(Identity(), "x", train, test).top1
    )
