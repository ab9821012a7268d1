"""Baselines of the classification evaluations: logistic regression converges, features are finite, the timm ViT matches ours."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit, fit_best, pooled_mel
from worldtokens.evals.classification.classify_digits import TimmViT
from worldtokens.evals.classification.classify_furniture import GRID, occupancy
from worldtokens.evals.classification.classify_motion import mean_frames
from worldtokens.tasks.classification.mixing import normalized_images


def blobs(n=300, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    centres = torch.tensor([[3.0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 3, 0]])
    return centres[y] * 5 + 5 * torch.randn(n, 4, generator=g) + 100, y


def test_logistic_regression_reaches_its_minimum_and_separates_blobs():
    x, y = blobs()
    model = fit(x, y, 3, decay=0.01)
    w, b = model.weight.clone().requires_grad_(), model.bias.clone().requires_grad_()
    z = (x.double() - x.double().mean(0)) / x.double().std(0)
    (F.cross_entropy(z @ w + b, y) + 0.005 * w.square().sum()).backward()
    assert w.grad.abs().max() < 1e-4 and b.grad.abs().max() < 1e-4
    test = blobs(seed=1)
    assert accuracies(model(test[0]), test[1])["top1"] > 0.9
    assert fit_best(x, y, *test, 3).decay < 1.0


def test_accuracies_match_values_worked_out_by_hand():
    logits = F.one_hot(torch.tensor([0, 0, 0, 1, 0]), 3).double()
    got = accuracies(logits, torch.tensor([0, 0, 0, 1, 1]))
    assert got == {"top1": pytest.approx(0.8), "macro": pytest.approx(0.75)}
    assert classes_of([{"class": "b"}, {"class": "a"}], ["a", "b"]).tolist() == [1, 0]


def test_pooled_mel_of_short_and_long_recordings():
    recordings = [(torch.randn(n).numpy() * 0.1, 16000) for n in (1, 200, 500, 16000)]
    got = pooled_mel(recordings, 16000, 40, 2.0)
    assert got.shape == (4, 120) and got.isfinite().all()
    # a tone that starts late is in the last third only
    waveform = torch.zeros(16000)
    waveform[11000:] = torch.sin(torch.arange(5000) * 0.3)
    thirds = pooled_mel([(waveform.numpy(), 16000)], 16000, 40, 2.0).view(3, 40)
    assert thirds[2].max() > thirds[0].max() + 0.5 and torch.allclose(thirds[0], thirds[0].mean().expand(40))


def test_occupancy_and_mean_frames():
    corner = torch.tensor([[0.0, 0, 0], [2, 1, 1], [2, 1, 1], [0, 0, 0]]).double()
    (got,) = occupancy([corner])
    assert got[:-3].square().sum() == pytest.approx(1) and (got[:-3] > 0).sum() == 2
    assert got[0] == pytest.approx(0.5**0.5) and len(got) == GRID**3 + 3
    assert got[-3:].tolist() == [1, 0.5, 0.5]
    video = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    video[1, :4, :4, 0] = 255
    assert mean_frames([{"video": video.numpy()}])[0].tolist() == [0.5, *[0.0] * 11]


@pytest.mark.parametrize("class_token", [False, True])
def test_the_timm_vit_gets_the_same_pixels_and_has_our_size(class_token):
    torch.manual_seed(0)
    front = wt.ImageTokenizer(32, patch=4, size=20, class_token=class_token, preprocess={"draft": False})
    ours = wt.Classifier(front, wt.Transformer(32, 2, 2), 10, label="class")
    peer = TimmViT(wt.ImageTokenizer(**front._args), [str(i) for i in range(10)], "class", 0.0, 32, 2, 2, 0.0)
    rows = [{"image": r["image"], "class": "7"} for r in samples.open("emoji", split="test")[:3]]
    batch = peer.collate([peer.read(r) for r in rows])
    pixels = normalized_images(front, batch["image"])
    assert (peer.eval()(batch) - peer.trunk(pixels)).abs().max() < 1e-6
    sizes = [sum(p.numel() for p in m.parameters()) for m in (ours, peer.trunk)]
    assert abs(sizes[0] - sizes[1]) <= 2 * 32
    trained = [n for n, p in peer.named_parameters() if p.requires_grad]
    assert trained and all(n.startswith("trunk.") for n in trained)
