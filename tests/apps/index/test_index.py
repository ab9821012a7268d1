"""The index keeps step with a folder: what is embedded, what is reused, what leaves; and the two commands.

The model here is small but means something: a vector says how much of an image is of which colour, and a colour's
name lies where an image all of that colour lies. So "red" must find red images.
"""

import json
import os
import shutil
import sys
import threading
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from worldtokens import cli
from worldtokens.apps.index import index as index_module
from worldtokens.apps.index import store
from worldtokens.apps.index.fingerprint import model_identity
from worldtokens.apps.index.index import Index
from worldtokens.data.files import shown, walk
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.errors import InputError
from worldtokens.parts import load
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch, Tokenizer

pytest.importorskip("lancedb")

NAMED = {
    "red": (221, 46, 68),
    "orange": (244, 144, 12),
    "yellow": (255, 204, 77),
    "green": (92, 145, 59),
    "blue": (85, 172, 238),
    "purple": (170, 142, 214),
    "brown": (193, 105, 79),
    "black": (41, 47, 51),
    "white": (255, 255, 255),
}


class Pixels(Tokenizer):
    modality = "image"

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def read(self, source):
        self.reads.append(os.path.basename(source) if isinstance(source, str) else "")
        try:
            with Image.open(source) as im:
                rgba = im.convert("RGBA").resize((32, 32))
        except OSError as e:
            raise InputError(f"{source}: can't be read as an image") from e
        return torch.from_numpy(np.array(rgba)).float()

    def collate(self, raws):
        if any(raw[..., 3].max() == 0 for raw in raws):
            raise InputError("an image without a single visible pixel")
        return Batch(x=torch.stack(raws))


class Words(Tokenizer):
    modality = "text"

    def read(self, source):
        if source not in NAMED:
            raise InputError(f"{source!r} is no colour")
        return torch.tensor([*NAMED[source], 255.0]).expand(32, 32, 4)

    def collate(self, raws):
        return Batch(x=torch.stack(list(raws)))


class Colours(Task):
    def __init__(self, sharpness: float = 0.001) -> None:
        super().__init__()
        self.tokenizers = nn.ModuleDict({"image": Pixels(), "text": Words()})
        self.anchors = nn.Parameter(torch.tensor(list(NAMED.values()), dtype=torch.float32))
        self.sharpness = sharpness

    def encode(self, column, batch):
        rgb, alpha = batch["x"][..., :3].flatten(1, 2), batch["x"][..., 3:].flatten(1, 2) / 255
        near = (-self.sharpness * (rgb[:, :, None] - self.anchors).square().sum(-1)).softmax(-1)
        return nn.functional.normalize((near * alpha).sum(1) / alpha.sum(1), dim=-1)

    @torch.no_grad()
    def embed(self, column, sources):
        tokenizer = self.tokenizers[column]
        return self.encode(column, tokenizer.collate([tokenizer.read(s) for s in sources]))

    @property
    def reads(self):
        """The files that were decoded since the last look."""
        reads = self.tokenizers["image"].reads
        seen = sorted(reads)
        reads.clear()
        return seen


def picture(path, color, size=(40, 30), age=100):
    """An image of one colour that was made `age` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, NAMED.get(color, color)).save(path)
    when = path.stat().st_mtime - age
    os.utime(path, (when, when))
    return path


@pytest.fixture(scope="module")
def model():
    return Colours().eval()


@pytest.fixture
def folder(tmp_path, model):
    for color in ("red", "green", "blue"):
        picture(tmp_path / "pics" / f"{color}.png", color)
    assert model.reads is not None
    return tmp_path / "pics"


def update(folder, model, **options):
    return Index(Index.default(folder)).update(folder, model, **options)


def nearest(folder, model, words, k=1):
    index = Index.find(folder)
    return [os.path.relpath(h.path, folder) for h in index.search(model.embed("text", [words])[0], k)]


# ---- keeping step ----------------------------------------------------------------------------------------


def test_only_what_is_new_or_changed_is_embedded_again(folder, model):
    report = update(folder, model)
    assert (report.added, report.total, model.reads) == (3, 3, ["blue.png", "green.png", "red.png"])

    report = update(folder, model)
    assert (report.embedded, report.unchanged, model.reads) == (0, 3, [])

    picture(folder / "deep" / "down" / "yellow.png", "yellow")
    picture(folder / "red.png", "purple", age=50)
    (folder / "green.png").unlink()
    report = update(folder, model)
    assert (report.added, report.changed, report.unchanged, report.removed, report.total) == (1, 1, 1, 1, 3)
    assert model.reads == ["red.png", "yellow.png"]
    assert Index.find(folder).paths() == ["blue.png", "deep/down/yellow.png", "red.png"]
    assert nearest(folder, model, "purple") == ["red.png"]  # the new content answers, the old one is gone
    assert nearest(folder, model, "yellow") == ["deep/down/yellow.png"]


def test_a_touched_a_renamed_and_a_copied_file_are_not_embedded_again(folder, model):
    update(folder, model)
    assert model.reads
    os.utime(folder / "red.png")
    (folder / "green.png").rename(folder / "grass.png")
    shutil.copy(folder / "blue.png", folder / "sky.png")
    report = update(folder, model)
    assert model.reads == []
    assert (report.embedded, report.reused, report.unchanged, report.removed, report.total) == (0, 2, 2, 1, 4)
    assert nearest(folder, model, "green") == ["grass.png"]
    assert sorted(nearest(folder, model, "blue", 2)) == ["blue.png", "sky.png"]


@pytest.mark.parametrize("rows_a_write", [1, 256])
def test_two_files_that_change_names_with_each_other_change_vectors(folder, model, rows_a_write, monkeypatch):
    monkeypatch.setattr(store, "WRITE_ROWS", rows_a_write)
    update(folder, model)
    (folder / "red.png").rename(folder / "x")
    (folder / "blue.png").rename(folder / "red.png")
    (folder / "x").rename(folder / "blue.png")
    os.utime(folder / "red.png")
    os.utime(folder / "blue.png")
    assert model.reads
    report = update(folder, model)
    assert (report.embedded, model.reads) == (0, [])
    assert nearest(folder, model, "red") == ["blue.png"]
    assert nearest(folder, model, "blue") == ["red.png"]


def test_a_change_within_the_grain_of_the_clock_is_seen(folder, model):
    fresh = picture(folder / "fresh.bmp", "red", age=0)
    stat = fresh.stat()
    update(folder, model)
    picture(fresh, "blue", age=0)
    os.utime(fresh, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fresh.stat().st_size == stat.st_size  # the same size and time: only the bytes differ
    assert update(folder, model).changed == 1
    assert sorted(nearest(folder, model, "blue", 2)) == ["blue.png", "fresh.bmp"]


def test_equal_files_are_embedded_once(tmp_path, model):
    for i in range(20):
        picture(tmp_path / f"{i:02}.png", "red")
    assert model.reads is not None
    report = update(tmp_path, model, batch_size=4)
    assert (report.embedded, report.reused, report.total) == (1, 19, 20)


def test_batches_and_threads_change_nothing(folder, model):
    update(folder, model)
    one = Index.find(folder).table.to_arrow().sort_by("path")
    update(folder, model, rebuild=True, batch_size=1, workers=8)
    two = Index.find(folder).table.to_arrow().sort_by("path")
    assert one["path"] == two["path"]
    a, b = (np.array(t["vector"].to_pylist()) for t in (one, two))
    assert np.abs(a - b).max() < 1e-6


def test_an_interrupt_keeps_what_is_embedded(folder, model):
    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(folder, model, batch_size=1, progress=stop)
    kept = Index.find(folder).paths()
    assert len(kept) == 3
    assert model.reads
    report = update(folder, model)
    assert (report.unchanged, model.reads) == (3, [])


def test_the_index_moves_with_its_folder(folder, model, tmp_path):
    update(folder, model)
    assert model.reads
    moved = folder.rename(tmp_path / "elsewhere")
    assert Index.find(moved).search(model.embed("text", ["red"])[0], 1)[0].path == str(moved / "red.png")
    assert update(moved, model).unchanged == 3 and model.reads == []


# ---- what cannot be indexed -------------------------------------------------------------------------------


def test_unreadable_files_are_skipped_with_a_reason_and_the_rest_goes_on(folder, model):
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    (folder / "empty.png").write_bytes(b"")
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(folder / "unseen.png")  # its batch is refused by collate
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "pipe.png")
    done = []
    thread = threading.Thread(target=lambda: done.append(update(folder, model)), daemon=True)
    thread.start()
    thread.join(60)  # a pipe that is opened would wait for ever
    assert done, "the update hangs"
    report = done[0]
    assert (report.added, report.total) == (3, 3)
    reasons = {s.path: s.reason for s in report.skipped}
    assert set(reasons) == {"broken.jpg", "empty.png", "unseen.png", "dangling.png", "pipe.png"}
    assert reasons["broken.jpg"] == "can't be read as an image" and "visible pixel" in reasons["unseen.png"]
    assert reasons["dangling.png"] == "a link to nothing" and reasons["pipe.png"] == "not a regular file"


def test_a_file_that_turned_bad_leaves(folder, model):
    update(folder, model)
    (folder / "red.png").write_bytes(b"gone bad")
    report = update(folder, model)
    assert ([s.path for s in report.skipped], report.removed, report.total) == (["red.png"], 1, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_locked_folder_keeps_its_rows(folder, model):
    picture(folder / "locked" / "yellow.png", "yellow")
    update(folder, model)
    (folder / "locked").chmod(0)
    try:
        report = update(folder, model)
    finally:
        (folder / "locked").chmod(0o755)
    assert (report.removed, report.total) == (0, 4)


def test_a_folder_that_could_not_be_read_keeps_its_rows(folder, model, monkeypatch):
    picture(folder / "locked" / "yellow.png", "yellow")
    update(folder, model)

    def half(*args, **kwargs):
        found = walk(*args, **kwargs)
        found.files = [f for f in found.files if not f.path.startswith("locked/")]
        found.blocked.append("locked")
        return found

    monkeypatch.setattr(index_module, "walk", half)
    report = update(folder, model)
    assert (report.removed, report.total) == (0, 4)


def test_names_of_every_kind(tmp_path, model):
    names = [
        "with space.png",
        "new\nline.png",
        "quo'te\".png",
        "naïve-日本.png",
        "[red].PNG",
        "%s;--.jpeg",
        "-k.png",
    ]
    for name in names:
        picture(tmp_path / name, "red")
    raw = os.fsencode(tmp_path) + b"/not-utf8-\xff.png"
    shutil.copy(tmp_path / "-k.png", raw)
    picture(tmp_path / ".hidden.png", "red")
    picture(tmp_path / ".cache" / "thumb.png", "red")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "circle").symlink_to(tmp_path)
    for links in (False, True):
        report = update(tmp_path, model, follow_links=links)
        assert report.total == len(names) + 1
    paths = Index.find(tmp_path).paths()
    assert set(paths) == {*names, "not-utf8-\udcff.png"}
    hits = Index.find(tmp_path).search(model.embed("text", ["red"])[0], 20)
    assert all(os.path.exists(h.path) for h in hits) and len(hits) == len(names) + 1
    assert shown("new\nline-\udcff.png") == r"new\nline-\xff.png"
    for name in names:
        (tmp_path / name).unlink()
    assert update(tmp_path, model).removed == len(names)


def test_linked_folders_are_entered_only_if_asked_for(folder, model, tmp_path):
    picture(tmp_path / "other" / "yellow.png", "yellow")
    (folder / "link").symlink_to(tmp_path / "other")
    report = update(folder, model)
    assert report.total == 3 and "link to a folder" in report.skipped[0].reason
    assert update(folder, model, follow_links=True).total == 4


def test_nothing_to_index_says_what_was_found(tmp_path, model):
    with pytest.raises(InputError, match=r"found no files; expected files of image: .jpg"):
        update(tmp_path, model)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(InputError, match=r"found 1 \.pdf"):
        update(tmp_path, model)
    with pytest.raises(InputError, match="is not a folder"):
        update(tmp_path / "a.pdf", model)


def test_an_emptied_folder_does_not_empty_the_index(folder, model):
    update(folder, model)
    for file in folder.glob("*.png"):
        file.unlink()
    with pytest.raises(InputError, match="3 rows are kept"):  # a disk that is not mounted looks like this
        update(folder, model)
    assert len(Index.find(folder)) == 3


def test_text_files_are_indexed_only_if_asked_for(folder, model):
    (folder / "note.txt").write_text("yellow")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    assert update(folder, model).total == 3
    report = update(folder, model, modalities=["image", "text"])
    assert report.total == 4 and "UTF-8" in report.skipped[0].reason
    assert update(folder, model).total == 4  # it is remembered
    assert nearest(folder, model, "yellow") == ["note.txt"]
    index = Index.find(folder)
    hits = index.search(model.embed("text", ["yellow"])[0], 5, modality="image")
    assert len(hits) == 3 and {h.modality for h in hits} == {"image"}
    with pytest.raises(InputError, match="does not read audio; it reads image, text"):
        update(folder, model, modalities=["audio"])


# ---- models ----------------------------------------------------------------------------------------------


def test_identity_follows_the_weights_and_settings_and_survives_saving(model, tmp_path):
    other = Colours()
    assert model_identity(other) == model_identity(model)
    assert model_identity(load(other.save(tmp_path / "m"))) == model_identity(model)
    with torch.no_grad():
        other.anchors[0, 0] += 1
    assert model_identity(other) != model_identity(model)
    assert model_identity(Colours(sharpness=0.002)) != model_identity(model)


def test_another_model_is_refused_by_name_until_rebuilt(folder, model):
    update(folder, model, model_folder="runs/first")
    other, before = Colours(sharpness=0.002), Index.find(folder).table.to_arrow()
    with pytest.raises(InputError) as error:
        update(folder, other, model_folder="runs/second")
    text = str(error.value)
    assert "runs/first" in text and "runs/second" in text and "--rebuild" in text
    assert model_identity(model) in text and model_identity(other) in text
    assert Index.find(folder).table.to_arrow() == before
    report = update(folder, other, model_folder="runs/second", rebuild=True)
    assert (report.added, report.total) == (3, 3)
    Index.find(folder).check_model(model_identity(other), "runs/second")


def test_an_index_belongs_to_one_folder(folder, model, tmp_path):
    update(folder, model)
    picture(tmp_path / "second" / "a.png", "red")
    with pytest.raises(InputError, match="is the index of"):
        Index(Index.default(folder)).update(tmp_path / "second", model)
    db = tmp_path / "second" / "my-index"  # inside of the folder, and not hidden: it is not walked
    assert Index(db).update(tmp_path / "second", model).total == 1
    assert Index(db).root == tmp_path / "second"


def test_a_folder_that_holds_something_else_is_left_alone(folder, model):
    with pytest.raises(InputError, match="holds something else"):
        Index(folder)
    with pytest.raises(InputError, match="no index in"):
        Index.find(folder)


def test_two_writers_at_once_are_refused(folder, model):
    def again(done, total):
        if done == 1:
            with pytest.raises(InputError, match="at work"):
                update(folder, model)
            tried.append(1)

    tried = []
    update(folder, model, progress=again)
    assert tried


def test_without_lancedb_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(InputError, match=r"pip install 'worldtokens\[search\]'"):
        Index(tmp_path / "db")


# ---- searching -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emoji(tmp_path_factory, model):
    """The held-out emoji as files, indexed, and their vectors made without an index."""
    folder, names = tmp_path_factory.mktemp("emoji"), []
    for row in open_emoji("test", skin_tones=False):
        names.append(f"{row['id']}.png")
        (folder / names[-1]).write_bytes(row["image"])
    update(folder, model)
    vectors = model.embed("image", [str(folder / n) for n in names]).numpy()
    assert model.reads
    return folder, names, vectors


def test_scores_are_exact_cosines_best_first(emoji, model):
    folder, names, vectors = emoji
    for color in ("red", "blue", "yellow"):
        query = model.embed("text", [color])[0].numpy()
        hits = Index.find(folder).search(3 * query, 10)  # the query's length does not matter
        right = vectors @ query
        best = np.sort(right)[::-1][:10]
        assert np.abs(np.array([h.score for h in hits]) - best).max() < 1e-5
        for hit in hits:
            assert abs(right[names.index(os.path.basename(hit.path))] - hit.score) < 1e-5


def test_a_large_index_answers_through_its_ann_index_as_exactly(emoji, model, monkeypatch, tmp_path):
    folder, _, vectors = emoji
    monkeypatch.setattr(index_module, "ANN_ABOVE", 100)
    index = Index(tmp_path / "ann")
    index.update(folder, model)
    assert index.table.list_indices()
    exact = Index.find(folder)
    found = total = 0
    for vector in vectors[::5]:
        # near twins have equal scores: an answer counts if it is as near as the tenth
        floor = exact.search(vector, 10)[-1].score - 1e-5
        found += sum(h.score >= floor for h in index.search(vector, 10))
        total += 10
    assert found / total >= 0.95


def test_wrong_questions(folder, model):
    index = Index(Index.default(folder))
    with pytest.raises(InputError, match="empty"):
        index.search(np.ones(9))
    index.update(folder, model)
    with pytest.raises(InputError, match="vectors of 9 numbers"):
        index.search(np.ones(8))
    for bad in (np.zeros(9), np.full(9, np.nan)):
        with pytest.raises(InputError, match="no direction"):
            index.search(bad)
    with pytest.raises(InputError, match="at least 1"):
        index.search(np.ones(9), 0)
    with pytest.raises(InputError, match="expected one of image"):
        index.search(np.ones(9), 1, modality="' OR 1=1")
    assert len(index.search(np.ones(9), 100)) == 3


# ---- the commands ----------------------------------------------------------------------------------------


def test_commands_from_folder_to_answer(folder, tmp_path, capsys, monkeypatch):
    saved = Colours().save(tmp_path / "model")
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

    # an image, and an image with words: the sum lies between both
    monkeypatch.chdir(folder)
    sky = picture(tmp_path / "sky.png", "blue")
    args = ["--image", str(sky), "--json", "--out", str(tmp_path / "sheet")]
    assert cli.run(["search", *args]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.run(["search", "green", *args]) == 0
    both = json.loads(capsys.readouterr().out)
    assert os.path.basename(alone["hits"][0]["path"]) == "blue.png"
    assert {os.path.basename(h["path"]) for h in both["hits"][:2]} == {"blue.png", "green.png"}
    v, w = (Colours().embed("text", [c])[0] for c in ("blue", "green"))
    half = nn.functional.normalize(v + w, dim=0)
    assert abs(both["hits"][0]["score"] - max(float(half @ v), float(half @ w))) < 1e-4
    assert (tmp_path / "sheet.png").is_file() and (tmp_path / "sheet.html").is_file()

    (folder / "red.png").unlink()
    assert cli.run(["index", str(folder)]) == 0  # the model is remembered
    assert "1 removed" in capsys.readouterr().out


def test_commands_say_what_is_wrong_in_one_line(folder, tmp_path, capsys):
    saved, other = Colours().save(tmp_path / "a"), Colours(0.01).save(tmp_path / "b")
    cli.run(["index", str(folder), "--model", str(saved)])
    shutil.copytree(saved, tmp_path / "c")
    db = ["--db", str(folder)]
    wrong = [
        (
            ["search", "red", *db, "--model", str(other)],
            ["was made with the model", str(other), "--rebuild"],
        ),
        (["search", *db], ["nothing to look for"]),
        (["search", "  ", *db], ["the query is empty"]),
        (["search", "--image", str(tmp_path / "no.png"), *db], ["is not a file"]),
        (["search", "--image", str(tmp_path / "no.wav"), *db], ["holds audio", "reads image, text"]),
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
    )  # the same model, moved


def test_a_picture_given_as_bytes_in_memory_is_the_file(folder, model):
    """What the sheet and the index see of a file is the file: the vector in the index is `embed`'s."""
    update(folder, model)
    row = Index.find(folder).table.search().where("path = X'" + b"red.png".hex() + "'").to_list()[0]
    data = BytesIO((folder / "red.png").read_bytes())
    direct = model.embed("image", [data])[0].numpy()
    assert np.abs(np.float32(row["vector"]) - direct).max() < 1e-6


def test_a_file_is_of_the_kind_whose_front_end_takes_its_ending():
    from worldtokens.data.files import modality_of
    from worldtokens.tokenizers.points.read import KINDS

    taken = {kind: modality_of(f"a.{kind.upper()}") for kind in KINDS}
    # what could as well be a text or a table is taken for that
    assert {k for k, m in taken.items() if m != "points"} == {"txt", "csv"}
    assert modality_of("load.csv") == modality_of("load.tsv") == "series"
