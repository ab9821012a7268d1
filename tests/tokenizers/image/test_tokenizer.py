"""ImageTokenizer: fixed size against open_clip and timm, native aspect against one by one, and the contract."""

import io
import math

import matplotlib.cbook
import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from timm.layers import PatchEmbed
from torch.nn import functional as F

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.image.sizes import native_size
from worldtokens.tokenizers.patches import resample_positions, sincos_positions


def photograph():
    """A real one, 512 x 600, that matplotlib ships."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as f:
        return Image.open(f).convert("RGB")


def images():
    """The photograph whole, wide, tall, small and thin."""
    im = photograph()
    boxes = [(0, 0, 512, 600), (0, 100, 512, 300), (100, 0, 221, 600), (200, 100, 261, 147), (0, 50, 512, 57)]
    return [im.crop(b) for b in boxes]


def raws(t, sizes=((40, 64), (64, 40), (16, 16), (90, 30), (1, 1), (7, 200))):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3, *s), generator=g, dtype=torch.uint8) for s in sizes]


# ---- pixels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [224, 96, (64, 128), (128, 64)])
@pytest.mark.parametrize("resize, mode", [("crop", "shortest"), ("squash", "squash"), ("pad", "longest")])
def test_pixels_equal_those_of_open_clip(size, resize, mode):
    t = wt.ImageTokenizer(
        8, size=size, preprocess={"resize": resize, "draft": False, "background": (7, 7, 7)}
    )
    reference = image_transform_v2(PreprocessCfg(size=size, resize_mode=mode, fill_color=7), is_train=False)
    scale, shift = torch.tensor(t.std)[:, None, None], torch.tensor(t.mean)[:, None, None]
    for im in images():
        found = t.collate([t.read(im)])["pixels"][0]
        expected = ((reference(im) * scale + shift) * 255).round()
        difference = (found.float() - expected).abs()
        if resize == "crop" and max(im.size) / min(im.size) > 64:
            # covering the crop would take 64 times its size: the crop is computed alone, a few levels away
            assert difference.mean() < 1 and difference.max() <= 16, im.size
        else:
            assert difference.max() == 0, im.size


def test_normalised_pixels_equal_those_of_open_clip():
    t = wt.ImageTokenizer(
        3 * 16 * 16, preprocess={"draft": False}, positions="none", embedding={"bias": False}
    )
    torch.nn.init.eye_(t.proj.weight)  # tokens are now the normalised pixels themselves
    im = photograph()
    expected = F.unfold(open_clip.image_transform(224, is_train=False)(im)[None], 16, stride=16).transpose(
        1, 2
    )
    assert (t.tokens([im]).x - expected).abs().max() < 1e-5


def test_inception_normalisation_and_other_filters():
    im = photograph()
    for name, number in (("bilinear", 2), ("lanczos", 1), ("nearest", 0)):
        t = wt.ImageTokenizer(48, patch=4, size=(32, 32), preprocess={"resize": "squash", "interpolation": name}, mean=(0.5,) * 3,
                              std=(0.5,) * 3, positions="none", embedding={"bias": False})  # fmt: skip
        torch.nn.init.eye_(t.proj.weight)
        x = torch.from_numpy(np.array(im.resize((32, 32), number))).permute(2, 0, 1)[None] / 127.5 - 1
        assert (t.tokens([im]).x - F.unfold(x, 4, stride=4).transpose(1, 2)).abs().max() < 1e-5


def jpeg(im, **options):
    stream = io.BytesIO()
    im.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def large():
    """The photograph at 12 megapixels, with fine grain so that there is detail to lose."""
    a = np.asarray(photograph().resize((3072, 3600), Image.Resampling.LANCZOS)).astype(np.int16)
    a = a + np.random.default_rng(0).normal(0, 6, (*a.shape[:2], 1)).astype(np.int16)
    return Image.fromarray(a.clip(0, 255).astype(np.uint8))


def test_draft_decoding_changes_little_and_can_be_disabled():
    source = jpeg(large())
    fast, exact = wt.ImageTokenizer(8), wt.ImageTokenizer(8, preprocess={"draft": False})
    small, whole = fast.read(source), exact.read(source)
    assert whole.shape == (3, 3600, 3072)
    assert small.shape == (3, 900, 768), "a quarter: both sides at least twice 224"
    difference = (fast.collate([small])["pixels"].float() - exact.collate([whole])["pixels"].float()).abs()
    assert difference.mean() < 1 and difference.max() <= 12  # of 255 levels


def test_draft_decoding_follows_the_orientation_and_keeps_enough_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    source = jpeg(photograph().resize((1600, 800)), exif=exif)  # upright it is 1600 high and 800 wide
    t = wt.ImageTokenizer(8, size=(200, 50))
    assert t.resized_size(1600, 800) == (200, 100)
    assert t.read(source).shape == (3, 400, 200)
    for size in (64, 100, 224, (30, 300)):
        t = wt.ImageTokenizer(8, size=size)
        raw = t.read(source)
        h, w = t.resized_size(1600, 800)
        assert raw.shape[1] >= min(1600, 2 * h) and raw.shape[2] >= min(800, 2 * w)
    native = wt.ImageTokenizer(8, size=None, max_tokens=64)
    assert native.read(source).shape == (3, 400, 200)
    assert wt.ImageTokenizer(8, size=None, max_tokens=5000).read(source).shape == (3, 1600, 800)


# ---- fixed size ----------------------------------------------------------------------------------------------


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


def test_positions_are_row_and_column_and_the_class_token_is_first():
    t = wt.ImageTokenizer(8, size=(32, 48), class_token=True)
    tokens = t.tokens(images()[:2])
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


def test_uint8_and_normalised_floats_give_the_same_tokens():
    t = wt.ImageTokenizer(16, size=40)  # 40 = 2.5 patches: the padded remainder must agree too
    x = torch.stack(raws(t, [(40, 40)] * 3))
    normal = (x / 255 - torch.tensor(t.mean).view(3, 1, 1)) / torch.tensor(t.std).view(3, 1, 1)
    a, b, c = t(t.collate(list(x))), t(x), t(normal)
    assert torch.equal(a.x, b.x) and (a.x - c.x).abs().max() < 1e-5


def test_230_pixels_in_patches_of_16_lose_nothing():
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


def test_a_padded_image_has_no_tokens_of_background_alone():
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


def test_sides_of_one_pixel_and_extreme_aspect_ratios():
    for t in (wt.ImageTokenizer(8, size=32), wt.ImageTokenizer(8, size=32, preprocess={"resize": "pad"}),
              wt.ImageTokenizer(8, size=32, preprocess={"resize": "squash"}), wt.ImageTokenizer(8, size=None, max_tokens=9)):  # fmt: skip
        tokens = t(t.collate(raws(t, [(1, 1), (1, 3000), (3000, 1), (1, 16), (17, 1)])))
        assert bool(tokens.x.isfinite().all()) and bool(tokens.valid[:, 0].all())
        assert tokens.shape[1] <= 9


# ---- native aspect -------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    h=st.integers(1, 6000), w=st.integers(1, 6000), n=st.integers(1, 400),
    ph=st.sampled_from([1, 7, 14, 16, 32]), pw=st.sampled_from([8, 14, 16]),
)  # fmt: skip
def test_native_size_is_the_largest_that_fits_and_keeps_the_aspect(h, w, n, ph, pw):
    def count(a, b):
        return math.ceil(a / ph) * math.ceil(b / pw)

    a, b = native_size(h, w, (ph, pw), n)
    assert 1 <= a <= h and 1 <= b <= w and count(a, b) <= n
    if count(h, w) <= n:
        assert (a, b) == (h, w), "an image within the budget keeps its pixels"
        return
    # one scale for both sides, each off by half a pixel at most, or held at one pixel
    scales = [((s - 0.5) / full, (s + 0.5) / full) for s, full in ((a, h), (b, w)) if s > 1]
    low, high = max([s[0] for s in scales], default=0), min([s[1] for s in scales], default=1)
    assert low <= high + 1e-9
    # and the next larger scale would need too many patches
    assert count(high * 1.001 * h + 1, high * 1.001 * w + 1) > n


def test_native_pixels_within_the_budget_are_untouched():
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
def test_a_batch_of_many_shapes_is_what_each_picture_is_alone(positions, class_token):
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=48, positions=positions, class_token=class_token)
    all_raws = raws(t)
    together = t(t.collate(all_raws))
    packed = together.pack(128)
    assert len(packed) < len(together)
    apart = packed.unpack()
    for i, raw in enumerate(all_raws):
        alone = t(t.collate([raw]))
        n = alone.shape[1]
        assert int(together.valid[i].sum()) == n == int(apart.valid[i].sum()) <= 48 + class_token
        for found in (together, apart):
            assert (found.x[i, :n] - alone.x[0]).abs().max() < 1e-5
            assert torch.equal(found.pos[i, :n], alone.pos[0])


def test_native_equals_the_plain_tensor_path():
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=100)
    assert t.position_grid == (10, 10)
    for raw in raws(t, [(40, 64), (33, 20), (80, 80)]):
        a, b = t(t.collate([raw])), t(raw[None])
        assert torch.equal(a.pos, b.pos) and (a.x - b.x).abs().max() < 1e-5


def test_native_positions_of_a_grid_with_equal_count_but_another_shape():
    t = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=16, embedding={"position_grid": (2, 8)})
    bare = wt.ImageTokenizer(24, patch=8, size=None, max_tokens=16, positions="none")
    bare.load_state_dict(t.state_dict(), strict=False)
    batch = t.collate(raws(t, [(32, 32), (16, 64)]))
    added = t(batch).x - bare(batch).x
    assert (added[0] - resample_positions(t.pos_embed, (4, 4)).flatten(0, 1)).abs().max() < 1e-5
    assert (added[1] - t.pos_embed.flatten(0, 1)).abs().max() < 1e-5


# ---- the contract --------------------------------------------------------------------------------------------

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
def test_the_contract_of_front_ends(name):
    torch.manual_seed(0)
    t = wt.ImageTokenizer(32, patch=16, **SETTINGS[name])
    bad = [b"", b"words", "missing.png", np.full((4, 4, 3), np.nan), torch.zeros(4, 4), None]
    ran = check_tokenizer(t, images(), bad=bad)
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
def test_a_setting_out_of_range_is_named(given, says):
    with pytest.raises(wt.InputError, match=says):
        wt.ImageTokenizer(8, **given)
    with pytest.raises(wt.InputError, match="at least 4"):
        wt.ImageTokenizer(3, positions="sincos")


def test_what_is_no_batch_of_pictures_is_named():
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


def test_a_saved_front_end_keeps_its_preprocessing(tmp_path):
    t = wt.ImageTokenizer(8, patch=(4, 8), size=(32, 16), mean=(0.1, 0.2, 0.3), std=(1, 2, 3), class_token=True, embedding={"span": 4},
                          preprocess={"interpolation": "lanczos", "resize": "pad", "background": (1, 2, 3), "draft": False})  # fmt: skip
    t.save(tmp_path)
    again = wt.load(tmp_path)
    for name in ("patch", "size", "mean", "std", "preprocess", "embedding", "position_grid"):
        assert getattr(again, name) == getattr(t, name), name
    assert torch.equal(again.tokens(images()).x, t.eval().tokens(images()).x)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("size", [32, None])
def test_under_autocast_tokens_stay_in_the_weights_type(size, positions):
    t = wt.ImageTokenizer(16, size=size, max_tokens=9, positions=positions)
    batch = t.collate(raws(t))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = t(batch).x
    assert found.dtype == torch.float32 and (found - t(batch).x).abs().max() < 0.05


def test_tokens_start_with_about_unit_variance():
    torch.manual_seed(0)
    t = wt.ImageTokenizer(256)
    assert 0.9 < t(torch.randn(4, 3, 224, 224)).x.var() < 1.1
