"""`worldtokens tokens`: table, JSON, padding, and errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from worldtokens import cli
from worldtokens.apps.tokens.command import batch_line, main, padding
from worldtokens.errors import InputError


def test_padding_and_packing_by_hand(files, inspected):
    wide, small = (inspected(files / n, "--size", "native") for n in ("wide.png", "small.png"))
    shares = padding([wide, small, small])
    assert shares[id(wide)] == 0 and shares[id(small)] == pytest.approx(1 - 4 / 105)
    # 113 of 315 positions, then 105 in one row and 4 + 4 in another
    assert batch_line([wide, small, small]) == (
        "one batch: 3 rows of 105, 64% padding; packed: 2 rows of 105, 46% padding"
    )


def test_an_unreadable_file_is_a_line_and_the_others_are_shown(files, capsys):
    names = [str(files / n) for n in ("small.png", "broken.png", "nothing.wav", "tone.wav")]
    assert cli.run(["tokens", *names, "x.foo", "--text", "a cat"]) == 1
    out, err = capsys.readouterr()
    head, *lines = out.splitlines()
    assert head.split("\t")[:4] == ["file", "modality", "source", "tokens"]
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


def test_json_output(files, capsys):
    assert main([str(files / "tone.wav"), str(files / "broken.png"), "--text", "a cat", "--json"]) == 1
    audio, broken, text = map(json.loads, capsys.readouterr().out.splitlines())
    assert (audio["tokens"], audio["grid"], audio["seconds_per_token"]) == (50, [50], 0.02)
    assert audio["positions"] == {"t": [0, 49]} and audio["padding"] == 0
    assert broken["modality"] == "image" and broken["error"]
    assert text["ids"] == [49406, 320, 2368, 49407] and text["padding"] == 0.92


def test_control_characters_in_a_name_do_not_break_the_table(files, capsys):
    assert main(["--text", "a\tb\nc"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "args, why",
    [
        ([], "no source"),
        (["x.png", "--size", "big"], "--size big"),
        (["x.png", "--show", "out.jpg"], "must be .png"),
        (["x.png", "--patch", "0"], "patch is 0"),
        (["x.wav", "--preset", "mfcc"], "preset is 'mfcc'"),
        (["--text", "a", "--vocabulary", "nowhere.json"], "nowhere.json"),
    ],
)
def test_an_invalid_setting_raises(args, why):
    with pytest.raises(InputError, match=why):
        main(args)


def test_help_needs_no_torch():
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from worldtokens import cli; cli.run(['tokens', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--show OUT.png" in done.stdout and done.stdout.endswith("False\n"), done.stderr
