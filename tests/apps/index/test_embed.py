"""Which files are read and embedded: unreadable and linked ones, unusual names, modalities."""

import os
import shutil
import threading
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from worldtokens.apps.index.index import Index
from worldtokens.data.files import printable
from worldtokens.errors import InputError

pytest.importorskip("lancedb")


def test_unreadable_files_are_skipped_with_a_reason_and_the_others_are_indexed(folder, model, update):
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    (folder / "empty.png").write_bytes(b"")
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(folder / "unseen.png")  # collate raises for its batch
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "pipe.png")
    done = []
    thread = threading.Thread(target=lambda: done.append(update(folder, model)), daemon=True)
    thread.start()
    thread.join(60)  # opening a pipe would block
    assert done, "the update hangs"
    report = done[0]
    assert (report.added, report.total) == (3, 3)
    reasons = {s.path: s.reason for s in report.skipped}
    assert set(reasons) == {"broken.jpg", "empty.png", "unseen.png", "dangling.png", "pipe.png"}
    assert reasons["broken.jpg"] == "cannot be read as an image" and "visible pixel" in reasons["unseen.png"]
    assert reasons["dangling.png"] == "a broken link" and reasons["pipe.png"] == "not a regular file"


def test_unusual_file_names_are_indexed(tmp_path, model, update, make_image):
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
        make_image(tmp_path / name, "red")
    raw = os.fsencode(tmp_path) + b"/not-utf8-\xff.png"
    shutil.copy(tmp_path / "-k.png", raw)
    make_image(tmp_path / ".hidden.png", "red")
    make_image(tmp_path / ".cache" / "thumb.png", "red")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "circle").symlink_to(tmp_path)
    for links in (False, True):
        report = update(tmp_path, model, follow_links=links)
        assert report.total == len(names) + 1
    paths = Index.find(tmp_path).paths()
    assert set(paths) == {*names, "not-utf8-\udcff.png"}
    hits = Index.find(tmp_path).search(model.embed("text", ["red"])[0], 20)
    assert all(os.path.exists(h.path) for h in hits) and len(hits) == len(names) + 1
    assert printable("new\nline-\udcff.png") == r"new\nline-\xff.png"
    for name in names:
        (tmp_path / name).unlink()
    assert update(tmp_path, model).removed == len(names)


def test_linked_folders_are_entered_only_with_follow_links(folder, model, tmp_path, update, make_image):
    make_image(tmp_path / "other" / "yellow.png", "yellow")
    (folder / "link").symlink_to(tmp_path / "other")
    report = update(folder, model)
    assert report.total == 3 and "link to a folder" in report.skipped[0].reason
    assert update(folder, model, follow_links=True).total == 4


def test_a_folder_without_indexable_files_raises_with_what_it_contains(tmp_path, model, update):
    with pytest.raises(InputError, match=r"found no files; expected files of image: .jpg"):
        update(tmp_path, model)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(InputError, match=r"found 1 \.pdf"):
        update(tmp_path, model)
    with pytest.raises(InputError, match="is not a folder"):
        update(tmp_path / "a.pdf", model)


def test_text_files_are_indexed_only_on_request(folder, model, update, nearest):
    (folder / "note.txt").write_text("yellow")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    assert update(folder, model).total == 3
    report = update(folder, model, modalities=["image", "text"])
    assert report.total == 4 and "UTF-8" in report.skipped[0].reason
    assert update(folder, model).total == 4  # the modalities are stored
    assert nearest(folder, model, "yellow") == ["note.txt"]
    index = Index.find(folder)
    hits = index.search(model.embed("text", ["yellow"])[0], 5, modality="image")
    assert len(hits) == 3 and {h.modality for h in hits} == {"image"}
    with pytest.raises(InputError, match="does not embed audio; it embeds image, text"):
        update(folder, model, modalities=["audio"])


def test_an_indexed_vector_equals_embed_of_the_files_bytes(folder, model, update):
    update(folder, model)
    row = Index.find(folder).table.search().where("path = X'" + b"red.png".hex() + "'").to_list()[0]
    data = BytesIO((folder / "red.png").read_bytes())
    direct = model.embed("image", [data])[0].numpy()
    assert np.abs(np.float32(row["vector"]) - direct).max() < 1e-6


def test_a_files_modality_is_that_of_the_front_end_for_its_extension():
    from worldtokens.data.files import modality_of
    from worldtokens.tokenizers.points.read import KINDS

    taken = {kind: modality_of(f"a.{kind.upper()}") for kind in KINDS}
    # ambiguous extensions are text or tables
    assert {k for k, m in taken.items() if m != "points"} == {"txt", "csv"}
    assert modality_of("load.csv") == modality_of("load.tsv") == "series"
