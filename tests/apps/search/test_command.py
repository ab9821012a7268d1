"""`worldtokens index` and `worldtokens search`: from a folder to results, and error messages."""

import json
import os
import shutil

import pytest
from torch import nn

from worldtokens import cli
from worldtokens.apps.index.index import Index

pytest.importorskip("lancedb")


def test_index_and_search_from_the_command_line(folder, tmp_path, capsys, monkeypatch, make_image, colours):
    saved = colours().save(tmp_path / "model")
    (folder / "broken\n.png").write_bytes(b"no")
    assert cli.run(["index", str(folder), "--model", str(saved), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "3 files" in out and "3 added" in out and "1 skipped" in out and r"broken\n.png" in err

    assert cli.run(["search", "red", "--db", str(folder), "-k", "2", "blue", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    assert [(q, n, os.path.basename(p)) for q, n, _, p in lines if n == "1"] == [
        ("red", "1", "red.png"),
        ("blue", "1", "blue.png"),
    ]
    assert len(lines) == 4 and (Index.default(folder) / "last-search.html").is_file()

    # an image, and an image with text: the normalised sum of both
    monkeypatch.chdir(folder)
    sky = make_image(tmp_path / "sky.png", "blue")
    args = ["--image", str(sky), "--json", "--out", str(tmp_path / "sheet")]
    assert cli.run(["search", *args]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.run(["search", "green", *args]) == 0
    both = json.loads(capsys.readouterr().out)
    assert os.path.basename(alone["hits"][0]["path"]) == "blue.png"
    assert {os.path.basename(h["path"]) for h in both["hits"][:2]} == {"blue.png", "green.png"}
    v, w = (colours().embed("text", [c])[0] for c in ("blue", "green"))
    half = nn.functional.normalize(v + w, dim=0)
    assert abs(both["hits"][0]["score"] - max(float(half @ v), float(half @ w))) < 1e-4
    assert (tmp_path / "sheet.png").is_file() and (tmp_path / "sheet.html").is_file()

    (folder / "red.png").unlink()
    assert cli.run(["index", str(folder)]) == 0  # the model's folder is stored
    assert "1 removed" in capsys.readouterr().out


def test_errors_are_one_line(folder, tmp_path, capsys, colours):
    saved, other = colours().save(tmp_path / "a"), colours(0.01).save(tmp_path / "b")
    cli.run(["index", str(folder), "--model", str(saved)])
    shutil.copytree(saved, tmp_path / "c")
    db = ["--db", str(folder)]
    wrong = [
        (
            ["search", "red", *db, "--model", str(other)],
            ["was built with the model", str(other), "--rebuild"],
        ),
        (["search", *db], ["no query"]),
        (["search", "  ", *db], ["the query is empty"]),
        (["search", "--image", str(tmp_path / "no.png"), *db], ["is not a file"]),
        (["search", "--image", str(tmp_path / "no.wav"), *db], ["modality audio", "embeds image, text"]),
        (["search", "red", "--db", str(tmp_path)], ["no index in"]),
        (["search", "red", "--device", "sofa", *db], ["--device sofa"]),
        (["index", str(tmp_path / "none"), "--model", str(saved)], ["is not a folder"]),
        (["index", str(tmp_path)], ["--model FOLDER"]),
        (["index", str(folder), "--model", str(folder)], ["is not a saved model"]),
        (["index", str(folder), "--batch-size", "0"], ["at least 1"]),
    ]
    capsys.readouterr()
    for args, parts in wrong:
        assert cli.run(args) == 2, args
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(part in err for part in parts), err
    shutil.rmtree(saved)
    assert cli.run(["search", "red", *db]) == 2
    assert "no longer at" in capsys.readouterr().err
    assert (
        cli.run(["search", "red", *db, "--model", str(tmp_path / "c"), "--no-sheet"]) == 0
    )  # the same model in another folder
