"""Quantizers against their formulas worked out by hand."""

import math
import subprocess
import sys

import pytest
import torch

import worldtokens as wt
from worldtokens.tokenizers.discrete.quantize import codebook_use

# ---- FSQ -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (3, 4), (7, 6, 5), (5,), (8, 8, 8, 6, 5)])
def test_fsq_round_trip_over_the_whole_codebook(levels):
    """ids -> codes -> ids is exact, codes differ, and a vector at a code gets its id."""
    q = wt.FSQ(levels)
    assert q.size == math.prod(levels) and q.width == len(levels)
    ids = torch.arange(q.size)
    codes = q.codes(ids)
    assert codes.shape == (q.size, q.width) and len(codes.unique(dim=0)) == q.size
    half = torch.tensor([v // 2 for v in levels])
    basis = torch.tensor([math.prod(levels[:i]) for i in range(len(levels))])
    assert torch.equal((((codes + 1) * half).round().long() * basis).sum(-1), ids)
    # the vector whose bounded value is the level of the code
    level = codes.double() * half
    bound = (torch.tensor(levels) - 1) * 1.001 / 2
    offset = torch.tensor([0.0 if v % 2 else 0.5 for v in levels])
    z = torch.atanh((level + offset) / bound) - torch.atanh(offset / bound)
    assert torch.equal(q.ids(z.float()), ids)
    got, own, loss = q(z.float())
    assert torch.equal(own, ids) and (got - codes).abs().max() < 1e-6 and loss == 0


def test_fsq_by_hand():
    """L = 5: h = 2.002, no offset. L = 8: h = 3.5035, offset 0.5, shift atanh(0.5 / 3.5035) = 0.14370."""
    q = wt.FSQ((8, 5))
    z = torch.tensor([[0.0, 0.0], [1.0, 1.0], [-10.0, 10.0], [10.0, -10.0], [-0.2, 0.3]])
    # tanh(1.14370) 3.5035 - 0.5 = 2.3576 -> 2;  tanh(1) 2.002 = 1.5247 -> 2
    # tanh(-0.05630) 3.5035 - 0.5 = -0.6971 -> -1;  tanh(0.3) 2.002 = 0.5832 -> 1
    assert (q.bounded(z)[[1, 4]] - torch.tensor([[2.3576, 1.5247], [-0.6971, 0.5832]])).abs().max() < 1e-4
    codes, ids, _ = q(z)
    want = [[0, 0], [0.5, 1], [-1, 1], [0.75, -1], [-0.25, 0.5]]
    assert (codes - torch.tensor(want)).abs().max() < 1e-6
    assert ids.tolist() == [4 + 8 * 2, 6 + 8 * 4, 0 + 8 * 4, 7 + 8 * 0, 3 + 8 * 3]


def test_fsq_gradient_is_that_of_the_tanh_bound():
    q = wt.FSQ((5, 5))
    z = torch.tensor([[0.3, -1.2]], requires_grad=True)
    (grad,) = torch.autograd.grad(q(z)[0].sum(), z)
    want = (1 - torch.tanh(z.detach()) ** 2) * 2.002 / 2
    assert (grad - want).abs().max() < 1e-6


def test_fsq_ids_in_half_precision():
    q = wt.FSQ((8, 8, 8, 6, 5)).to(torch.bfloat16)
    assert torch.equal(q.level, torch.tensor([8, 8, 8, 6, 5]))
    z = torch.randn(500, 5).bfloat16()
    assert torch.equal(q.ids(z), wt.FSQ((8, 8, 8, 6, 5)).ids(z.float()))


@pytest.mark.parametrize("levels", [(), (2, 5), (5.0,), "88", 8])
def test_fsq_levels_out_of_range_raise(levels):
    with pytest.raises(wt.InputError, match="levels"):
        wt.FSQ(levels)


# ---- VQ --------------------------------------------------------------------------------------------------------


def set_book(q, book):
    with torch.no_grad():
        q.codebook.copy_(book)
    return q


@pytest.mark.parametrize("ema", [0.9, None])
def test_vq_selects_the_nearest_code_and_is_straight_through(ema):
    q = set_book(wt.VectorQuantizer(50, 6, ema, dead_threshold=0), torch.randn(50, 6)).eval()
    z = torch.randn(3, 4, 6, requires_grad=True)
    codes, ids, loss = q(z)
    assert torch.equal(ids, torch.cdist(z, q.codebook).argmin(-1))
    assert (codes - q.codebook[ids]).abs().max() < 1e-6 and torch.equal(q.codes(ids), q.codebook[ids])
    distance = ((z - q.codebook[ids]) ** 2).mean()
    assert loss.item() == pytest.approx((0.25 if ema else 1.25) * distance.item(), rel=1e-5)
    weight = torch.randn_like(codes)
    (grad,) = torch.autograd.grad((codes * weight).sum(), z, retain_graph=True)
    assert torch.equal(grad, weight)
    (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert (grad - 0.25 * 2 * (z - q.codebook[ids]) / z.numel()).abs().max() < 1e-7
    if ema is None:
        (grad,) = torch.autograd.grad(loss, q.codebook)
        want = torch.zeros_like(grad).index_add(
            0, ids.flatten(), 2 * (q.codebook[ids] - z).flatten(0, 1) / z.numel()
        )
        assert (grad - want).abs().max() < 1e-7


def test_ema_codebook_by_hand():
    """uses and sums decay by 0.9; a code is their quotient."""
    q = set_book(
        wt.VectorQuantizer(3, 1, ema=0.9, dead_threshold=0), torch.tensor([[0.0], [10.0], [20.0]])
    ).train()
    q(torch.tensor([[1.0], [2.0], [9.0]]))
    assert (q.uses - torch.tensor([0.2, 0.1, 0])).abs().max() < 1e-6
    assert (q.codebook - torch.tensor([[1.5], [9.0], [20.0]])).abs().max() < 1e-5
    q(torch.tensor([[0.0], [11.0], [12.0]]))
    # uses 0.18 + 0.1, 0.09 + 0.2; sums 0.27 + 0, 0.81 + 2.3
    assert (q.codebook - torch.tensor([[0.27 / 0.28], [3.11 / 0.29], [20.0]])).abs().max() < 1e-5
    before = q.codebook.clone()
    q.eval()(torch.tensor([[5.0]]))
    q.train().ids(torch.tensor([[5.0]]))
    assert torch.equal(q.codebook, before)


@pytest.mark.parametrize("ema", [0.9, None])
def test_dead_codes_are_reset(ema):
    """A codebook far from all vectors: without resets one code is used, with them nearly all."""
    z = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    used = {}
    for dead_threshold in (0, 0.1):
        torch.manual_seed(0)
        q = set_book(
            wt.VectorQuantizer(64, 4, ema, dead_threshold=dead_threshold), torch.randn(64, 4) * 0.01 + 100
        ).train()
        optimizer = torch.optim.SGD(q.parameters(), lr=0.1) if ema is None else None
        for _ in range(20):
            _, _, loss = q(z)
            if optimizer:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        used[dead_threshold] = float(codebook_use(q.ids(z), 64)["used"])
    assert used[0] < 0.1 and used[0.1] > 0.9


def test_codebook_use_by_hand():
    use = codebook_use(torch.tensor([[0, 0], [1, 3]]), 8)
    assert use["used"] == 3 / 8
    assert use["perplexity"].item() == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)))
    assert codebook_use(torch.arange(8), 8)["perplexity"].item() == pytest.approx(8)


RANK = """
import sys, torch, worldtokens as wt
folder, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(rank)
z = torch.load(f"{folder}/z.pt").chunk(2)[rank]
settled, fresh = wt.VectorQuantizer(8, 2).train(), wt.VectorQuantizer(8, 2).train()
settled.load_state_dict(torch.load(f"{folder}/start.pt"))
for _ in range(3):
    settled(z), fresh(z)
torch.save([settled.state_dict(), fresh.state_dict()], f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_update_as_one(tmp_path):
    """Codes in use equal those of one process within 1e-5; reset ones are equal on both."""
    torch.manual_seed(0)
    z = torch.randn(40, 2)
    one = wt.VectorQuantizer(8, 2).train()
    one.codebook.copy_(z[:8])
    one.uses.fill_(5)  # all alive
    one.sums.copy_(5 * z[:8])
    torch.save(one.state_dict(), tmp_path / "start.pt")
    torch.save(z, tmp_path / "z.pt")
    for _ in range(3):
        one(z)
    runs = [subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(r)]) for r in (0, 1)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    (a, fresh_a), (b, fresh_b) = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    assert all(torch.equal(a[k], b[k]) and torch.equal(fresh_a[k], fresh_b[k]) for k in a)
    assert all((a[k] - v).abs().max() < 1e-5 for k, v in one.state_dict().items())
    assert (fresh_a["codebook"].abs().sum(1) > 0).all()
