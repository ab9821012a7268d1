"""Reconstruction of held-out images, and a language model of their ids, on 3,050 real images."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tokenizers.discrete.quantize import codebook_use


@pytest.fixture(scope="module")
def images():
    """uint8 (B, 3, 64, 64) of both splits of the emoji set."""
    tok = wt.DiscreteTokenizer(16, size=64, width=16, depth=1)
    splits = {s: samples.open("emoji", split=s) for s in ("train", "test")}
    return {s: tok.collate([tok.read(row["image"]) for row in rows])["pixels"] for s, rows in splits.items()}


def trained(quantizer, pixels, steps=1600, batch=16, lr=2e-3):
    """An autoencoder trained for `steps`, with 50 steps of warmup and linear decay to 0."""
    torch.manual_seed(0)
    tok = wt.DiscreteTokenizer(96, size=64, factor=8, width=96, depth=1, quantizer=quantizer)
    optimizer = torch.optim.AdamW(tok.codec.parameters(), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        loss = tok.loss(pixels[torch.randint(len(pixels), (batch,))])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tok.eval().freeze()


def report(tok, pixels):
    """MSE of values in [0, 1] of the reconstruction and of the mean colour of each patch, and the use of the codebook."""
    x = pixels.float() / 255
    ids = torch.cat([tok.encode(p) for p in pixels.split(64)])
    error = F.mse_loss(torch.cat([tok.decode(i) for i in ids.split(64)]), x)
    # 64 unrounded colours per image, against 64 ids
    flat = F.interpolate(F.avg_pool2d(x, tok.factor), scale_factor=tok.factor)
    return float(error), float(F.mse_loss(flat, x)), codebook_use(ids, tok.codebook_size)


@pytest.fixture(scope="module")
def fsq(images):
    return trained(wt.FSQ((8, 5, 5, 5)), images["train"])


@pytest.mark.slow
def test_fsq_reconstructions_beat_mean_colours(fsq, images):
    """Held-out images: under half the MSE of one mean colour per patch; over half of the 1,000 codes used."""
    error, flat, use = report(fsq, images["test"])
    print(
        f"FSQ: mse {error:.5f}, mean colours {flat:.5f}, used {use['used']:.3f}, perplexity {use['perplexity']:.0f}"
    )
    assert error < 0.5 * flat
    assert use["used"] > 0.5


@pytest.mark.slow
def test_vq_reconstructions_beat_mean_colours(images):
    """As above for a learned codebook of 1,000."""
    tok = trained(wt.VectorQuantizer(1000, 16), images["train"])
    error, flat, use = report(tok, images["test"])
    print(
        f"VQ: mse {error:.5f}, mean colours {flat:.5f}, used {use['used']:.3f}, perplexity {use['perplexity']:.0f}"
    )
    assert error < 0.5 * flat
    assert use["used"] > 0.5


@pytest.mark.slow
def test_a_language_model_of_ids_beats_counts(fsq, images):
    """Held-out ids, nats per token: a causal trunk is 15 % below id frequencies, and below frequencies by position."""
    torch.manual_seed(0)
    ids = {s: torch.cat([fsq.encode(p).flatten(1) for p in v.split(64)]) for s, v in images.items()}
    trunk, head = wt.Transformer(96, 3, 4), torch.nn.Linear(96, fsq.codebook_size)
    weights = [*trunk.parameters(), *head.parameters(), *(p for p in fsq.parameters() if p.requires_grad)]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)

    def nats(rows):
        return F.cross_entropy(head(trunk(fsq.embed_ids(rows)).x[:, :-1]).flatten(0, 1), rows.flatten())

    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 30) * (1 - step / 300)
        optimizer.zero_grad()
        nats(ids["train"][torch.randint(len(ids["train"]), (32,))]).backward()
        optimizer.step()
    counts = torch.bincount(ids["train"].flatten(), minlength=fsq.codebook_size) + 1.0
    single = F.cross_entropy(counts.log().expand(ids["test"].numel(), -1), ids["test"].flatten())
    # frequencies by position, mixed with those of all positions: 3,050 images are few for 64 tables
    position_counts = F.one_hot(ids["train"], fsq.codebook_size).float().mean(0)  # (N, K)
    mixed = (0.7 * position_counts + 0.3 * counts / counts.sum()).log()
    by_position = F.nll_loss(mixed.expand(len(ids["test"]), -1, -1).flatten(0, 1), ids["test"].flatten())
    with torch.no_grad():
        model = nats(ids["test"])
        print(
            f"language model: {model:.3f} nats per token, counts {single:.3f}, by position {by_position:.3f}"
        )
        assert model < 0.85 * single and model < by_position
        generated = torch.zeros(4, 0, dtype=torch.long)
        for i in range(fsq.count):
            # a causal trunk: tokens behind position i do not matter
            tokens = fsq.embed_ids(F.pad(generated, (0, fsq.count - i)))
            generated = torch.cat([generated, head(trunk(tokens).x[:, i]).softmax(-1).multinomial(1)], 1)
    pixels = fsq.decode(generated, torch.uint8)
    assert pixels.shape == (4, 3, 64, 64)
    # generated images are white at the corners, as emoji on white are
    assert pixels[:, :, :4, :4].float().mean() > 200
