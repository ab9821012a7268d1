"""Bible verses: OSIS markup and the SWORD zText format."""

import struct
import zlib

import pytest

from worldtokens.data.sets.verses import plain_verse, read_ztext
from worldtokens.errors import InputError


def test_markup_and_notes_are_removed_and_spaces_kept():
    spanish = '<w lemma="H1">hay allí</w><transChange type="added">también</transChange><w lemma="H2">bdelio</w> <w>y</w>.'
    assert plain_verse(spanish) == "hay allí también bdelio y."
    english = (
        '<w>begat</w> <w>Serug</w>:<note placement="foot"><reference>11.20 </reference>Gr. Saruch</note> '
    )
    assert plain_verse(english) == "begat Serug:"
    psalm = '<title>Of an editor</title><title canonical="true">A <w>Psalm</w>.</title> <lg/><divineName><w>LORD</w></divineName>, how'
    assert plain_verse(psalm) == "A Psalm. LORD, how"


def test_ztext_entries_are_read_from_compressed_blocks(tmp_path):
    texts = ["", "first", "zweite ü", "third"]
    blocks = [b"first" + "zweite ü".encode(), b"third"]
    packed = [zlib.compress(block) for block in blocks]
    (tmp_path / "nt.bzz").write_bytes(b"".join(packed))
    starts = [(0, len(packed[0]), len(blocks[0])), (len(packed[0]), len(packed[1]), 5)]
    (tmp_path / "nt.bzs").write_bytes(b"".join(struct.pack("<III", *start) for start in starts))
    entries = [(0, 0, 0), (0, 0, 5), (0, 5, 9), (1, 0, 5)]
    (tmp_path / "nt.bzv").write_bytes(b"".join(struct.pack("<IIH", *entry) for entry in entries))
    assert read_ztext(tmp_path, "nt") == texts
    with pytest.raises(InputError, match="zText"):
        read_ztext(tmp_path, "ot")
