"""One small file of each modality, with a number of tokens that can be worked out by hand."""

import json
import wave

import numpy as np
import pytest
from PIL import Image

from worldtokens.apps.tokens.command import parser
from worldtokens.apps.tokens.inspect import Inspected, inspect_source


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folder of the files."""
    import av

    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)

    def save_image(name, width, height):
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)

    save_image("wide.png", 230, 100)
    save_image("small.png", 32, 32)
    with wave.open(str(folder / "tone.wav"), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(16000)
        f.writeframes((8000 * np.sin(np.arange(16000) * 0.2)).astype("<i2").tobytes())
    with wave.open(str(folder / "long.wav"), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(16000)
        loud = np.where(np.arange(64000) // 16000 == 2, 9000, 200)  # the third of four seconds
        f.writeframes((loud * np.sin(np.arange(64000) * 0.2)).astype("<i2").tobytes())
    with av.open(str(folder / "video.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 30 * k, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    corners = [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    (folder / "cloud.xyz").write_text("\n".join(" ".join(map(str, c)) for c in corners))
    lines = ["day,load,wind", *(f"{i},{i * i},{'' if i == 5 else 40 - i}" for i in range(40))]
    (folder / "load.csv").write_text("\n".join(lines))
    (folder / "text.txt").write_text("Strawberries, naïve 猫🍎!", encoding="utf-8")
    scene = folder / "scene"
    scene.mkdir()
    Image.new("RGB", (64, 64), "teal").save(scene / "0.png")
    cameras = {
        "images": ["0.png"],
        "intrinsics": [[60, 0, 32], [0, 60, 32], [0, 0, 1]],
        "extrinsics": [np.eye(4).tolist()],
    }
    (scene / "cameras.json").write_text(json.dumps(cameras))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    return folder


@pytest.fixture(scope="session")
def inspected():
    """Tokenises a source with options of the command."""

    def run(source, *options, **arguments):
        found = inspect_source(str(source), parser().parse_args(list(options)), **arguments)
        assert isinstance(found, Inspected), found
        return found

    return run
