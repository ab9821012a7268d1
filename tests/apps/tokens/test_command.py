"""`worldtokens tokens`: what it tells of a file is what the file becomes, and what it draws stands where tokens are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
import wave

import numpy as np
import pytest
from PIL import Image

from worldtokens import cli
from worldtokens.apps.tokens.command import batch_line, main, padding, parser, spelled
from worldtokens.apps.tokens.inspect import Failed, Piece, Seen, look
from worldtokens.errors import InputError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One small file of each kind, made so that its tokens can be counted by hand."""
    import av

    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)

    def picture(name, width, height):
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)

    picture("wide.png", 230, 100)
    picture("small.png", 32, 32)
    with wave.open(str(folder / "tone.wav"), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(16000)
        f.writeframes((8000 * np.sin(np.arange(16000) * 0.2)).astype("<i2").tobytes())
    with wave.open(str(folder / "long.wav"), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(16000)
        loud = np.where(np.arange(64000) // 16000 == 2, 9000, 200)  # the third of four seconds
        f.writeframes((loud * np.sin(np.arange(64000) * 0.2)).astype("<i2").tobytes())
    with av.open(str(folder / "clip.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 30 * k, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    corners = [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    (folder / "cloud.xyz").write_text("\n".join(" ".join(map(str, c)) for c in corners))
    lines = ["day,load,wind", *(f"{i},{i * i},{'' if i == 5 else 40 - i}" for i in range(40))]
    (folder / "load.csv").write_text("\n".join(lines))
    (folder / "words.txt").write_text("Strawberries, naïve 猫🍎!", encoding="utf-8")
    scene = folder / "scene"
    scene.mkdir()
    Image.new("RGB", (64, 64), "teal").save(scene / "0.png")
    cameras = {
        "images": ["0.png"],
        "intrinsics": [[60, 0, 32], [0, 60, 32], [0, 0, 1]],
        "extrinsics": [np.eye(4).tolist()],
    }
    (scene / "cameras.json").write_text(json.dumps(cameras))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    return folder


def seen(source, *options, **given):
    found = look(str(source), parser().parse_args(list(options)), **given)
    assert isinstance(found, Seen), found
    return found


@pytest.mark.parametrize(
    "name, options, count, grid, positions, seconds, source",
    [
        ("wide.png", ["--size", "native"], 7 * 15, (7, 15), {"y": (0, 6), "x": (0, 14)}, None, "230 x 100 px"),
        ("wide.png", [], 196, (14, 14), {"y": (0, 13), "x": (0, 13)}, None, "230 x 100 px"),
        ("wide.png", ["--patch", "32"], 49, (7, 7), {"y": (0, 6), "x": (0, 6)}, None, "230 x 100 px"),
        ("tone.wav", [], 50, (50,), {"t": (0, 49)}, 0.02, "1.00 s at 16 kHz"),
        # 98 windows of 25 ms every 10: patches of 16 every 10, the last filled up: 1 + ceil(82 / 10); bands 1 + (128 - 16) // 10
        ("tone.wav", ["--preset", "ast"], 120, (10, 12), {"t": (0, 9), "y": (0, 11)}, 0.1, "1.00 s at 16 kHz"),
        # kernels and strides of wav2vec 2.0: 16,000 samples give 49
        ("tone.wav", ["--preset", "waveform"], 49, (49,), {"t": (0, 48)}, 0.02, "1.00 s at 16 kHz"),
        # 4 frames of a second at its 1st, 3rd, 5th and 7th eighth: tubelets of two are half a second apart
        ("clip.mp4", ["--frames", "4", "--size", "native"], 24, (2, 3, 4), {"t": (0, 1), "y": (0, 2), "x": (0, 3)}, 0.5, "4 frames 64 x 48"),
        ("clip.mp4", ["--fps", "2", "--size", "32"], 4, (1, 2, 2), {"y": (0, 1), "x": (0, 1)}, None, "2 frames 32 x 32"),
        # 1 + (40 - 16) / 8 patches of each of the two channels beside the time
        ("load.csv", ["--time", "day"], 8, (4, 2), {"patch": (0, 3), "channel": (0, 1)}, None, "40 steps of 2"),
        ("scene", ["--patch", "32", "--size", "64"], 4, (1, 2, 2), {"y": (0, 1), "x": (0, 1)}, None, "1 view 64 x 64"),
    ],
)  # fmt: skip
def test_what_a_file_becomes(files, name, options, count, grid, positions, seconds, source):
    s = seen(files / name, *options)
    assert (s.count, s.grid, s.positions, s.source) == (count, grid, positions, source)
    assert s.seconds == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


def test_a_small_cloud_is_a_token_a_point(files):
    s = seen(files / "cloud.xyz")
    assert (s.count, s.grid) == (8, (8, 8))
    # a cube's corners on the unit sphere, in units of sqrt(64) / 2 to a radius
    side = 4 / 3**0.5
    assert s.positions == {a: (pytest.approx(-side, abs=1e-4), pytest.approx(side, abs=1e-4)) for a in "zyx"}


def test_pieces_spell_the_text(files):
    s = seen(files / "words.txt")
    assert [p.special for p in s.pieces] == [True, *[False] * (s.count - 2), True]
    raw = b""
    for p in s.pieces[1:-1]:  # a part of a character is spelled as its bytes
        raw += bytes.fromhex(p.text[1:-1]) if p.part else p.text.encode()
        raw += b" " * p.ends
    assert raw.decode().split() == ["strawberries", ",", "naïve", "猫", "🍎!"]
    assert spelled(s.pieces).startswith("<|startoftext|> | strawberries | , | na·")


def test_a_vocabulary_of_ones_own_and_a_text_that_is_cut(tmp_path):
    import worldtokens as wt

    words = wt.TextTokenizer.train(["the cat sat on the mat"] * 4, vocab_size=280, dim=8)
    words.save_vocabulary(tmp_path / "tokenizer.json")
    option = ["--vocabulary", str(tmp_path / "tokenizer.json")]
    s = seen("the cat zzz", *option, given=True)
    assert "".join(p.text for p in s.pieces if not p.special) == "the cat zzz"
    assert [p.id for p in s.pieces] == words.read("the cat zzz").tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = seen("z" * 100, *option, given=True)
    assert s.count == 77 and s.source == "100 characters, cut from 101 pieces"


def test_padding_and_packing_by_hand(files):
    wide, small = (seen(files / n, "--size", "native") for n in ("wide.png", "small.png"))
    shares = padding([wide, small, small])
    assert shares[id(wide)] == 0 and shares[id(small)] == pytest.approx(1 - 4 / 105)
    # 113 of 315 places, then 105 in one row and 4 + 4 in another
    assert batch_line([wide, small, small]) == (
        "one batch: 3 rows of 105, 64% padding; packed: 2 rows of 105, 46% padding"
    )


def test_what_cant_be_read_is_a_line_and_the_rest_is_shown(files, capsys):
    names = [str(files / n) for n in ("small.png", "broken.png", "nothing.wav", "tone.wav")]
    assert cli.run(["tokens", *names, "x.foo", "--text", "a cat"]) == 1
    out, err = capsys.readouterr()
    head, *lines = out.splitlines()
    assert head.split("\t")[:4] == ["file", "kind", "read as", "tokens"]
    assert [line.split("\t")[0] for line in lines] == [*names, "x.foo", '"a cat"']
    assert [line.split("\t")[3] for line in lines if "error" not in line] == ["196", "50", "4"]
    for line, why in (
        (lines[1], "error: "),
        (lines[2], "No such file"),
        (lines[4], "--as text|image"),
    ):
        assert why in line and line.count("broken.png") < 2
    assert "one batch: 3 rows of 196" in err
    assert cli.run(["tokens", names[0]]) == 0


def test_json_for_programs(files, capsys):
    assert main([str(files / "tone.wav"), str(files / "broken.png"), "--text", "a cat", "--json"]) == 1
    sound, broken, text = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sound["tokens"], sound["grid"], sound["seconds_per_token"]) == (50, [50], 0.02)
    assert sound["positions"] == {"t": [0, 49]} and sound["padding"] == 0
    assert broken["modality"] == "image" and broken["error"]
    assert text["ids"] == [49406, 320, 2368, 49407] and text["padding"] == 0.92


def test_a_name_cant_break_the_table(files, capsys):
    assert main(["--text", "a\tb\nc"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "args, why",
    [
        ([], "nothing to look at"),
        (["x.png", "--size", "big"], "--size big"),
        (["x.png", "--show", "out.jpg"], "name it .png"),
        (["x.png", "--patch", "0"], "patch is 0"),
        (["x.wav", "--preset", "mfcc"], "preset is 'mfcc'"),
        (["--text", "a", "--vocabulary", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_setting_is_told_once(args, why):
    with pytest.raises(InputError, match=why):
        main(args)


def test_as_reads_a_file_as_it_is_told(files):
    (files / "clip.bin").write_bytes((files / "clip.mp4").read_bytes())
    assert isinstance(look(str(files / "clip.bin"), parser().parse_args([])), Failed)
    assert seen(files / "clip.bin", kind="video").modality == "video"


def test_help_needs_no_torch():
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from worldtokens import cli; cli.run(['tokens', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--show OUT.png" in done.stdout and done.stdout.endswith("False\n"), done.stderr


# ---- images --------------------------------------------------------------------------------------------------


def drawn(*found):
    from worldtokens.apps.tokens.figure import draw_picture

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks is a warning
        fig = draw_picture(found)
        fig.canvas.draw()
    return fig


def upright(ax):
    """Where an axes' vertical lines stand."""
    from matplotlib.collections import LineCollection

    segments = [s for c in ax.collections if isinstance(c, LineCollection) for s in c.get_segments()]
    return sorted({round(float(s[0][0]), 6) for s in segments if len(s) and s[0][0] == s[1][0]})


def test_all_kinds_draw_into_one_picture(files, tmp_path, capsys):
    names = ["wide.png", "tone.wav", "long.wav", "clip.mp4", "cloud.xyz", "load.csv", "words.txt", "scene"]
    out = tmp_path / "new" / "tokens.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*(str(files / n) for n in names), "--text", "日本語 $x^2$ % #", "--show", str(out)]) == 0
    with Image.open(out) as im:
        assert im.format == "PNG" and im.width == round(3 * 4.2 * 150)
        assert len(im.convert("RGB").quantize(64).getcolors()) > 32
    assert str(out) in capsys.readouterr().err


def test_lines_stand_at_the_patches(files):
    picture = drawn(seen(files / "wide.png", "--size", "native")).subfigs[0].axes[0]
    assert upright(picture) == [16 * k for k in range(16)]
    # the image lies under them at its own scale; what is repeated to fill the last patch goes beyond 230 px
    assert [im.get_extent()[1] for im in picture.images] == [230, 240]
    sound = drawn(seen(files / "tone.wav")).subfigs[0].axes[0]
    assert upright(sound) == pytest.approx([0.02 * k for k in range(51)])


def test_a_long_sound_is_drawn_whole_and_its_loudest_part_close(files):
    whole, close = drawn(seen(files / "long.wav")).subfigs[0].axes
    assert whole.get_xlim() == pytest.approx((0, 4.0)) and upright(whole) == []
    low, high = close.get_xlim()
    assert 2.0 - 1e-6 <= low < high <= 3.0 + 1e-6 and high - low == pytest.approx(24 * 0.02)
    assert len(upright(close)) == 25


def test_a_crop_shows_what_is_cut_off(files):
    fig = drawn(seen(files / "wide.png"))
    outside, inside = fig.subfigs[0].axes[0].images
    assert inside.get_extent() == [0, 224, 224, 0]
    left, right, *_ = outside.get_extent()
    assert right - left == 515 and left == -146  # 230 / 100 * 224, its middle 224 kept
    assert any("57% cut off" in t.get_text() for t in fig.subfigs[0].texts)


def test_every_piece_has_a_box_in_its_line(files):
    from worldtokens.apps.tokens.panels import set_lines

    pieces = [Piece(t, 49000, len(t) % 2 == 0) for t in ("a", "word", "x" * 200, "猫", " of", "\n", "") * 12]
    lines = set_lines(pieces, 8.0)
    flat = [p for line in lines for p, *_ in line]
    assert flat == pieces[: len(flat)]
    for line in lines:
        ends = [left + wide for _, _, left, wide in line]
        assert ends[-1] <= 8.0 + 1e-9
        assert all(nxt[2] >= end for nxt, end in zip(line[1:], ends, strict=False))
    from matplotlib.patches import FancyBboxPatch

    s = seen("a photo of a cat", given=True)
    panel = drawn(s).subfigs[0]
    assert sum(isinstance(p, FancyBboxPatch) for p in panel.axes[0].patches) == s.count == 7
    ids = [t.get_text() for t in panel.axes[0].texts][1::2]
    assert ids == [str(p.id) for p in s.pieces]


def test_points_wear_the_colour_of_their_nearest_centre(files, tmp_path):
    import torch

    rng = np.random.default_rng(0)
    np.save(tmp_path / "cloud.npy", rng.normal(size=(400, 3)))
    s = seen(tmp_path / "cloud.npy")
    from worldtokens.apps.tokens.panels import owners

    xyz, centres, owner = owners(s)
    assert centres.shape == (64, 3) and xyz.shape == (400, 3)
    nearest = torch.cdist(
        torch.tensor(xyz, dtype=torch.float64), torch.tensor(centres, dtype=torch.float64)
    ).argmin(1)
    assert owner.tolist() == nearest.tolist()
    # a centre is one of the points, and its own
    assert all(np.abs(xyz[owner == k] - centres[k]).sum(1).min() < 1e-5 for k in range(64))
    drawn(s)


def test_more_panels_than_a_page_takes_are_told(files, tmp_path, capsys):
    many = [str(files / "small.png")] * 26
    assert main([*many, "--show", str(tmp_path / "a.png")]) == 0
    assert re.search(r"a\.png \(the first 24 of 26\)", capsys.readouterr().err)


def test_a_picture_that_cant_be_written_is_an_input_error(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        main([str(files / "small.png"), "--show", str(tmp_path / "file" / "a.png")])
