"""`Index`: opening, model checks, and search with exact cosine scores."""

import os
import sys

import numpy as np
import pytest

from worldtokens.apps.index import update as update_module
from worldtokens.apps.index.fingerprint import model_identity
from worldtokens.apps.index.index import Index
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.errors import InputError

pytest.importorskip("lancedb")


def test_the_index_moves_with_its_folder(folder, model, tmp_path, update):
    update(folder, model)
    assert model.clear_reads()
    moved = folder.rename(tmp_path / "elsewhere")
    assert Index.find(moved).search(model.embed("text", ["red"])[0], 1)[0].path == str(moved / "red.png")
    assert update(moved, model).unchanged == 3 and model.clear_reads() == []


def test_another_model_raises_until_the_index_is_rebuilt(folder, model, update, colours):
    update(folder, model, model_folder="runs/first")
    other, before = colours(sharpness=0.002), Index.find(folder).table.to_arrow()
    with pytest.raises(InputError) as error:
        update(folder, other, model_folder="runs/second")
    text = str(error.value)
    assert "runs/first" in text and "runs/second" in text and "--rebuild" in text
    assert model_identity(model) in text and model_identity(other) in text
    assert Index.find(folder).table.to_arrow() == before
    report = update(folder, other, model_folder="runs/second", rebuild=True)
    assert (report.added, report.total) == (3, 3)
    Index.find(folder).check_model(model_identity(other), "runs/second")


def test_an_index_belongs_to_one_folder(folder, model, tmp_path, update, make_image):
    update(folder, model)
    make_image(tmp_path / "second" / "a.png", "red")
    with pytest.raises(InputError, match="is the index of"):
        Index(Index.default(folder)).update(tmp_path / "second", model)
    db = tmp_path / "second" / "my-index"  # inside the folder and not hidden: it is excluded
    assert Index(db).update(tmp_path / "second", model).total == 1
    assert Index(db).root == tmp_path / "second"


def test_a_folder_with_other_files_is_not_an_index(folder, model):
    with pytest.raises(InputError, match="holds other files"):
        Index(folder)
    with pytest.raises(InputError, match="no index in"):
        Index.find(folder)


def test_missing_lancedb_raises_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(InputError, match=r"pip install 'worldtokens\[search\]'"):
        Index(tmp_path / "db")


@pytest.fixture(scope="module")
def emoji(tmp_path_factory, model, update):
    """The held-out emoji as indexed files, and their vectors computed without the index."""
    folder, names = tmp_path_factory.mktemp("emoji"), []
    for row in open_emoji("test", skin_tones=False):
        names.append(f"{row['id']}.png")
        (folder / names[-1]).write_bytes(row["image"])
    update(folder, model)
    vectors = model.embed("image", [str(folder / n) for n in names]).numpy()
    assert model.clear_reads()
    return folder, names, vectors


def test_scores_are_exact_cosines_best_first(emoji, model):
    folder, names, vectors = emoji
    for color in ("red", "blue", "yellow"):
        query = model.embed("text", [color])[0].numpy()
        hits = Index.find(folder).search(3 * query, 10)  # the query is normalised
        expected = vectors @ query
        best = np.sort(expected)[::-1][:10]
        assert np.abs(np.array([h.score for h in hits]) - best).max() < 1e-5
        for hit in hits:
            assert abs(expected[names.index(os.path.basename(hit.path))] - hit.score) < 1e-5


def test_the_ann_index_has_high_recall(emoji, model, monkeypatch, tmp_path):
    folder, _, vectors = emoji
    monkeypatch.setattr(update_module, "ANN_ABOVE", 100)
    index = Index(tmp_path / "ann")
    index.update(folder, model)
    assert index.table.list_indices()
    exact = Index.find(folder)
    found = total = 0
    for vector in vectors[::5]:
        # near duplicates have equal scores: a result counts if it scores at least as high as the tenth
        floor = exact.search(vector, 10)[-1].score - 1e-5
        found += sum(h.score >= floor for h in index.search(vector, 10))
        total += 10
    assert found / total >= 0.95


def test_invalid_queries_raise(folder, model):
    index = Index(Index.default(folder))
    with pytest.raises(InputError, match="empty"):
        index.search(np.ones(9))
    index.update(folder, model)
    with pytest.raises(InputError, match=r"expected \(9,\)"):
        index.search(np.ones(8))
    for bad in (np.zeros(9), np.full(9, np.nan)):
        with pytest.raises(InputError, match="cosine similarity is undefined"):
            index.search(bad)
    with pytest.raises(InputError, match="at least 1"):
        index.search(np.ones(9), 0)
    with pytest.raises(InputError, match="expected one of image"):
        index.search(np.ones(9), 1, modality="' OR 1=1")
    assert len(index.search(np.ones(9), 100)) == 3
