"""Linear probe and zero-shot figures: the optimum is one, figures by hand, splits do not leak."""

import math

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.metrics.probe import logistic


class Given:
    """A model whose embeddings are the sources themselves, and whose classes are named by unit vectors."""

    def __init__(self, classes=()):
        self.classes, self.asked = list(classes), []

    def embed(self, column, sources, batch_size=64):
        self.asked.append(len(sources))
        return torch.stack([torch.as_tensor(s, dtype=torch.float32) for s in sources])

    def class_vectors(self, classes, templates=("{}",), column="text"):
        return torch.eye(len(self.classes))[[self.classes.index(c) for c in classes]]


def clouds(n, classes=3, dim=5, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(9))
    return [
        {
            "x": centres[i % classes] + noise * torch.randn(dim, generator=generator),
            "class": f"c{i % classes}",
        }
        for i in range(n)
    ]


def test_logistic_is_at_the_minimum():
    """The gradient of mean cross-entropy + s |W|^2 / 2 vanishes there, from either start, and every step away is worse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).long() + (x[:, 1] > 1).long()

    def objective(w, b):
        return F.cross_entropy(x @ w.T + b, y) + 0.01 / 2 * w.square().sum()

    w, b = logistic(x, y, 3, 0.01)
    w2, b2 = w.clone().requires_grad_(), b.clone().requires_grad_()
    objective(w2, b2).backward()
    assert w2.grad.abs().max() < 1e-6 and b2.grad.abs().max() < 1e-6
    other, _ = logistic(x, y, 3, 0.01, (torch.ones_like(w), b))
    assert (other - w).abs().max() < 1e-4
    for _ in range(20):
        step = 1e-2 * torch.randn(w.shape, generator=generator, dtype=torch.float64)
        assert objective(w + step, b) > objective(w, b)


def test_two_classes_on_a_line_by_hand():
    """x = -1 / +1, as many of each: minimise log(1 + exp(-2w)) + s w^2, i.e. weights w and -w of difference 2w."""
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    w, b = logistic(x, torch.tensor([0, 1]), 2, 0.1)
    got = float(w[1, 0])
    assert float(w[0, 0]) == pytest.approx(-got, abs=1e-6)
    assert 2 / (1 + math.exp(2 * got)) == pytest.approx(2 * 0.1 * got, abs=1e-5)
    assert float(b[0]) == pytest.approx(float(b[1]), abs=1e-6)


def test_a_probe_tells_classes_apart_and_says_what_guessing_gives():
    probe = wt.linear_probe(Given(), "x", clouds(120), clouds(60, seed=1))
    assert probe.top1 > 0.95 and probe.majority == pytest.approx(1 / 3)
    assert probe.classes == ["c0", "c1", "c2"] and probe.samples == (120, 60)
    # its weights answer for embeddings as they are, not standardised
    x = torch.stack([r["x"] for r in clouds(60, seed=1)]).double()
    answers = (x @ probe.weight.T + probe.bias).argmax(1)
    assert float((answers == torch.arange(60) % 3).double().mean()) == probe.top1


def test_a_probe_on_noise_is_at_chance():
    rows = [
        {"x": torch.randn(5, generator=torch.Generator().manual_seed(i)), "class": i % 4} for i in range(400)
    ]
    assert abs(wt.linear_probe(Given(), "x", rows[:300], rows[300:]).top1 - 0.25) < 0.15


def test_scale_and_shift_of_an_embedding_change_nothing():
    """Features are standardised, and one that is always the same is not blown up."""
    rows, test = clouds(90, noise=1.0), clouds(60, noise=1.0, seed=1)

    def moved(rows):
        return [{**r, "x": torch.cat([100 * r["x"] - 7, torch.tensor([3.0])])} for r in rows]

    a, b = wt.linear_probe(Given(), "x", rows, test), wt.linear_probe(Given(), "x", moved(rows), moved(test))
    assert a.top1 == b.top1 and a.strength == b.strength


def test_validation_rows_choose_and_the_test_rows_do_not():
    """With noise in wide features a strong penalty is chosen; what the test rows hold changes neither choice nor weights."""
    generator = torch.Generator().manual_seed(3)

    def rows(n):
        out = []
        for i in range(n):
            x = torch.randn(60, generator=generator)
            x[0] += 1.5 * (i % 2)
            out.append({"x": x, "class": i % 2})
        return out

    train, validation, test = rows(60), rows(200), rows(40)
    a = wt.linear_probe(Given(), "x", train, test, validation_rows=validation)
    b = wt.linear_probe(Given(), "x", train, rows(30), validation_rows=validation)
    assert a.strength == b.strength >= 0.01 and torch.equal(a.weight, b.weight)


def test_lists_gaps_and_unknown_classes():
    rows = clouds(60)
    rows[0] = {"x": [rows[0]["x"], rows[3]["x"]], "class": "c0"}
    rows += [{"class": "c1"}, {"x": rows[1]["x"]}, {"x": [], "class": "c1"}]
    test = [*clouds(30, seed=1), {"x": clouds(1)[0]["x"], "class": "never seen"}]
    probe = wt.linear_probe(Given(), "x", rows, test)
    assert probe.samples == (61, 31)
    assert probe.top1 <= 30 / 31 + 1e-9
    with pytest.raises(wt.InputError, match="no test row has both 'x' and 'class'"):
        wt.linear_probe(Given(), "x", rows, [{"x": rows[1]["x"]}])
    with pytest.raises(wt.InputError, match="all training rows are of the class 'c0'"):
        wt.linear_probe(Given(), "x", clouds(30, classes=1), test)


def test_zero_shot_by_hand():
    model = Given(["cat", "dog", "owl"])
    rows = [
        {"image": torch.tensor([1.0, 0.2, 0.0]), "class": "cat"},
        {"image": torch.tensor([0.1, 0.9, 0.3]), "class": "dog"},
        {"image": torch.tensor([0.8, 0.1, 0.1]), "class": "dog"},
        {"class": "owl"},
    ]
    figures = wt.zero_shot_top1(model, rows)
    assert figures == {
        "top1": pytest.approx(2 / 3),
        "chance": 0.5,
        "majority": pytest.approx(2 / 3),
        "classes": 2.0,
        "samples": 3.0,
    }
    assert wt.zero_shot_top1(model, rows, classes=["cat", "dog", "owl"])["chance"] == pytest.approx(1 / 3)
    with pytest.raises(wt.InputError, match="class 'dog'"):
        wt.zero_shot_top1(model, rows, classes=["cat"])


def test_a_clip_is_probed_column_by_column():
    """From files to figures: an untrained model's images of two plain colours are told apart by a line."""
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


def test_what_stands_before_the_projection_is_judged():
    """A model that has `features` is judged by them, not by what its projection leaves."""

    class Projecting(Given):
        def features(self, column, sources, batch_size=64):
            return super().embed(column, sources)

        def embed(self, column, sources, batch_size=64):
            return torch.ones(len(sources), 2)

    train, test = clouds(90), clouds(60, seed=1)
    assert (
        wt.linear_probe(Projecting(), "x", train, test).top1
        == wt.linear_probe(Given(), "x", train, test).top1
    )
