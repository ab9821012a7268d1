"""The Brown corpus: words and their tags."""

from worldtokens.data.sets.brown import open_brown


def test_words_keep_their_slashes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    (tmp_path / "brown").mkdir()
    (tmp_path / "brown/cats.txt").write_text("ca01 news\n")
    (tmp_path / "brown/ca01").write_text(
        "\n\n\tThe/at 1/2/cd ``/`` cup/nn ''/'' ./.\n\n\tIt/pps is/bez ./.\n"
    )
    rows = open_brown(unit="sentence")
    assert rows.texts() == ["The 1/2 `` cup '' .", "It is ."] and rows.column("id") == ["ca01.1", "ca01.2"]
    assert open_brown()[0]["text"] == "The 1/2 `` cup '' .\nIt is ." and open_brown()[0]["class"] == "news"
