"""Short clips of known movements: images of real things, moved by us, since no package holds labelled film.

A clip is drawn when its row is asked for, from the image and the row's id alone: the same each time, on any machine,
and nothing is kept on disk. The thing that moves is on one side of the split, so that a model cannot know the movement by
the thing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import math

import numpy as np
from PIL import Image

from worldtokens.data.rows import Lazy, Rows
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.data.sets.media import open_furniture
from worldtokens.data.sets.stamps import open_stamps
from worldtokens.errors import InputError

MOTIONS = (
    "turn left", "turn right", "slide left", "slide right", "slide up", "slide down", "grow", "shrink", "swing", "rest",
)  # fmt: skip
OBJECTS = {"stamps": open_stamps, "emoji": open_emoji, "furniture": open_furniture}
FRAMES, SIZE = 16, 32


def open_motion(
    split: str | None = None,
    objects: str = "stamps",
    takes: int = 1,
    frames: int = FRAMES,
    size: int = SIZE,
) -> Rows:
    """Every object in each of ten movements: turning left or right, sliding four ways, growing, shrinking, swinging to and
    fro, at rest.

    Each row: `id` ("stamps/animals/birds/cockatoo/grow/0"), `video` (uint8 (T, H, W, 3)), `class` (of `MOTIONS`),
    `object` (the image's id), `split` (the objects' own). Place, size, angle, speed and the background's two colours are
    drawn from the id, so that a single frame tells little; every object also wanders a little and trembles. Round things
    look alike turned and at rest: a few clips cannot be told.

    Args:
        split: "train", "validation" or "test"; None for all.
        objects: whose images: "stamps", "emoji" (with the package; those without skin tones) or "furniture".
        takes: clips of each object and movement.
        frames: of a clip, 2 or more.
        size: side of the frames in pixels, 8 or more.

    Raises:
        InputError: an argument is out of its range, or the images cannot be fetched.
    """
    if objects not in OBJECTS:
        raise InputError(f"motion: found objects={objects!r}, expected one of {', '.join(OBJECTS)}")
    if takes < 1 or frames < 2 or size < 8:
        raise InputError(
            f"motion: found takes={takes}, frames={frames}, size={size}; expected at least 1, 2 and 8"
        )
    things = OBJECTS[objects](split=None)
    seen, records = set(), []
    columns = [things.column(name) for name in ("id", "image", "split")]
    bases = things.column("base") if "base" in things.columns else columns[0]
    for name, picture, side, base in zip(*columns, bases, strict=True):
        if base in seen:
            continue
        seen.add(base)
        for motion in MOTIONS:
            for take in range(takes):
                identity = f"{objects}/{name}/{motion}/{take}"
                records.append(
                    {
                        "id": identity,
                        "video": Clip(picture, motion, identity, frames, size),
                        "class": motion,
                        "object": name,
                        "split": side,
                    }
                )
    rows = Rows(records, name="motion")
    return rows if split is None else rows.split(split)


@dataclasses.dataclass(frozen=True)
class Clip(Lazy):
    """A movement of an image (a path, or bytes behind a handle), drawn when read; `key` decides all that is drawn."""

    picture: object
    motion: str
    key: str
    frames: int = FRAMES
    size: int = SIZE

    def read(self) -> np.ndarray:
        """(T, H, W, 3) uint8."""
        return render(_cut_out(self.picture), self.motion, self.key, self.frames, self.size)


def render(thing: Image.Image, motion: str, key: str, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """Draw a movement.

    Args:
        thing: the image, RGBA.
        motion: of `MOTIONS`.
        key: decides place, size, angle, speed and colours.
        frames: T.
        size: H and W.

    Returns:
        (T, H, W, 3) uint8.

    Raises:
        InputError: no such movement.
    """
    if motion not in MOTIONS:
        raise InputError(f"motion: found {motion!r}, expected one of {', '.join(MOTIONS)}")
    draw = np.random.default_rng(list(hashlib.sha256(key.encode()).digest()))
    time = np.linspace(-0.5, 0.5, frames)  # the middle of a clip is where nothing has moved yet
    # every clip draws every number, whatever it moves by: what is drawn does not tell the movement
    side, angle, way = draw.uniform(0.4, 0.7), draw.uniform(0, 360), draw.uniform(0.7, 1.3)
    x, y = draw.uniform(-0.12, 0.12, 2)
    cycles, phase = draw.uniform(1.0, 2.0), draw.uniform(0, 2 * math.pi)
    wander, tremble = draw.uniform(-0.05, 0.05, 2), draw.normal(0, 0.006, (2, frames))
    first, second = draw.uniform(60, 255, (2, 3))
    slope = draw.uniform(-1, 1, 2)

    turn, slide, scale = np.zeros(frames), np.zeros((2, frames)), np.zeros(frames)
    kind, _, where = motion.partition(" ")
    if kind == "turn":
        turn = (150 if where == "left" else -150) * way * time
    elif kind == "slide":
        to = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[where]
        slide = 0.55 * way * np.outer(to, time)
    elif kind in ("grow", "shrink"):
        scale = (1.1 if kind == "grow" else -1.1) * way * time
    elif kind == "swing":
        turn = 35 * way * np.sin(2 * math.pi * cycles * time + phase)

    across, down = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size))
    part = 0.5 + 0.25 * (slope[0] * across + slope[1] * down)
    ground = first + (second - first) * part[..., None]
    ground = Image.fromarray(ground.round().astype(np.uint8))
    clip = np.empty((frames, size, size, 3), np.uint8)
    for i in range(frames):
        place = np.array([x, y]) + slide[:, i] + wander * time[i] + tremble[:, i]
        width = side * math.exp(scale[i])
        clip[i] = np.asarray(_pasted(ground, thing, place, width, angle + turn[i]))
    return clip


def _pasted(
    ground: Image.Image, thing: Image.Image, place: np.ndarray, width: float, angle: float
) -> Image.Image:
    """The thing on the ground: `place` from the middle and `width` in sides of the ground, `angle` in degrees, to the left."""
    size, own = ground.width, thing.width
    # Pillow asks where in the thing each pixel of the result comes from
    step = own / (width * size)
    c, s = step * math.cos(math.radians(angle)), step * math.sin(math.radians(angle))
    mx, my = (0.5 + place) * size
    matrix = (c, -s, own / 2 - c * mx + s * my, s, c, own / 2 - s * mx - c * my)
    moved = thing.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return Image.composite(moved.convert("RGB"), ground, moved.getchannel("A"))


@functools.lru_cache(maxsize=1024)
def _cut_out(picture: object) -> Image.Image:
    """An image as a square of 64 pixels, RGBA, what is round it transparent."""
    source = picture.read() if isinstance(picture, Lazy) else picture
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source).convert("RGBA")
    except OSError as error:
        raise InputError(f"{picture}: {error}; expected an image to move") from error
    box = image.getbbox()
    image = image.crop(box) if box else image
    # premultiplied, or colours hidden under transparency would bleed in at the rim
    image = image.convert("RGBa")
    image.thumbnail((44, 44), Image.Resampling.BOX)
    image = image.convert("RGBA")
    square = Image.new("RGBA", (64, 64))
    square.paste(image, ((64 - image.width) // 2, (64 - image.height) // 2))
    return square
