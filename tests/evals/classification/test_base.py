"""The baselines of the checks are what they say: a linear model that converges, features without holes."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.evals.baselines.logistic_regression import classes_of, figures, fit, fit_best, pooled_mel
from worldtokens.evals.classification.classify_digits import TimmViT
from worldtokens.evals.classification.classify_furniture import GRID, occupancy
from worldtokens.evals.classification.classify_motion import mean_frames
from worldtokens.tasks.classification.mixing import normalized_images


def blobs(n=300, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    centres = torch.tensor([[3.0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 3, 0]])
    return centres[y] * 5 + 5 * torch.randn(n, 4, generator=g) + 100, y


def test_logistic_regression_reaches_its_minimum_and_tells_blobs_apart():
    x, y = blobs()
    model = fit(x, y, 3, decay=0.01)
    w, b = model.weight.clone().requires_grad_(), model.bias.clone().requires_grad_()
    z = (x.double() - x.double().mean(0)) / x.double().std(0)
    (F.cross_entropy(z @ w + b, y) + 0.005 * w.square().sum()).backward()
    assert w.grad.abs().max() < 1e-4 and b.grad.abs().max() < 1e-4
    held = blobs(seed=1)
    assert figures(model(held[0]), held[1])["top1"] > 0.9
    assert fit_best(x, y, *held, 3).decay < 1.0


def test_figures_by_hand():
    logits = F.one_hot(torch.tensor([0, 0, 0, 1, 0]), 3).double()
    got = figures(logits, torch.tensor([0, 0, 0, 1, 1]))
    assert got == {"top1": pytest.approx(0.8), "macro": pytest.approx(0.75)}
    assert classes_of([{"class": "b"}, {"class": "a"}], ["a", "b"]).tolist() == [1, 0]


def test_pooled_mel_of_short_and_long_sounds():
    sounds = [(torch.randn(n).numpy() * 0.1, 16000) for n in (1, 200, 500, 16000)]
    got = pooled_mel(sounds, 16000, 40, 2.0)
    assert got.shape == (4, 120) and got.isfinite().all()
    # a tone that begins late is in the last third alone
    wave = torch.zeros(16000)
    wave[11000:] = torch.sin(torch.arange(5000) * 0.3)
    thirds = pooled_mel([(wave.numpy(), 16000)], 16000, 40, 2.0).view(3, 40)
    assert thirds[2].max() > thirds[0].max() + 0.5 and torch.allclose(thirds[0], thirds[0].mean().expand(40))


def test_occupancy_and_mean_frames():
    corner = torch.tensor([[0.0, 0, 0], [2, 1, 1], [2, 1, 1], [0, 0, 0]]).double()
    (got,) = occupancy([corner])
    assert got[:-3].square().sum() == pytest.approx(1) and (got[:-3] > 0).sum() == 2
    assert got[0] == pytest.approx(0.5**0.5) and len(got) == GRID**3 + 3
    assert got[-3:].tolist() == [1, 0.5, 0.5]
    clip = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    clip[1, :4, :4, 0] = 255
    assert mean_frames([{"video": clip.numpy()}])[0].tolist() == [0.5, *[0.0] * 11]


@pytest.mark.parametrize("class_token", [False, True])
def test_timms_vit_reads_the_same_pixels_and_is_of_our_size(class_token):
    torch.manual_seed(0)
    front = wt.ImageTokenizer(32, patch=4, size=20, class_token=class_token, preprocess={"draft": False})
    ours = wt.Classifier(front, wt.Transformer(32, 2, 2), 10, label="class")
    theirs = TimmViT(
        wt.ImageTokenizer(**front._args), [str(i) for i in range(10)], "class", 0.0, 32, 2, 2, 0.0
    )
    rows = [{"image": r["image"], "class": "7"} for r in samples.open("emoji", split="test")[:3]]
    batch = theirs.collate([theirs.read(r) for r in rows])
    pixels = normalized_images(front, batch["image"])
    assert (theirs.eval()(batch) - theirs.trunk(pixels)).abs().max() < 1e-6
    sizes = [sum(p.numel() for p in m.parameters()) for m in (ours, theirs.trunk)]
    assert abs(sizes[0] - sizes[1]) <= 2 * 32
    trained = [n for n, p in theirs.named_parameters() if p.requires_grad]
    assert trained and all(n.startswith("trunk.") for n in trained)
