"""Number of tokens, grid, positions and text tokens of a source."""

from __future__ import annotations

import warnings

import pytest

from worldtokens.apps.tokens.command import joined, parser
from worldtokens.apps.tokens.inspect import Failed, inspect_source


@pytest.mark.parametrize(
    "name, options, count, grid, positions, seconds, source",
    [
        ("wide.png", ["--size", "native"], 7 * 15, (7, 15), {"y": (0, 6), "x": (0, 14)}, None, "230 x 100 px"),
        ("wide.png", [], 196, (14, 14), {"y": (0, 13), "x": (0, 13)}, None, "230 x 100 px"),
        ("wide.png", ["--patch", "32"], 49, (7, 7), {"y": (0, 6), "x": (0, 6)}, None, "230 x 100 px"),
        ("tone.wav", [], 50, (50,), {"t": (0, 49)}, 0.02, "1.00 s at 16 kHz"),
        # 98 windows of 25 ms, hop 10 ms; patches of 16 with stride 10, the last one padded: 1 + ceil(82 / 10); bands 1 + (128 - 16) // 10
        ("tone.wav", ["--preset", "ast"], 120, (10, 12), {"t": (0, 9), "y": (0, 11)}, 0.1, "1.00 s at 16 kHz"),
        # kernels and strides of wav2vec 2.0: 16,000 samples give 49
        ("tone.wav", ["--preset", "waveform"], 49, (49,), {"t": (0, 48)}, 0.02, "1.00 s at 16 kHz"),
        # 4 frames of one second at 1/8, 3/8, 5/8 and 7/8: tubelets of two are half a second apart
        ("video.mp4", ["--frames", "4", "--size", "native"], 24, (2, 3, 4), {"t": (0, 1), "y": (0, 2), "x": (0, 3)}, 0.5, "4 frames 64 x 48"),
        ("video.mp4", ["--fps", "2", "--size", "32"], 4, (1, 2, 2), {"y": (0, 1), "x": (0, 1)}, None, "2 frames 32 x 32"),
        # 1 + (40 - 16) / 8 patches per channel; two channels without the time column
        ("load.csv", ["--time", "day"], 8, (4, 2), {"patch": (0, 3), "channel": (0, 1)}, None, "40 steps of 2"),
        ("scene", ["--patch", "32", "--size", "64"], 4, (1, 2, 2), {"y": (0, 1), "x": (0, 1)}, None, "1 view 64 x 64"),
    ],
)  # fmt: skip
def test_tokens_grid_and_positions_of_a_file(
    files, name, options, count, grid, positions, seconds, source, inspected
):
    s = inspected(files / name, *options)
    assert (s.count, s.grid, s.positions, s.source) == (count, grid, positions, source)
    assert s.seconds == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


def test_a_small_point_cloud_has_one_token_per_point(files, inspected):
    s = inspected(files / "cloud.xyz")
    assert (s.count, s.grid) == (8, (8, 8))
    # a cube's corners on the unit sphere, scaled by sqrt(64) / 2
    side = 4 / 3**0.5
    assert s.positions == {a: (pytest.approx(-side, abs=1e-4), pytest.approx(side, abs=1e-4)) for a in "zyx"}


def test_text_tokens_concatenate_to_the_text(files, inspected):
    s = inspected(files / "text.txt")
    assert [p.special for p in s.text_tokens] == [True, *[False] * (s.count - 2), True]
    raw = b""
    for p in s.text_tokens[1:-1]:  # a partial character is given as bytes
        raw += bytes.fromhex(p.text[1:-1]) if p.partial else p.text.encode()
        raw += b" " * p.ends_word
    assert raw.decode().split() == ["strawberries", ",", "naïve", "猫", "🍎!"]
    assert joined(s.text_tokens).startswith("<|startoftext|> | strawberries | , | na·")


def test_a_custom_vocabulary_and_a_truncated_text(tmp_path, inspected):
    import worldtokens as wt

    text = wt.TextTokenizer.train(["the cat sat on the mat"] * 4, vocab_size=280, dim=8)
    text.save_vocabulary(tmp_path / "tokenizer.json")
    option = ["--vocabulary", str(tmp_path / "tokenizer.json")]
    s = inspected("the cat zzz", *option, is_text=True)
    assert "".join(p.text for p in s.text_tokens if not p.special) == "the cat zzz"
    assert [p.id for p in s.text_tokens] == text.read("the cat zzz").tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = inspected("z" * 100, *option, is_text=True)
    assert s.count == 77 and s.source == "100 characters, truncated from 101 tokens"


def test_as_overrides_the_extension(files, inspected):
    (files / "video.bin").write_bytes((files / "video.mp4").read_bytes())
    assert isinstance(inspect_source(str(files / "video.bin"), parser().parse_args([])), Failed)
    assert inspected(files / "video.bin", kind="video").modality == "video"
