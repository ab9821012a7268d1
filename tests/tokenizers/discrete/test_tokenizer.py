"""Images as ids: the quantizers against their formulas by hand, and the autoencoder on real images."""

import copy
import io
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.discrete.quantize import codebook_use


@pytest.fixture(scope="module")
def emoji():
    return [row["image"] for row in itertools.islice(samples.open("emoji", split="train"), 0, 60, 5)]


def small(quantizer=None, **options):
    torch.manual_seed(0)
    options = {"size": 32, "width": 16, "depth": 1, **options}
    return wt.DiscreteTokenizer(16, quantizer=quantizer, **options)


# ---- FSQ -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (3, 4), (7, 6, 5), (5,), (8, 8, 8, 6, 5)])
def test_fsq_round_trip_over_the_whole_codebook(levels):
    """ids -> codes -> ids is exact, codes differ, and a vector that lies at a code is told its id."""
    q = wt.FSQ(levels)
    assert q.size == math.prod(levels) and q.width == len(levels)
    ids = torch.arange(q.size)
    codes = q.codes(ids)
    assert codes.shape == (q.size, q.width) and len(codes.unique(dim=0)) == q.size
    half = torch.tensor([v // 2 for v in levels])
    basis = torch.tensor([math.prod(levels[:i]) for i in range(len(levels))])
    assert torch.equal((((codes + 1) * half).round().long() * basis).sum(-1), ids)
    # the vector whose bounded form is the code's own level
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


def test_fsq_gradient_is_that_of_the_bound():
    q = wt.FSQ((5, 5))
    z = torch.tensor([[0.3, -1.2]], requires_grad=True)
    (grad,) = torch.autograd.grad(q(z)[0].sum(), z)
    want = (1 - torch.tanh(z.detach()) ** 2) * 2.002 / 2
    assert (grad - want).abs().max() < 1e-6


def test_fsq_in_half_precision_counts_right():
    q = wt.FSQ((8, 8, 8, 6, 5)).to(torch.bfloat16)
    assert torch.equal(q.level, torch.tensor([8, 8, 8, 6, 5]))
    z = torch.randn(500, 5).bfloat16()
    assert torch.equal(q.ids(z), wt.FSQ((8, 8, 8, 6, 5)).ids(z.float()))


@pytest.mark.parametrize("levels", [(), (2, 5), (5.0,), "88", 8])
def test_fsq_levels_out_of_range(levels):
    with pytest.raises(wt.InputError, match="levels"):
        wt.FSQ(levels)


# ---- VQ --------------------------------------------------------------------------------------------------------


def set_book(q, book):
    with torch.no_grad():
        q.codebook.copy_(book)
    return q


@pytest.mark.parametrize("ema", [0.9, None])
def test_vq_picks_the_nearest_and_passes_gradients_straight(ema):
    q = set_book(wt.VectorQuantizer(50, 6, ema, revive=0), torch.randn(50, 6)).eval()
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
    """uses and sums move by 0.9 / 0.1; a code is their quotient, weighted by how often it was used."""
    q = set_book(wt.VectorQuantizer(3, 1, ema=0.9, revive=0), torch.tensor([[0.0], [10.0], [20.0]])).train()
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
def test_dead_codes_come_alive(ema):
    """A codebook far from all vectors: without revival one code takes all, with it nearly all are used."""
    z = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    used = {}
    for revive in (0, 0.1):
        torch.manual_seed(0)
        q = set_book(wt.VectorQuantizer(64, 4, ema, revive=revive), torch.randn(64, 4) * 0.01 + 100).train()
        optimizer = torch.optim.SGD(q.parameters(), lr=0.1) if ema is None else None
        for _ in range(20):
            _, _, loss = q(z)
            if optimizer:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        used[revive] = float(codebook_use(q.ids(z), 64)["used"])
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
def test_two_processes_learn_what_one_learns(tmp_path):
    """Codes that live are equal to one process's within 1e-5; those put anew are equal on both."""
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


# ---- the front-end ---------------------------------------------------------------------------------------------

BAD = [b"", b"no image", "/no/such/file.png", 7]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("quantizer", [lambda: wt.FSQ((8, 5, 5)), lambda: wt.VectorQuantizer(64, 4)])
def test_the_contract(emoji, quantizer, causal):
    """The autoencoder is frozen: as a front-end it gets no gradient, by design."""
    tok = small(quantizer(), causal=causal).freeze()
    run = check_tokenizer(tok, emoji[:4], bad=BAD)
    assert "check_gradients" in run and "check_refused" in run


def test_the_default_quantizer_and_freezing_are_saved(emoji, tmp_path):
    tok = small().freeze()
    assert tok.codebook_size == 1000
    tok.save(tmp_path)
    back = wt.load(tmp_path)
    assert back.frozen and not any(p.requires_grad for p in back.codec.parameters())
    batch = tok.collate([tok.read(p) for p in emoji])
    assert torch.equal(back.encode(batch), tok.encode(batch))
    assert not tok.train().codec.training and tok.freeze(False).codec.training


def test_tokens_of_a_picture(emoji):
    tok = small(size=(16, 24)).eval()
    batch = tok.collate([tok.read(p) for p in emoji[:3]])
    ids = tok.encode(batch)
    assert ids.shape == (3, 2, 3) and ids.dtype == torch.int64
    t = tok(batch)
    assert t.ids.tolist() == [[1000, *row] for row in ids.flatten(1).tolist()]
    assert t.layout.order == "causal" and t.block[0].tolist() == list(range(7))
    want = [[0, 0, 0], [1, 0, 0], [2, 0, 1], [3, 0, 2], [4, 1, 0], [5, 1, 1], [6, 1, 2]]
    assert t.pos[1].tolist() == want
    assert torch.equal(t.x, tok.embedding(t.ids) + tok.position)
    assert torch.equal(t.x[:, 4:6], tok.embed(t.ids[:, 4:6], offset=4))
    assert torch.equal(tok.embedded(ids.flatten(1)).x, t.x)
    plain = small(size=(16, 24), causal=False)(batch)
    assert (
        plain.shape[1] == 6
        and plain.layout.order == "bidirectional"
        and plain.pos[0].tolist()[5] == [0, 1, 2]
    )


def test_what_encode_and_decode_take(emoji):
    tok = small(size=64)
    batch = tok.collate([tok.read(p) for p in emoji])
    pixels = batch["pixels"]
    assert np.array_equal(  # 64 x 64 already: the very pixels, on white
        pixels[0].permute(1, 2, 0).numpy(),
        np.array(
            Image.alpha_composite(
                Image.new("RGBA", (64, 64), "white"), Image.open(io.BytesIO(emoji[0])).convert("RGBA")
            ).convert("RGB")
        ),
    )
    ids = tok.encode(batch)
    assert torch.equal(tok.encode(pixels), ids) and torch.equal(tok.encode(pixels.double() / 255), ids)
    out = tok.decode(ids)
    assert out.shape == pixels.shape and out.dtype == torch.float32 and out.min() >= 0 and out.max() <= 1
    assert torch.equal(tok.decode(ids, torch.uint8), (out * 255).round().byte())
    assert torch.equal(tok.decode(ids.flatten(1)), out) and torch.equal(tok.decode(tok(batch).ids), out)


def test_the_loss_is_the_error_of_the_round_trip(emoji):
    tok = small(size=64)
    batch = tok.collate([tok.read(p) for p in emoji])
    loss = tok.loss(batch)
    x = tok._pixels(batch)
    with torch.no_grad():
        rebuilt = tok.codec.decoder(tok.codec.quantizer.codes(tok.encode(batch)).movedim(-1, 1))
    assert loss["loss"].item() == pytest.approx(((rebuilt - x) ** 2).mean().item(), rel=1e-5)
    assert loss["mse"].item() == pytest.approx(loss["loss"].item() / 4, rel=1e-5)
    assert loss["perplexity"].item() == pytest.approx(tok.usage(batch)["perplexity"])


@pytest.mark.parametrize("quantizer", [wt.FSQ, lambda: wt.VectorQuantizer(64, 8, ema=None)])
def test_gradients_reach_every_weight_of_the_autoencoder(emoji, quantizer):
    tok = small(quantizer()).train()
    batch = tok.collate([tok.read(p) for p in emoji])
    optimizer = torch.optim.SGD(tok.codec.parameters(), lr=0.1)
    tok.loss(batch)["loss"].backward()
    optimizer.step()  # away from the zeros that blocks begin with
    optimizer.zero_grad()
    tok.loss(batch)["loss"].backward()
    for name, p in tok.codec.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), name
    assert tok.embedding.weight.grad is None


def test_ids_do_not_depend_on_precision(emoji):
    """Half-precision weights around it, or autocast, leave an image's ids alone; embeddings follow."""
    tok = small().eval()
    batch = tok.collate([tok.read(p) for p in emoji])
    half = copy.deepcopy(tok).to(torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in half.codec.parameters())
    assert torch.equal(half.encode(batch), tok.encode(batch))
    assert torch.equal(half.decode(tok.encode(batch)), tok.decode(tok.encode(batch)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tok.encode(batch), tok.encode(batch["pixels"]))
    assert torch.equal(tok(batch).ids, half(batch).ids)
    assert half.to("meta").codec.encoder[0].weight.device.type == "meta"


def test_nothing_of_the_codec_moves_once_frozen(emoji):
    tok = small(wt.VectorQuantizer(64, 4)).train()
    batch = tok.collate([tok.read(p) for p in emoji])
    before = tok.codec.quantizer.codebook.clone()
    tok.freeze()
    tok.loss(batch), tok(batch)
    assert torch.equal(tok.codec.quantizer.codebook, before)
    tok.freeze(False)
    tok(batch), tok.encode(batch)
    assert torch.equal(tok.codec.quantizer.codebook, before)
    tok.loss(batch)
    assert not torch.equal(tok.codec.quantizer.codebook, before)


def test_what_is_refused(emoji):
    tok = small()
    ids = torch.zeros(1, 4, 4, dtype=torch.long)
    for wrong, found in (
        (ids.float(), "whole numbers"),
        (ids[:, :3], "expected 16 an image"),
        (ids + 1000, "leave the start token 1000 out"),
        (ids - 1, "run from -1"),
    ):
        with pytest.raises(wt.InputError, match=found):
            tok.decode(wrong)
    for wrong in (
        torch.zeros(1, 3, 8, 8),
        torch.zeros(3, 32, 32),
        torch.zeros(1, 3, 32, 32, dtype=torch.long),
    ):
        with pytest.raises(wt.InputError, match=r"expected \(B, 3, 32, 32\)"):
            tok.encode(wrong)
    for options in (
        {"size": 30},
        {"factor": 0},
        {"quantizer": torch.nn.Identity()},
        {"background": (0, 0, 300)},
    ):
        with pytest.raises(wt.InputError):
            small(**options)
    with pytest.raises(wt.InputError, match="no image to collate"):
        tok.collate([])
    with pytest.raises(wt.InputError, match="image 1 of the batch"):
        tok.collate([tok.read(emoji[0]), torch.zeros(3, 4, 4)])


# ---- quality, on 3,050 real images ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures():
    """uint8 (B, 3, 64, 64) of both sides of the emoji set."""
    tok = small(size=64)
    sides = {s: samples.open("emoji", split=s) for s in ("train", "test")}
    return {s: tok.collate([tok.read(row["image"]) for row in rows])["pixels"] for s, rows in sides.items()}


def trained(quantizer, pixels, steps=1600, batch=16, rate=2e-3):
    """An autoencoder trained for `steps`, the rate rising over 50 of them and falling to nothing."""
    torch.manual_seed(0)
    tok = wt.DiscreteTokenizer(96, size=64, factor=8, width=96, depth=1, quantizer=quantizer)
    optimizer = torch.optim.AdamW(tok.codec.parameters(), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        loss = tok.loss(pixels[torch.randint(len(pixels), (batch,))])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tok.eval().freeze()


def report(tok, pixels):
    """Error of values in [0, 1] after the way through ids, that of the mean colour of each patch, and codes used."""
    x = pixels.float() / 255
    ids = torch.cat([tok.encode(p) for p in pixels.split(64)])
    error = F.mse_loss(torch.cat([tok.decode(i) for i in ids.split(64)]), x)
    # 64 colours an image, not even rounded, against 64 ids
    flat = F.interpolate(F.avg_pool2d(x, tok.factor), scale_factor=tok.factor)
    return float(error), float(F.mse_loss(flat, x)), codebook_use(ids, tok.codebook_size)


@pytest.fixture(scope="module")
def fsq(pictures):
    return trained(wt.FSQ((8, 5, 5, 5)), pictures["train"])


@pytest.mark.slow
def test_fsq_pictures_beat_mean_colours(fsq, pictures):
    """Held-out images: under half the error of one mean colour a patch; over half of the 1,000 codes in use."""
    error, flat, use = report(fsq, pictures["test"])
    print(
        f"FSQ: mse {error:.5f}, mean colours {flat:.5f}, used {use['used']:.3f}, perplexity {use['perplexity']:.0f}"
    )
    assert error < 0.5 * flat
    assert use["used"] > 0.5


@pytest.mark.slow
def test_vq_pictures_beat_mean_colours(pictures):
    """As above for a learned codebook of 1,000."""
    tok = trained(wt.VectorQuantizer(1000, 16), pictures["train"])
    error, flat, use = report(tok, pictures["test"])
    print(
        f"VQ: mse {error:.5f}, mean colours {flat:.5f}, used {use['used']:.3f}, perplexity {use['perplexity']:.0f}"
    )
    assert error < 0.5 * flat
    assert use["used"] > 0.5


@pytest.mark.slow
def test_a_language_model_learns_pictures_and_draws(fsq, pictures):
    """Ids of held-out images, nats per token: a causal trunk is 15 % below counts of ids, and below counts by place."""
    torch.manual_seed(0)
    ids = {s: torch.cat([fsq.encode(p).flatten(1) for p in v.split(64)]) for s, v in pictures.items()}
    trunk, head = wt.Transformer(96, 3, 4), torch.nn.Linear(96, fsq.codebook_size)
    weights = [*trunk.parameters(), *head.parameters(), *(p for p in fsq.parameters() if p.requires_grad)]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)

    def nats(rows):
        return F.cross_entropy(head(trunk(fsq.embedded(rows)).x[:, :-1]).flatten(0, 1), rows.flatten())

    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 30) * (1 - step / 300)
        optimizer.zero_grad()
        nats(ids["train"][torch.randint(len(ids["train"]), (32,))]).backward()
        optimizer.step()
    counts = torch.bincount(ids["train"].flatten(), minlength=fsq.codebook_size) + 1.0
    single = F.cross_entropy(counts.log().expand(ids["test"].numel(), -1), ids["test"].flatten())
    # each place's own counts, mixed with those of all places because 3,050 images are few for 64 tables
    here = F.one_hot(ids["train"], fsq.codebook_size).float().mean(0)  # (N, K)
    mixed = (0.7 * here + 0.3 * counts / counts.sum()).log()
    placed = F.nll_loss(mixed.expand(len(ids["test"]), -1, -1).flatten(0, 1), ids["test"].flatten())
    with torch.no_grad():
        model = nats(ids["test"])
        print(f"language model: {model:.3f} nats per token, counts {single:.3f}, by place {placed:.3f}")
        assert model < 0.85 * single and model < placed
        drawn = torch.zeros(4, 0, dtype=torch.long)
        for i in range(fsq.count):
            # a causal trunk: what stands behind place i does not matter
            tokens = fsq.embedded(F.pad(drawn, (0, fsq.count - i)))
            drawn = torch.cat([drawn, head(trunk(tokens).x[:, i]).softmax(-1).multinomial(1)], 1)
    pixels = fsq.decode(drawn, torch.uint8)
    assert pixels.shape == (4, 3, 64, 64)
    # what it draws is as flat at the corners as emoji on white are
    assert pixels[:, :, :4, :4].float().mean() > 200
