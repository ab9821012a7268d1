"""DiscreteTokenizer: encode, decode and freeze on real images, precision, and the contract."""

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import check_tokenizer


@pytest.fixture(scope="module")
def emoji():
    return [row["image"] for row in itertools.islice(samples.open("emoji", split="train"), 0, 60, 5)]


def small(quantizer=None, **options):
    torch.manual_seed(0)
    options = {"size": 32, "width": 16, "depth": 1, **options}
    return wt.DiscreteTokenizer(16, quantizer=quantizer, **options)


BAD = [b"", b"no image", "/no/such/file.png", 7]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("quantizer", [lambda: wt.FSQ((8, 5, 5)), lambda: wt.VectorQuantizer(64, 4)])
def test_the_contract(emoji, quantizer, causal):
    """With a frozen autoencoder; as a front-end it has no gradient by design."""
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


def test_tokens_of_an_image(emoji):
    tok = small(size=(16, 24)).eval()
    batch = tok.collate([tok.read(p) for p in emoji[:3]])
    ids = tok.encode(batch)
    assert ids.shape == (3, 2, 3) and ids.dtype == torch.int64
    t = tok(batch)
    assert t.ids.tolist() == [[1000, *row] for row in ids.flatten(1).tolist()]
    assert t.layout.order == "causal" and t.block[0].tolist() == list(range(7))
    want = [[0, 0, 0], [1, 0, 0], [2, 0, 1], [3, 0, 2], [4, 1, 0], [5, 1, 1], [6, 1, 2]]
    assert t.pos[1].tolist() == want
    assert torch.equal(t.x, tok.embedding(t.ids) + tok.pos_embed)
    assert torch.equal(t.x[:, 4:6], tok.embed(t.ids[:, 4:6], offset=4))
    assert torch.equal(tok.embed_ids(ids.flatten(1)).x, t.x)
    plain = small(size=(16, 24), causal=False)(batch)
    assert (
        plain.shape[1] == 6
        and plain.layout.order == "bidirectional"
        and plain.pos[0].tolist()[5] == [0, 1, 2]
    )


def test_inputs_of_encode_and_decode(emoji):
    tok = small(size=64)
    batch = tok.collate([tok.read(p) for p in emoji])
    pixels = batch["pixels"]
    assert np.array_equal(  # 64 x 64 already: the exact pixels, on white
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


def test_the_loss_is_the_reconstruction_error(emoji):
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
    optimizer.step()  # away from the zero initialisation of the blocks
    optimizer.zero_grad()
    tok.loss(batch)["loss"].backward()
    for name, p in tok.codec.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), name
    assert tok.embedding.weight.grad is None


def test_ids_do_not_depend_on_precision(emoji):
    """Half-precision weights around the codec, or autocast, do not change ids."""
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


def test_a_frozen_codec_does_not_change(emoji):
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


def test_invalid_ids_images_and_settings_raise(emoji):
    tok = small()
    ids = torch.zeros(1, 4, 4, dtype=torch.long)
    for wrong, found in (
        (ids.float(), "whole numbers"),
        (ids[:, :3], "expected 16 per image"),
        (ids + 1000, "exclude the start token 1000"),
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
