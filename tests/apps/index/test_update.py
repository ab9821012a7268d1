"""`Index.update`: only new and changed content is embedded, deleted files are dropped, interrupted updates resume."""

import os
import shutil

import numpy as np
import pytest

from worldtokens.apps.index import index as index_module
from worldtokens.apps.index import store
from worldtokens.apps.index.index import Index
from worldtokens.data.files import walk
from worldtokens.errors import InputError

pytest.importorskip("lancedb")


def test_only_new_and_changed_files_are_embedded(folder, model, update, nearest, make_image):
    report = update(folder, model)
    assert (report.added, report.total, model.clear_reads()) == (3, 3, ["blue.png", "green.png", "red.png"])

    report = update(folder, model)
    assert (report.embedded, report.unchanged, model.clear_reads()) == (0, 3, [])

    make_image(folder / "deep" / "down" / "yellow.png", "yellow")
    make_image(folder / "red.png", "purple", age=50)
    (folder / "green.png").unlink()
    report = update(folder, model)
    assert (report.added, report.changed, report.unchanged, report.removed, report.total) == (1, 1, 1, 1, 3)
    assert model.clear_reads() == ["red.png", "yellow.png"]
    assert Index.find(folder).paths() == ["blue.png", "deep/down/yellow.png", "red.png"]
    assert nearest(folder, model, "purple") == ["red.png"]  # the old content is no longer found
    assert nearest(folder, model, "yellow") == ["deep/down/yellow.png"]


def test_a_touched_a_renamed_and_a_copied_file_are_not_embedded_again(folder, model, update, nearest):
    update(folder, model)
    assert model.clear_reads()
    os.utime(folder / "red.png")
    (folder / "green.png").rename(folder / "grass.png")
    shutil.copy(folder / "blue.png", folder / "sky.png")
    report = update(folder, model)
    assert model.clear_reads() == []
    assert (report.embedded, report.reused, report.unchanged, report.removed, report.total) == (0, 2, 2, 1, 4)
    assert nearest(folder, model, "green") == ["grass.png"]
    assert sorted(nearest(folder, model, "blue", 2)) == ["blue.png", "sky.png"]


@pytest.mark.parametrize("rows_a_write", [1, 256])
def test_two_files_that_swap_names_swap_vectors(folder, model, rows_a_write, monkeypatch, update, nearest):
    monkeypatch.setattr(store, "WRITE_ROWS", rows_a_write)
    update(folder, model)
    (folder / "red.png").rename(folder / "x")
    (folder / "blue.png").rename(folder / "red.png")
    (folder / "x").rename(folder / "blue.png")
    os.utime(folder / "red.png")
    os.utime(folder / "blue.png")
    assert model.clear_reads()
    report = update(folder, model)
    assert (report.embedded, model.clear_reads()) == (0, [])
    assert nearest(folder, model, "red") == ["blue.png"]
    assert nearest(folder, model, "blue") == ["red.png"]


def test_a_change_within_the_clock_resolution_is_detected(folder, model, update, nearest, make_image):
    fresh = make_image(folder / "fresh.bmp", "red", age=0)
    stat = fresh.stat()
    update(folder, model)
    make_image(fresh, "blue", age=0)
    os.utime(fresh, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fresh.stat().st_size == stat.st_size  # equal size and time: only the bytes differ
    assert update(folder, model).changed == 1
    assert sorted(nearest(folder, model, "blue", 2)) == ["blue.png", "fresh.bmp"]


def test_equal_files_are_embedded_once(tmp_path, model, update, make_image):
    for i in range(20):
        make_image(tmp_path / f"{i:02}.png", "red")
    model.clear_reads()
    report = update(tmp_path, model, batch_size=4)
    assert (report.embedded, report.reused, report.total) == (1, 19, 20)


def test_vectors_do_not_depend_on_batch_size_and_threads(folder, model, update):
    update(folder, model)
    one = Index.find(folder).table.to_arrow().sort_by("path")
    update(folder, model, rebuild=True, batch_size=1, workers=8)
    two = Index.find(folder).table.to_arrow().sort_by("path")
    assert one["path"] == two["path"]
    a, b = (np.array(t["vector"].to_pylist()) for t in (one, two))
    assert np.abs(a - b).max() < 1e-6


def test_an_interrupted_update_keeps_its_rows_and_resumes(folder, model, update):
    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(folder, model, batch_size=1, progress=stop)
    assert len(Index.find(folder).paths()) == 3
    assert model.clear_reads()
    report = update(folder, model)
    assert (report.unchanged, model.clear_reads()) == (3, [])


def test_a_file_that_became_unreadable_is_removed(folder, model, update):
    update(folder, model)
    (folder / "red.png").write_bytes(b"gone bad")
    report = update(folder, model)
    assert ([s.path for s in report.skipped], report.removed, report.total) == (["red.png"], 1, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_locked_folder_keeps_its_rows(folder, model, update, make_image):
    make_image(folder / "locked" / "yellow.png", "yellow")
    update(folder, model)
    (folder / "locked").chmod(0)
    try:
        report = update(folder, model)
    finally:
        (folder / "locked").chmod(0o755)
    assert (report.removed, report.total) == (0, 4)


def test_an_unreadable_folder_keeps_its_rows(folder, model, monkeypatch, update, make_image):
    make_image(folder / "locked" / "yellow.png", "yellow")
    update(folder, model)

    def without_locked(*args, **kwargs):
        found = walk(*args, **kwargs)
        found.files = [f for f in found.files if not f.path.startswith("locked/")]
        found.unreadable.append("locked")
        return found

    monkeypatch.setattr(index_module, "walk", without_locked)
    report = update(folder, model)
    assert (report.removed, report.total) == (0, 4)


def test_an_empty_folder_keeps_the_rows_and_raises(folder, model, update):
    update(folder, model)
    for file in folder.glob("*.png"):
        file.unlink()
    with pytest.raises(InputError, match="keeps its 3 rows"):  # e.g. a disk that is not mounted
        update(folder, model)
    assert len(Index.find(folder)) == 3


def test_concurrent_updates_raise(folder, model, update):
    def again(done, total):
        if done == 1:
            with pytest.raises(InputError, match="is updating"):
                update(folder, model)
            tried.append(1)

    tried = []
    update(folder, model, progress=again)
    assert tried
