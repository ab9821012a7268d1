"""Standardised embedding spaces: torch.nn.BatchNorm1d as the reference, missing columns, CLIP with `standardize`."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.contrastive.standardize import Standardize


def test_outputs_and_gradients_equal_batch_norm():
    """Max abs difference below 1e-5 from torch.nn.BatchNorm1d(affine=False), over the rows that have the column."""
    torch.manual_seed(0)
    has = torch.tensor([True, True, False, True, True, False, True])
    x = (torch.randn(7, 5) * torch.tensor([0.1, 1.0, 3.0, 5.0, 0.5]) + 2).requires_grad_()
    weight = torch.randn(7, 5)
    got = Standardize(5).forward_batch(x, has)
    (got * weight).sum().backward()
    gradient, x.grad = x.grad, None
    want = torch.nn.BatchNorm1d(5, affine=False)(x[has])
    (want * weight[has]).sum().backward()
    assert (got[has] - want).abs().max() < 1e-5 and (got[~has] == 0).all()
    assert (gradient - x.grad).abs().max() < 1e-5


def test_running_statistics_average_the_first_batches_then_decay():
    standard = Standardize(3, momentum=0.25)
    batches = [torch.randn(10, 3, generator=torch.Generator().manual_seed(i)) + i for i in range(9)]
    all_rows = torch.ones(10, dtype=torch.bool)
    for i, batch in enumerate(batches):
        standard.forward_batch(batch, all_rows)
        if i == 3:  # up to 1 / momentum batches: their mean
            assert torch.allclose(standard.mean, torch.stack(batches[:4]).mean((0, 1)), atol=1e-6)
    mean = torch.stack(batches[:4]).mean((0, 1))
    for batch in batches[4:]:
        mean = 0.75 * mean + 0.25 * batch.mean(0)
    assert torch.allclose(standard.mean, mean, atol=1e-5)
    x = torch.randn(4, 3)
    assert torch.allclose(standard(x), (x - standard.mean) / (standard.var + 1e-5).sqrt(), atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_rows_keep_the_running_statistics(rows):
    standard = Standardize(3)
    standard.forward_batch(torch.randn(8, 3) + 1, torch.ones(8, dtype=torch.bool))
    before = {k: v.clone() for k, v in standard.state_dict().items()}
    x = torch.randn(4, 3, requires_grad=True)
    has = torch.arange(4) < rows
    out = standard.forward_batch(x, has)
    assert torch.equal(out[:rows], standard(x)[:rows]) and (out[rows:] == 0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(torch.equal(v, before[k]) for k, v in standard.state_dict().items())


def test_training_uses_batch_statistics_and_evaluation_running_ones(
    make_clip, collate, emoji_rows, image_text_rows
):
    model = make_clip(context=32, standardize=True)
    batch = collate(model, image_text_rows(8))
    raw = [model._projected(name, batch[name]) for name in ("image", "text")]
    a, b = (F.normalize(F.batch_norm(x, None, None, training=True), dim=-1) for x in raw)
    logits = model.logit_scale.exp() * a @ b.T
    want = (F.cross_entropy(logits, torch.arange(8)) + F.cross_entropy(logits.T, torch.arange(8))) / 2
    loss = model.loss(batch)["loss"]
    assert abs(float((loss - want).detach())) < 1e-4
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    captions = [c for r in emoji_rows for c in r["text"]]
    together = model.embed("text", captions, batch_size=7)
    alone = torch.cat([model.embed("text", [c]) for c in captions])
    assert (together - alone).abs().max() < 1e-5
    model.loss(batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_shared_direction_is_removed(make_clip, collate, emoji_rows, image_text_rows):
    """The mean cosine between rows of one column is near 1 without `standardize`, and about 0 with it."""
    plain, model = make_clip(context=32), make_clip(context=32, standardize=True)
    for clip in (plain, model):
        clip.load_state_dict(plain.state_dict(), strict=False)
        clip.train()
        for _ in range(3):
            clip.loss(collate(clip, image_text_rows(24)))
        clip.eval()
    mean = {}
    for name, clip in (("plain", plain), ("standard", model)):
        x = clip.embed("image", [r["image"] for r in emoji_rows])
        mean[name] = float((x @ x.T)[~torch.eye(24, dtype=torch.bool)].mean())
    assert mean["plain"] > 0.5 and abs(mean["standard"]) < 0.1


def test_running_statistics_are_saved(tmp_path, make_clip, collate, image_text_rows):
    model = make_clip(context=32, standardize=True)
    model.loss(collate(model, image_text_rows(8)))
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert torch.equal(again.embed("text", ["a cat"]), model.embed("text", ["a cat"]))
    assert int(again.standardizers["image"].batches) == 1


def test_columns_that_a_batch_lacks_keep_their_statistics(make_clip, collate, image_text_rows):
    model = make_clip(context=32, standardize=True)
    rows = [*image_text_rows(4), {"text": "alone"}]
    model.loss(collate(model, rows))["loss"].backward()
    images = model.standardizers["image"].mean.clone()
    out = model.loss(collate(model, [{"text": "one"}, {"text": "two"}]))
    assert float(out["loss"].detach()) == 0 and torch.equal(model.standardizers["image"].mean, images)
    assert int(model.standardizers["text"].batches) == 2
