"""Standardised spaces: torch's BatchNorm1d as the reference, rows that lack a column, and CLIP with it."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tasks.contrastive.standardize import Standardize

ROWS = samples.open("emoji", split="validation")[:24]


def make(**options):
    torch.manual_seed(0)
    tokenizers = {
        "image": wt.ImageTokenizer(dim=32, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=32, context=32),
    }
    return wt.CLIP(tokenizers, wt.Transformer(32, 2, 2), 16, **options)


def batch_of(model, rows):
    return model.collate([model.read(r) for r in rows])


def pairs(n):
    return [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:n]]


def test_outputs_and_gradients_are_those_of_batch_normalisation():
    """Max abs difference below 1e-5 from torch.nn.BatchNorm1d(affine=False), over the rows that are there."""
    torch.manual_seed(0)
    has = torch.tensor([True, True, False, True, True, False, True])
    x = (torch.randn(7, 5) * torch.tensor([0.1, 1.0, 3.0, 5.0, 0.5]) + 2).requires_grad_()
    weight = torch.randn(7, 5)
    got = Standardize(5).of_batch(x, has)
    (got * weight).sum().backward()
    mine, x.grad = x.grad, None
    want = torch.nn.BatchNorm1d(5, affine=False)(x[has])
    (want * weight[has]).sum().backward()
    assert (got[has] - want).abs().max() < 1e-5 and (got[~has] == 0).all()
    assert (mine - x.grad).abs().max() < 1e-5


def test_running_figures_average_the_first_batches_and_then_follow():
    standard = Standardize(3, follow=0.25)
    batches = [torch.randn(10, 3, generator=torch.Generator().manual_seed(i)) + i for i in range(9)]
    everyone = torch.ones(10, dtype=torch.bool)
    for i, batch in enumerate(batches):
        standard.of_batch(batch, everyone)
        if i == 3:  # up to 1 / follow batches: their plain mean
            assert torch.allclose(standard.mean, torch.stack(batches[:4]).mean((0, 1)), atol=1e-6)
    mean = torch.stack(batches[:4]).mean((0, 1))
    for batch in batches[4:]:
        mean = 0.75 * mean + 0.25 * batch.mean(0)
    assert torch.allclose(standard.mean, mean, atol=1e-5)
    x = torch.randn(4, 3)
    assert torch.allclose(standard(x), (x - standard.mean) / (standard.var + 1e-5).sqrt(), atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_rows_change_nothing(rows):
    standard = Standardize(3)
    standard.of_batch(torch.randn(8, 3) + 1, torch.ones(8, dtype=torch.bool))
    before = {k: v.clone() for k, v in standard.state_dict().items()}
    x = torch.randn(4, 3, requires_grad=True)
    has = torch.arange(4) < rows
    out = standard.of_batch(x, has)
    assert torch.equal(out[:rows], standard(x)[:rows]) and (out[rows:] == 0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(torch.equal(v, before[k]) for k, v in standard.state_dict().items())


def test_the_loss_is_by_the_batch_and_answers_by_running_figures():
    model = make(standardize=True)
    batch = batch_of(model, pairs(8))
    raw = [model._projected(name, batch[name]) for name in ("image", "text")]
    a, b = (F.normalize(F.batch_norm(x, None, None, training=True), dim=-1) for x in raw)
    logits = model.logit_scale.exp() * a @ b.T
    want = (F.cross_entropy(logits, torch.arange(8)) + F.cross_entropy(logits.T, torch.arange(8))) / 2
    loss = model.loss(batch)["loss"]
    assert abs(float((loss - want).detach())) < 1e-4
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    held = {k: v.clone() for k, v in model.state_dict().items()}
    captions = [c for r in ROWS for c in r["text"]]
    together = model.embed("text", captions, batch_size=7)
    alone = torch.cat([model.embed("text", [c]) for c in captions])
    assert (together - alone).abs().max() < 1e-5
    model.loss(batch)
    assert all(torch.equal(v, held[k]) for k, v in model.state_dict().items())


def test_what_all_share_is_no_likeness():
    """A direction that every vector has leaves: cosines of a column's rows, near 1 before, are about 0 in the mean."""
    plain, model = make(), make(standardize=True)
    for net in (plain, model):
        net.load_state_dict(plain.state_dict(), strict=False)
        net.train()
        for _ in range(3):
            net.loss(batch_of(net, pairs(24)))
        net.eval()
    mean = {}
    for name, net in (("plain", plain), ("standard", model)):
        x = net.embed("image", [r["image"] for r in ROWS])
        mean[name] = float((x @ x.T)[~torch.eye(24, dtype=torch.bool)].mean())
    assert mean["plain"] > 0.5 and abs(mean["standard"]) < 0.1


def test_saved_and_loaded_with_its_figures(tmp_path):
    model = make(standardize=True)
    model.loss(batch_of(model, pairs(8)))
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert torch.equal(again.embed("text", ["a cat"]), model.embed("text", ["a cat"]))
    assert int(again.standards["image"].batches) == 1


def test_columns_that_a_batch_lacks_keep_their_figures():
    model = make(standardize=True)
    rows = [*pairs(4), {"text": "alone"}]
    model.loss(batch_of(model, rows))["loss"].backward()
    images = model.standards["image"].mean.clone()
    out = model.loss(batch_of(model, [{"text": "one"}, {"text": "two"}]))
    assert float(out["loss"].detach()) == 0 and torch.equal(model.standards["image"].mean, images)
    assert int(model.standards["text"].batches) == 2
