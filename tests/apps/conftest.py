"""A small colour model with exact embeddings, and image files, for the tests of `index` and `search`.

The embedding of an image is its distribution over nine named colours, and the embedding of a colour's name equals that of an
image of only that colour. So the text "red" must retrieve red images.
"""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from worldtokens.apps.index.index import Index
from worldtokens.errors import InputError
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch, Tokenizer

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
            raise InputError(f"{source}: cannot be read as an image") from e
        return torch.from_numpy(np.array(rgba)).float()

    def collate(self, raws):
        if any(raw[..., 3].max() == 0 for raw in raws):
            raise InputError("an image without a visible pixel")
        return Batch(x=torch.stack(raws))


class Words(Tokenizer):
    modality = "text"

    def read(self, source):
        if source not in NAMED:
            raise InputError(f"{source!r} is not a colour")
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

    def clear_reads(self):
        """Names of the files decoded since the last call, sorted."""
        reads = self.tokenizers["image"].reads
        names = sorted(reads)
        reads.clear()
        return names


@pytest.fixture(scope="session")
def colours():
    """The class of the colour model."""
    return Colours


@pytest.fixture(scope="module")
def model():
    return Colours().eval()


@pytest.fixture(scope="session")
def make_image():
    """Writes an image of one colour with a modification time `age` seconds ago."""

    def make(path, color, size=(40, 30), age=100):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, NAMED.get(color, color)).save(path)
        when = path.stat().st_mtime - age
        os.utime(path, (when, when))
        return path

    return make


@pytest.fixture
def folder(tmp_path, model, make_image):
    """Three images: red.png, green.png, blue.png."""
    for color in ("red", "green", "blue"):
        make_image(tmp_path / "pics" / f"{color}.png", color)
    model.clear_reads()
    return tmp_path / "pics"


@pytest.fixture(scope="session")
def update():
    """Updates the default index of a folder."""

    def run(folder, model, **options):
        return Index(Index.default(folder)).update(folder, model, **options)

    return run


@pytest.fixture(scope="session")
def nearest():
    """Relative paths of the `k` files nearest to a text."""

    def search(folder, model, text, k=1):
        index = Index.find(folder)
        return [os.path.relpath(h.path, folder) for h in index.search(model.embed("text", [text])[0], k)]

    return search
