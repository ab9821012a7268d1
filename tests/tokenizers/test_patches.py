"""Patches and positions against a convolution, timm and interpolation done by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import build_sincos2d_pos_embed, resample_abs_pos_embed
from torch.nn import functional as F

import worldtokens as wt
from worldtokens.tokenizers import patches as P


@settings(max_examples=60, deadline=None)
@given(
    b=st.integers(1, 3),
    c=st.integers(1, 4),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_unpatchify_inverts_patchify(b, c, sizes):
    grid, patch = [g for g, _ in sizes], [p for _, p in sizes]
    x = torch.randn(b, c, *[g * p for g, p in sizes])
    cut = P.patchify(x, patch)
    n = torch.tensor(grid).prod()
    assert cut.shape == (b, n, x[0].numel() // n)
    assert torch.equal(P.unpatchify(cut, patch, grid), x)


def test_a_patch_holds_channels_then_rows_then_columns():
    x = torch.arange(2 * 4 * 6).view(1, 2, 4, 6)
    cut = P.patchify(x, (2, 3))
    assert cut.shape == (1, 4, 12)
    assert cut[0, 1].tolist() == [3, 4, 5, 9, 10, 11, 27, 28, 29, 33, 34, 35]


@pytest.mark.parametrize("patch", [(4, 4), (2, 8), (3, 5, 2)])
def test_a_linear_layer_over_patches_is_a_convolution(patch):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *[3 * p for p in patch])
    weight, bias = torch.randn(7, 3, *patch), torch.randn(7)
    conv = {2: F.conv2d, 3: F.conv3d}[len(patch)]
    expected = conv(x, weight, bias, stride=patch).flatten(2).transpose(1, 2)
    found = F.linear(P.patchify(x, patch), weight.flatten(1), bias)
    assert (found - expected).abs().max() < 1e-4


def test_a_remainder_is_padded_with_the_edge():
    x = torch.arange(15, dtype=torch.uint8).view(1, 1, 3, 5)
    out = P.pad_to_patches(x, (2, 4))
    assert out.shape == (1, 1, 4, 8) and torch.equal(out[..., :3, :5], x)
    assert (out[..., 5:] == out[..., 4:5]).all() and (out[..., 3, :] == out[..., 2, :]).all()
    assert P.pad_to_patches(out, (2, 4)) is out
    with pytest.raises(wt.InputError, match="are not multiples"):
        P.patchify(x, (2, 4))
    with pytest.raises(wt.InputError, match="do not fill"):
        P.unpatchify(torch.zeros(1, 5, 12), (2, 2), (2, 2))


def test_coordinates_run_along_rows():
    assert P.grid_coords((2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert P.grid_coords((2, 1, 2)).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize("grid", [(14, 14), (3, 11), (1, 5)])
def test_sincos_equals_timms_on_any_grid(grid):
    expected = build_sincos2d_pos_embed(list(grid), dim=64)
    assert (P.sincos_positions(P.grid_coords(grid), 64) - expected).abs().max() < 1e-6


def test_sincos_of_three_axes_and_of_a_width_that_does_not_divide():
    coords = P.grid_coords((2, 3, 4))
    out = P.sincos_positions(coords, 16)  # 2 frequencies for each of 3 axes: 12 values, 4 zeros
    assert out.shape == (24, 16) and not out[:, 12:].any()
    t, y, x = coords.float().unbind(-1)
    angles = [a * f for a in (t, y, x) for f in (1.0, 0.01)]
    by_hand = torch.stack([a.sin() for a in angles] + [a.cos() for a in angles], -1)
    assert (out[:, :12] - by_hand).abs().max() < 1e-6
    with pytest.raises(wt.InputError, match="at least 6"):
        P.sincos_positions(coords, 5)


@pytest.mark.parametrize(
    "old, new",
    [
        ((14, 14), (16, 16)),
        ((2, 8), (4, 4)),
        ((4, 4), (2, 8)),
        ((16, 16), (5, 9)),
        ((7, 3), (1, 1)),
        ((7, 3), (5, 1)),
        ((7, 1), (5, 1)),
        ((1, 7), (1, 5)),
    ],
)
def test_resampled_positions_equal_f_interpolate(old, new):
    torch.manual_seed(0)
    table = torch.randn(*old, 6)
    # transposed, because F.interpolate is wrong when the result is one column wide
    flipped = F.interpolate(table.permute(2, 1, 0)[None], size=new[::-1], mode="bicubic", antialias=True)
    upright = F.interpolate(table.permute(2, 0, 1)[None], size=new, mode="bicubic", antialias=True)
    expected = flipped[0].permute(2, 1, 0) if new[1] == 1 and new[0] > 1 else upright[0].permute(1, 2, 0)
    out = P.resample_positions(table, new)
    assert out.shape == (*new, 6) and (out - expected).abs().max() < 1e-5
    if new[1] > 1:
        timm = resample_abs_pos_embed(table.flatten(0, 1)[None], list(new), list(old), num_prefix_tokens=0)
        assert (out.flatten(0, 1) - timm[0]).abs().max() < 1e-5
    # the separable form, for batches in which every image has its own grid
    wy, wx = P.axis_weights(new[0], old[0]), P.axis_weights(new[1], old[1])
    assert (torch.einsum("yi,xj,ijd->yxd", wy, wx, table) - expected).abs().max() < 1e-5


def test_weights_cached_in_inference_mode_have_gradients():
    P.axis_weights.cache_clear()
    with torch.inference_mode():
        P.axis_weights(5, 3)
    table = torch.randn(3, 2, requires_grad=True)
    (P.axis_weights(5, 3) @ table).sum().backward()
    assert table.grad is not None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, (1, 2, 3), (4, 0), "16", None, (4.0, 4)])
def test_sides_are_positive_whole_numbers(value):
    with pytest.raises(wt.InputError, match="patch is"):
        P.sides(value, 2, "patch")
