"""Images for the tests: a photograph, crops of it, random pixels."""

import matplotlib.cbook
import pytest
import torch
from PIL import Image


@pytest.fixture(scope="session")
def photograph():
    """A photograph, 512 x 600, that matplotlib ships."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as f:
        return Image.open(f).convert("RGB")


@pytest.fixture(scope="session")
def images(photograph):
    """The photograph whole, wide, tall, small and thin."""
    boxes = [(0, 0, 512, 600), (0, 100, 512, 300), (100, 0, 221, 600), (200, 100, 261, 147), (0, 50, 512, 57)]
    return [photograph.crop(b) for b in boxes]


@pytest.fixture(scope="session")
def raws():
    """A function: (front-end, sizes) -> random raw images (3, H, W) uint8."""

    def make(t, sizes=((40, 64), (64, 40), (16, 16), (90, 30), (1, 1), (7, 200))):
        g = torch.Generator().manual_seed(0)
        return [torch.randint(0, 256, (3, *s), generator=g, dtype=torch.uint8) for s in sizes]

    return make
