"""Content of batches: the embedded images, read by real front-ends and augmented by torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import worldtokens as wt
from worldtokens.data.manifests import open_rows
from worldtokens.errors import InputError
from worldtokens.training.data import Batches, BatchPlan, iterate_batches
from worldtokens.training.loop import train
from worldtokens.training.settings import TrainSettings

N = 60


@pytest.fixture(scope="module")
def rows():
    return open_rows("emoji", split="train")[:N]


@pytest.fixture(scope="module")
def clip(rows):
    return small_clip(rows)


def small_clip(rows):
    torch.manual_seed(0)
    return wt.CLIP(
        tokenizers={
            "image": wt.ImageTokenizer(dim=32, patch=16, size=64),
            "text": wt.TextTokenizer.train(rows.texts(), vocab_size=400, dim=32, context=48),
        },
        trunk=wt.Transformer(dim=32, depth=1, heads=2),
        dim=32,
    )


AUGMENT = {"image": v2.Compose([v2.RandomResizedCrop(64, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()])}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def collect(batches, first, end, workers):
    return [batch for batch, _ in iterate_batches(batches, first, end, workers)]


# ---- order -----------------------------------------------------------------------------------------------


def test_each_epoch_has_whole_batches_of_distinct_rows_in_its_own_order():
    plan = BatchPlan(rows=103, batch=8, gradient_accumulation_steps=2, seed=5)
    assert plan.steps_per_epoch == 12
    orders = [plan.order(e).tolist() for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(103)) and BatchPlan(103, 8, seed=6).order(0).tolist() != orders[0]
    seen = []
    for k in range(24):
        epoch, step_slice, own = plan.locate(k)
        assert epoch == 0 and step_slice.start <= own.start < own.stop <= step_slice.stop
        seen += orders[0][own]
    assert seen == orders[0][:96]
    assert plan.locate(24)[0] == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_split_the_batch_of_a_single_process(ranks):
    one = BatchPlan(rows=100, batch=16, gradient_accumulation_steps=2)
    for k in range(12):
        epoch, step_slice, own = one.locate(k)
        order, shares = one.order(epoch), []
        for rank in range(ranks):
            other = BatchPlan(rows=100, batch=16, gradient_accumulation_steps=2, ranks=ranks, rank=rank)
            assert other.steps_per_epoch == one.steps_per_epoch and other.locate(k)[1] == step_slice
            shares += other.order(epoch)[other.locate(k)[2]].tolist()
        assert shares == order[own].tolist()


def test_indivisible_batches_raise_at_the_start():
    with pytest.raises(InputError, match="multiple of 6"):
        BatchPlan(rows=100, batch=16, gradient_accumulation_steps=2, ranks=3)
    with pytest.raises(InputError, match=r"5 training rows, fewer than one batch of 8"):
        BatchPlan(rows=5, batch=8)


# ---- workers and cache -----------------------------------------------------------------------------------


def test_batches_do_not_depend_on_workers_or_cache(clip, rows):
    """0, 1 and 2 workers, with and without a cache, from the start or from the middle: identical batches."""
    plan = BatchPlan(rows=len(rows), batch=20, gradient_accumulation_steps=2, seed=3)
    many = [
        {"image": r["image"], "text": [r["text"]] if isinstance(r["text"], str) else r["text"]} for r in rows
    ]
    many = [{**r, "text": [*r["text"], "a second caption", "a third"]} for r in many]

    def make(cache=0):
        return Batches(clip, many, plan, AUGMENT, cache)

    want = collect(make(), 0, 12, 0)  # two epochs
    for workers, cache in ((0, 2**24), (0, 2**16), (1, 0), (2, 0), (2, 2**24)):
        got = collect(make(cache), 0, 12, workers)
        assert all(equal(a, b) for a, b in zip(want, got, strict=True)), (workers, cache)
    late = collect(make(), 7, 12, 1)
    assert all(equal(a, b) for a, b in zip(want[7:], late, strict=True))
    assert not any(
        equal(a, b) for a, b in zip(want[:6], want[6:], strict=True)
    )  # each epoch draws other samples


def test_each_epoch_draws_other_augmentation_and_captions(clip, rows):
    one = [{**rows[0], "text": [f"caption {i}" for i in range(50)]}]
    batches = Batches(clip, one, BatchPlan(rows=1, batch=1), AUGMENT)
    read = collect(batches, 0, 20, 0)
    ids = {tuple(b["text"]["ids"].flatten().tolist()) for b in read}
    images = {tuple(v.sum().item() for v in b["image"].values() if isinstance(v, torch.Tensor)) for b in read}
    assert len(ids) > 10 and len(images) > 15


def test_numpy_augmentation_differs_between_rows_workers_and_epochs(clip, rows):
    drawn = []

    def record(raw):
        drawn.append(float(np.random.rand()))
        return raw

    collect(Batches(clip, rows, BatchPlan(rows=N, batch=30), {"image": record}), 0, 4, 0)
    assert len(drawn) == 2 * N == len(set(drawn))


def test_reading_restores_the_global_generators(clip, rows):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    collect(Batches(clip, rows, BatchPlan(rows=N, batch=30), AUGMENT), 0, 2, 0)
    collect(Batches(clip, rows, BatchPlan(rows=N, batch=30), AUGMENT), 0, 2, 1)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_the_cache_is_bounded_and_unaffected_by_in_place_transforms(clip, rows):
    calls, real = [], wt.ImageTokenizer.read
    batches = Batches(clip, rows, BatchPlan(rows=N, batch=N), {"image": lambda raw: raw.zero_()}, cache=2**24)
    front = batches._reader.tokenizers["image"]
    first = real(clip.tokenizers["image"], rows[0]["image"])
    with pytest.MonkeyPatch.context() as m:
        m.setattr(wt.ImageTokenizer, "read", lambda self, s: calls.append(s) or real(self, s))
        collect(batches, 0, 3, 0)
        assert len(calls) == len(set(calls)) == len({r["image"] for r in rows})  # each image decoded once
    assert torch.equal(front.read(rows[0]["image"]), first) and first.any()
    small = Batches(clip, rows, BatchPlan(rows=N, batch=N), cache=100_000)
    collect(small, 0, 2, 0)
    cached = [v for t in small._reader.tokenizers.values() for v in t.cached.values()]
    assert 0 < sum(v.nbytes for v in cached) <= 100_000


# ---- bad rows ----------------------------------------------------------------------------------------------


def test_a_bad_row_is_replaced_by_another_and_reported(clip, rows, tmp_path, capsys):
    broken = [dict(r) for r in rows]
    for i in (3, 17, 40):
        broken[i]["image"] = str(tmp_path / f"missing-{i}.png")
    plan = BatchPlan(rows=N, batch=20)
    for workers in (0, 2):
        read = list(iterate_batches(Batches(clip, broken, plan), 0, 6, workers))
        assert all(batch["weight"] == 20 for batch, _ in read)
        bad = dict(pair for _, pairs in read for pair in pairs)
        assert sorted(bad) == [3, 17, 40] and all(f"missing-{i}.png" in bad[i] for i in bad)
    run = TrainSettings(out=str(tmp_path / "run"), steps=6, batch_size=20, device="cpu", tensorboard=False)
    report = train(small_clip(rows), broken, train=run)
    out = capsys.readouterr().out
    assert sorted(report.bad_rows) == [3, 17, 40]
    assert "3 of 60 rows could not be used" in out and "missing-17.png" in out


def test_a_row_that_only_collate_rejects_is_dropped(clip, rows):
    twin = small_clip(rows)
    real = twin.collate

    def picky(items):
        if any(len(r["text"]) > longest for r in items):
            raise InputError("a text is too long")
        return real(items)

    rows = [{**r, "text": r["text"] if isinstance(r["text"], str) else r["text"][0]} for r in rows]
    lengths = sorted(len(twin.read(r)["text"]) for r in rows)
    longest = lengths[-3]
    twin.collate = picky
    batch, bad = Batches(twin, rows, BatchPlan(rows=N, batch=N))[0]
    over = sum(n > longest for n in lengths)
    assert over and batch["weight"] == N - over and len(bad) == over


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_only_bad_rows_raises_one_error(clip, rows, tmp_path, workers):
    broken = [{"image": f"/nowhere/{i}.png", "text": r["text"]} for i, r in enumerate(rows)]
    run = TrainSettings(
        out=str(tmp_path), steps=2, batch_size=8, device="cpu", workers=workers, tensorboard=False
    )
    with pytest.raises(InputError, match=r"none of the \d+ rows tried.*/nowhere/\d+.png.*data.columns"):
        train(small_clip(rows), broken, train=run)
    with pytest.raises(InputError, match="none of this task's"):
        train(small_clip(rows), [{"photo": "x"}] * 8, train=run)


def test_best_and_last_are_loadable_models(clip, rows, tmp_path):
    """A trained CLIP is loaded from both folders and gives the same embeddings and metrics."""
    task = small_clip(rows)
    run = TrainSettings(
        out=str(tmp_path), steps=6, eval_every=3, batch_size=20, device="cpu", tensorboard=False, workers=1
    )
    report = train(task, rows, rows[:20], train=run, augment=AUGMENT)
    last, best = wt.load(tmp_path / "last"), wt.load(tmp_path / "best")
    captions = [r if isinstance(r, str) else r[0] for r in (row["text"] for row in rows)]
    assert torch.equal(last.embed("text", captions), task.embed("text", captions))
    assert best.evaluate(rows[:20])["mean/R@10"] == pytest.approx(report.best["mean/R@10"])
    assert report.best_step in (3, 6)
