"""ImageTokenizer: tokens against timm, native aspect against images one by one, and the contract."""

import math

import numpy as np
import pytest
import torch
from timm.layers import PatchEmbed
from torch.nn import functional as F

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.patches import resample_positions, sincos_positions


def test_tokens_equal_timms_patch_embedding():
    torch.manual_seed(0)
    t, reference = wt.ImageTokenizer(48, patch=(8, 16), size=(64, 96)), PatchEmbed((64, 96), (8, 16), 3, 48)
    with torch.no_grad():
        reference.proj.weight.copy_(t.proj.weight.view(48, 3, 8, 16))
        reference.proj.bias.copy_(t.proj.bias.normal_())
        x = torch.randn(2, 3, 64, 96)
        found, expected = t(x), reference(x)
    assert found.shape == (2, 48, 48) and t.pos_embed.shape == (8, 6, 48)
    assert (found.x - expected - t.pos_embed.flatten(0, 1)).abs().max() < 1e-5


def test_positions_are_row_and_column_and_the_class_token_is_first(images):
    t = wt.ImageTokenizer(8, size=(32, 48), class_token=True)
    tokens = t.tokens(images[:2])
    assert tokens.shape == (2, 7, 8)
    assert tokens.pos[1].tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
    ]
    assert torch.equal(tokens.x[:, 0], t.class_token[0].expand(2, 8))
    assert bool(tokens.valid.all()) and not tokens.block.any() and tokens.layout.full(7)
    assert len(tokens.select("image")) == 2 and tokens.layout.order == "bidirectional"


def test_uint8_and_normalised_floats_give_the_same_tokens(raws):
    t = wt.ImageTokenizer(16, size=40)  # 40 = 2.5 patches: the padded remainder must agree too
    x = torch.stack(raws(t, [(40, 40)] * 3))
    normal = (x / 255 - torch.tensor(t.mean).view(3, 1, 1)) / torch.tensor(t.std).view(3, 1, 1)
    a, b, c = t(t.collate(list(x))), t(x), t(normal)
    assert torch.equal(a.x, b.x) and (a.x - c.x).abs().max() < 1e-5


def test_230_pixels_in_patches_of_16_lose_nothing(raws):
    t = wt.ImageTokenizer(8, size=230)
    assert t.position_grid == (15, 15)
    x = torch.zeros(1, 3, 230, 230)
    plain = t(x).x
    assert plain.shape == (1, 225, 8)
    x[..., 229, 229] = 1  # the last pixel changes the last token only
    moved = (t(x).x - plain).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [224]
    native = wt.ImageTokenizer(8, size=None, max_tokens=225)
    assert native.collate(raws(native, [(230, 230)]))["lengths"] == (225,)


@pytest.mark.parametrize("positions", ["learned", "sincos", "none"])
@pytest.mark.parametrize("hw", [(32, 128), (64, 64), (48, 20)])
def test_positions_are_interpolated_for_other_sizes(positions, hw):
    t = wt.ImageTokenizer(16, size=(32, 128), positions=positions)  # a table of (2, 8)
    bare = wt.ImageTokenizer(16, size=(32, 128), positions="none")
    bare.load_state_dict(t.state_dict(), strict=False)
    x = torch.randn(1, 3, *hw)
    grid = (math.ceil(hw[0] / 16), math.ceil(hw[1] / 16))
    found = t(x)
    added = (found.x - bare(x).x)[0]
    expected = {
        "learned": lambda: resample_positions(t.pos_embed, grid).flatten(0, 1),
        "sincos": lambda: sincos_positions(found.pos[0, :, 1:], 16),
        "none": lambda: torch.zeros(grid[0] * grid[1], 16),
    }[positions]()
    assert (added - expected).abs().max() < 1e-5
    assert found.pos[0, -1].tolist() == [0, grid[0] - 1, grid[1] - 1]


def test_a_padded_image_has_no_tokens_of_background_alone(raws):
    t = wt.ImageTokenizer(8, patch=16, size=64, preprocess={"resize": "pad", "background": (0, 255, 0)})
    wide, tall, square = raws(t, [(32, 128), (128, 20), (64, 64)])
    batch = t.collate([wide, tall, square])
    assert (batch["pixels"][0, :, :16] == torch.tensor([0, 255, 0], dtype=torch.uint8)[:, None, None]).all()
    tokens = t(batch)
    # 16 rows of image from row 24 of 64: patch rows 1 and 2; 10 columns from 27: patch columns 1 and 2
    assert batch["lengths"] == (8, 8, 16) and tokens.valid.sum(1).tolist() == [8, 8, 16]
    assert tokens.pos[0, :8, 1:].tolist() == [[y, x] for y in (1, 2) for x in range(4)]
    assert tokens.pos[1, :8, 1:].tolist() == [[y, x] for y in range(4) for x in (1, 2)]
    everything = t(batch["pixels"])  # the same pixels without `keep`: all patches, in grid order
    indices = tokens.pos[1, :8, 1] * 4 + tokens.pos[1, :8, 2]
    assert (tokens.x[1, :8] - everything.x[1, indices.long()]).abs().max() < 1e-5
    alone = t(t.collate([tall]))
    assert alone.shape == (1, 8, 8) and (alone.x[0] - tokens.x[1, :8]).abs().max() < 1e-5
    assert "keep" not in t.collate([square]), "no patch is background alone"


def test_sides_of_one_pixel_and_extreme_aspect_ratios(raws):
    for t in (wt.ImageTokenizer(8, size=32), wt.ImageTokenizer(8, size=32, preprocess={"resize": "pad"}),
              wt.ImageTokenizer(8, size=32, preprocess={"resize": "squash"}), wt.ImageTokenizer(8, size=None, max_tokens=9)):  # fmt: skip
        tokens = t(t.collate(raws(t, [(1, 1), (1, 3000), (3000, 1), (1, 16), (17, 1)])))
        assert bool(tokens.x.isfinite().all()) and bool(tokens.valid[:, 0].all())
        assert tokens.shape[1] <= 9


# ---- native aspect ---------------------------------------------------------------------------------------


def test_native_pixels_within_the_budget_are_untouched(raws):
    t = wt.ImageTokenizer(
        3 * 64, patch=8, size=None, max_tokens=64, positions="none", embedding={"bias": False}
    )
    torch.nn.init.eye_(t.proj.weight)
    (raw,) = raws(t, [(24, 40)])
    tokens = t(t.collate([raw]))
    normal = (raw / 255 - torch.tensor(t.mean).view(3, 1, 1)) / torch.tensor(t.std).view(3, 1, 1)
    assert tokens.shape == (1, 15, 192)
    assert (tokens.x[0] - F.unfold(normal[None], 8, stride=8)[0].T).abs().max() < 1e-5


@pytest.mark.parametrize("positions", ["learned", "sincos", "none"])
@pytest.mark.parametrize("class_token", [False, True])
def test_a_batch_of_many_sizes_equals_each_image_alone(positions, class_token, raws):
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=48, positions=positions, class_token=class_token)
    all_raws = raws(t)
    batched = t(t.collate(all_raws))
    packed = batched.pack(128)
    assert len(packed) < len(batched)
    unpacked = packed.unpack()
    for i, raw in enumerate(all_raws):
        alone = t(t.collate([raw]))
        n = alone.shape[1]
        assert int(batched.valid[i].sum()) == n == int(unpacked.valid[i].sum()) <= 48 + class_token
        for found in (batched, unpacked):
            assert (found.x[i, :n] - alone.x[0]).abs().max() < 1e-5
            assert torch.equal(found.pos[i, :n], alone.pos[0])


def test_native_equals_the_plain_tensor_path(raws):
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=100)
    assert t.position_grid == (10, 10)
    for raw in raws(t, [(40, 64), (33, 20), (80, 80)]):
        a, b = t(t.collate([raw])), t(raw[None])
        assert torch.equal(a.pos, b.pos) and (a.x - b.x).abs().max() < 1e-5


def test_native_positions_of_a_grid_with_equal_count_but_other_sides(raws):
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=16, embedding={"position_grid": (2, 8)})
    bare = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=16, positions="none")
    bare.load_state_dict(t.state_dict(), strict=False)
    batch = t.collate(raws(t, [(32, 32), (16, 64)]))
    added = t(batch).x - bare(batch).x
    assert (added[0] - resample_positions(t.pos_embed, (4, 4)).flatten(0, 1)).abs().max() < 1e-5
    assert (added[1] - t.pos_embed.flatten(0, 1)).abs().max() < 1e-5


# ---- the contract ----------------------------------------------------------------------------------------

SETTINGS = {
    "fixed": {"size": 32},
    "fixed, class token": {"size": (32, 48), "class_token": True},
    "fixed, sin-cos": {"size": 32, "positions": "sincos"},
    "fixed, a remainder": {"size": (30, 41), "preprocess": {"resize": "squash"}},
    "padded": {"size": 64, "preprocess": {"resize": "pad"}},
    "native": {"size": None, "max_tokens": 30},
    "native, class token": {"size": None, "max_tokens": 30, "class_token": True},
    "native, sin-cos": {"size": None, "max_tokens": 30, "positions": "sincos", "embedding": {"bias": False}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_contract(name, images):
    torch.manual_seed(0)
    t = wt.ImageTokenizer(32, patch=16, **SETTINGS[name])
    bad = [b"", b"text", "missing.png", np.full((4, 4, 3), np.nan), torch.zeros(4, 4), None]
    ran = check_tokenizer(t, images, bad=bad)
    assert "check_saving" in ran and "check_refused" in ran


@pytest.mark.parametrize("given, says", [
    ({"patch": 0}, "patch is 0"), ({"size": (1, 2, 3)}, "size is"), ({"max_tokens": 0}, "max_tokens is 0"),
    ({"preprocess": {"interpolation": "cubic"}}, "one of nearest"), ({"preprocess": {"resize": "stretch"}}, "one of crop"),
    ({"positions": "rope"}, "one of learned"), ({"preprocess": {"background": (0, 0, 256)}}, "background is"),
    ({"std": (1, 1, 0)}, "above 0"), ({"mean": (1, 1)}, "three numbers"), ({"embedding": {"position_grid": 0}}, "position_grid"),
    ({"embedding": {"interpolation": "area"}}, "one of bicubic"), ({"embedding": {"span": 0}}, "span is 0"),
    ({"embedding": {"centred": True}}, "set span="), ({"preprocess": {"crop_pct": 0}}, "above 0 to 1"),
    ({"preprocess": {"resize": "full"}}, "size=None"), ({"preprocess": {"crop": 0.9}}, r"unknown keys \['crop'\]"),
    ({"embedding": 7}, "embedding is a int"),
])  # fmt: skip
def test_a_setting_out_of_range_raises_and_is_named(given, says):
    with pytest.raises(wt.InputError, match=says):
        wt.ImageTokenizer(8, **given)
    with pytest.raises(wt.InputError, match="at least 4"):
        wt.ImageTokenizer(3, positions="sincos")


def test_a_batch_of_other_inputs_raises():
    t = wt.ImageTokenizer(8, size=32)
    good = torch.zeros(3, 8, 8, dtype=torch.uint8)
    for batch, says in [([], "at least one"), ([good, good.float()], "image 1"), ([good[None]], "image 0"),
                        ([good, "cat.png"], "image 1 of the batch is str"), ([good[:, :0]], "no pixels")]:  # fmt: skip
        with pytest.raises(wt.InputError, match=says):
            t.collate(batch)
    for x in (
        torch.zeros(3, 32, 32),
        torch.zeros(1, 32, 32, 3),
        torch.zeros(1, 3, 32, 32, dtype=torch.int64),
    ):
        with pytest.raises(wt.InputError, match=r"expected \(B, 3, H, W\)"):
            t(x)


def test_saving_keeps_the_preprocessing(tmp_path, images):
    t = wt.ImageTokenizer(8, patch=(4, 8), size=(32, 16), mean=(0.1, 0.2, 0.3), std=(1, 2, 3), class_token=True, embedding={"span": 4},
                          preprocess={"interpolation": "lanczos", "resize": "pad", "background": (1, 2, 3), "draft": False})  # fmt: skip
    t.save(tmp_path)
    again = wt.load(tmp_path)
    for name in ("patch", "size", "mean", "std", "preprocess", "embedding", "position_grid"):
        assert getattr(again, name) == getattr(t, name), name
    assert torch.equal(again.tokens(images).x, t.eval().tokens(images).x)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("size", [32, None])
def test_under_autocast_tokens_keep_the_type_of_the_weights(size, positions, raws):
    t = wt.ImageTokenizer(16, size=size, max_tokens=9, positions=positions)
    batch = t.collate(raws(t))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = t(batch).x
    assert found.dtype == torch.float32 and (found - t(batch).x).abs().max() < 0.05


def test_tokens_start_with_about_unit_variance():
    torch.manual_seed(0)
    t = wt.ImageTokenizer(256)
    assert 0.9 < t(torch.randn(4, 3, 224, 224)).x.var() < 1.1


def test_registers_follow_the_class_token(images):
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2)
    tokens = front.tokens([images[0]])
    assert tokens.shape[1] == 3 + 16 and front.prefix == 3
    assert torch.equal(tokens.x[0, 0], front.class_token[0, 0])
    assert torch.equal(tokens.x[0, 1:3], front.registers[0])
    assert tokens.pos[0, :3].tolist() == [[0, 0, 0], [-1, 0, 0], [-2, 0, 0]]
    check_tokenizer(front, images[:3])
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=20, registers=1, embedding={"span": 4})
    check_tokenizer(native, images[:3])


def test_span_scales_the_positions_of_every_grid():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, embedding={"span": (8, 16)})
    pos = front(torch.zeros(1, 3, 16, 32)).pos[0]  # 2 rows, 4 columns
    assert pos[:, 1].unique().tolist() == [0, 4] and pos[:, 2].unique().tolist() == [0, 4, 8, 12]
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, embedding={"span": (8, 16)})
    batch = native.collate(
        [torch.zeros(3, 16, 32, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8)]
    )
    assert torch.equal(native(batch).pos[0], pos)
    with pytest.raises(wt.InputError, match="crop_pct is"):
        wt.ImageTokenizer(dim=32, size=None, preprocess={"crop_pct": 0.9})
