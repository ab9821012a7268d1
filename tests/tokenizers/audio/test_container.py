"""Opening media files: files cut short, false headers, and files that point to others."""

import struct

import pytest

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.read import MAX_CHANNELS, read_audio


def test_files_without_samples_or_cut_short_raise(encode, tones):
    with pytest.raises(InputError, match="no samples"):
        read_audio(wav_header(size=0))
    for args in (
        ("wav", "pcm_f32le", 44100, "flt"),
        ("flac", "flac", 44100, "s16"),
        ("ipod", "aac", 44100, "fltp"),
    ):
        data = encode(tones(seconds=2), *args)
        with pytest.raises(InputError, match=r"cut short|damaged"):
            read_audio(data[: len(data) // 2])


def wav_header(channels=1, sample_rate=8000, bits=16, size=1000):
    head = struct.pack(
        "<HHIIHH",
        1,
        channels,
        sample_rate & 0xFFFFFFFF,
        (sample_rate * 2) & 0xFFFFFFFF,
        (channels * bits // 8) & 0xFFFF,
        bits,
    )
    return (
        b"RIFF"
        + struct.pack("<I", 36 + size)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + head
        + b"data"
        + struct.pack("<I", size)
    )


@pytest.mark.parametrize(
    "head",
    [
        {"sample_rate": 0}, {"sample_rate": 7}, {"sample_rate": 2**31 - 1}, {"channels": 0}, {"channels": MAX_CHANNELS + 1},
        {"channels": 65535}, {"bits": 0}, {"bits": 13},
    ],
    ids=str,
)  # fmt: skip
def test_false_headers_raise_or_are_decoded_correctly(head):
    try:
        got, sample_rate = read_audio(wav_header(**head) + bytes(1000))
    except InputError:
        return
    assert sample_rate == 8000 and got.numel() > 0 and bool((got == 0).all())


@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile {path}\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    ],
    ids=["concat", "playlist of files", "playlist of addresses", "stream description"],
)
def test_a_file_that_points_elsewhere_opens_nothing(encode, tones, tmp_path, text):
    path = tmp_path / "secret.ts"
    path.write_bytes(encode(tones(), "mpegts", "aac"))
    assert read_audio(path)[1] == 44100
    (tmp_path / "song.mp3").write_text(text.format(path=path))
    with pytest.raises(InputError):
        read_audio(tmp_path / "song.mp3")
