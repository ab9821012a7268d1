"""Furniture: catalogues in Java's properties format."""

from worldtokens.data.sets.furniture import read_catalog


def test_catalog_of_java_properties(tmp_path):
    path = tmp_path / "c.properties"
    path.write_bytes(
        b"# name#9=no\nid=x\nname#1=Bill 10\\u20ac\nname#12 = Caf\xe9 table \r\ntags#12=Seat, Wood\n"
    )
    assert read_catalog(path) == {1: {"name": "Bill 10€"}, 12: {"name": "Café table", "tags": "Seat, Wood"}}
