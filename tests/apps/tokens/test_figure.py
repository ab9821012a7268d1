"""`worldtokens tokens --show`: drawings match the tokens."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from PIL import Image

from worldtokens.apps.tokens.command import main
from worldtokens.apps.tokens.inspect import TextToken
from worldtokens.errors import InputError


def drawn(*found):
    from worldtokens.apps.tokens.figure import draw_figure

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph gives a warning
        fig = draw_figure(found)
        fig.canvas.draw()
    return fig


def vertical_lines(ax):
    """x coordinates of the vertical lines of an axes."""
    from matplotlib.collections import LineCollection

    segments = [s for c in ax.collections if isinstance(c, LineCollection) for s in c.get_segments()]
    return sorted({round(float(s[0][0]), 6) for s in segments if len(s) and s[0][0] == s[1][0]})


def test_all_modalities_are_drawn_into_one_figure(files, tmp_path, capsys):
    names = ["wide.png", "tone.wav", "long.wav", "video.mp4", "cloud.xyz", "load.csv", "text.txt", "scene"]
    out = tmp_path / "new" / "tokens.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*(str(files / n) for n in names), "--text", "日本語 $x^2$ % #", "--show", str(out)]) == 0
    with Image.open(out) as im:
        assert im.format == "PNG" and im.width == round(3 * 4.2 * 150)
        assert len(im.convert("RGB").quantize(64).getcolors()) > 32
    assert str(out) in capsys.readouterr().err


def test_lines_are_at_the_patch_boundaries(files, inspected):
    image = drawn(inspected(files / "wide.png", "--size", "native")).subfigs[0].axes[0]
    assert vertical_lines(image) == [16 * k for k in range(16)]
    # the image is drawn in pixels; the padding of the last patch extends beyond 230 px
    assert [im.get_extent()[1] for im in image.images] == [230, 240]
    audio = drawn(inspected(files / "tone.wav")).subfigs[0].axes[0]
    assert vertical_lines(audio) == pytest.approx([0.02 * k for k in range(51)])


def test_long_audio_has_a_detail_view_of_its_loudest_part(files, inspected):
    whole, close = drawn(inspected(files / "long.wav")).subfigs[0].axes
    assert whole.get_xlim() == pytest.approx((0, 4.0)) and vertical_lines(whole) == []
    low, high = close.get_xlim()
    assert 2.0 - 1e-6 <= low < high <= 3.0 + 1e-6 and high - low == pytest.approx(24 * 0.02)
    assert len(vertical_lines(close)) == 25


def test_the_cropped_area_is_shown(files, inspected):
    fig = drawn(inspected(files / "wide.png"))
    outside, inside = fig.subfigs[0].axes[0].images
    assert inside.get_extent() == [0, 224, 224, 0]
    left, right, *_ = outside.get_extent()
    assert right - left == 515 and left == -146  # 230 / 100 * 224, centre crop of 224
    assert any("57% cropped" in t.get_text() for t in fig.subfigs[0].texts)


def test_every_text_token_has_a_box_within_its_line(files, inspected):
    from worldtokens.apps.tokens.draw_text import layout_lines

    tokens = [
        TextToken(t, 49000, len(t) % 2 == 0) for t in ("a", "word", "x" * 200, "猫", " of", "\n", "") * 12
    ]
    lines = layout_lines(tokens, 8.0)
    flat = [p for line in lines for p, *_ in line]
    assert flat == tokens[: len(flat)]
    for line in lines:
        ends = [left + wide for _, _, left, wide in line]
        assert ends[-1] <= 8.0 + 1e-9
        assert all(nxt[2] >= end for nxt, end in zip(line[1:], ends, strict=False))
    from matplotlib.patches import FancyBboxPatch

    s = inspected("a photo of a cat", is_text=True)
    panel = drawn(s).subfigs[0]
    assert sum(isinstance(p, FancyBboxPatch) for p in panel.axes[0].patches) == s.count == 7
    ids = [t.get_text() for t in panel.axes[0].texts][1::2]
    assert ids == [str(p.id) for p in s.text_tokens]


def test_points_have_the_colour_of_their_nearest_centre(files, tmp_path, inspected):
    import torch

    rng = np.random.default_rng(0)
    np.save(tmp_path / "cloud.npy", rng.normal(size=(400, 3)))
    s = inspected(tmp_path / "cloud.npy")
    from worldtokens.apps.tokens.draw_points import nearest_centres

    xyz, centres, owner = nearest_centres(s)
    assert centres.shape == (64, 3) and xyz.shape == (400, 3)
    nearest = torch.cdist(
        torch.tensor(xyz, dtype=torch.float64), torch.tensor(centres, dtype=torch.float64)
    ).argmin(1)
    assert owner.tolist() == nearest.tolist()
    # a centre is a point of its own patch
    assert all(np.abs(xyz[owner == k] - centres[k]).sum(1).min() < 1e-5 for k in range(64))
    drawn(s)


def test_a_limited_number_of_panels_is_reported(files, tmp_path, capsys):
    many = [str(files / "small.png")] * 26
    assert main([*many, "--show", str(tmp_path / "a.png")]) == 0
    assert re.search(r"a\.png \(first 24 of 26\)", capsys.readouterr().err)


def test_a_figure_that_cannot_be_written_raises(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        main([str(files / "small.png"), "--show", str(tmp_path / "file" / "a.png")])
