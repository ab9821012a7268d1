"""Synthetic videos of labelled motions: real images, translated, rotated or scaled over time.

A video is rendered when its row is accessed, from the image and the row's id alone: deterministic, on any machine, and
nothing is stored on disk. All videos of an object are in one split, so that a model cannot infer the motion from the
object.
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
from worldtokens.data.sets.furniture import open_furniture
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
    """Every object in each of ten motions: turning left or right, sliding in four directions, growing, shrinking, swinging,
    at rest.

    Each row: `id` ("stamps/animals/birds/cockatoo/grow/0"), `video` (uint8 (T, H, W, 3)), `class` (of `MOTIONS`),
    `object` (the image's id), `split` (that of the image). Position, size, angle, speed and two backbackground colours are
    random, seeded by the id, so that a single frame is hardly informative; every object also drifts and jitters slightly.
    Round objects look the same turning and at rest: a few videos are ambiguous.

    Args:
        split: "train", "validation" or "test"; None for all.
        objects: source of the images: "stamps", "emoji" (part of the package; without skin tones) or "furniture".
        takes: videos per object and motion.
        frames: frames T per video, >= 2.
        size: side of the frames in pixels, >= 8.

    Raises:
        InputError: an argument is out of its range, or the images cannot be downloaded.
    """
    if objects not in OBJECTS:
        raise InputError(f"motion: found objects={objects!r}, expected one of {', '.join(OBJECTS)}")
    if takes < 1 or frames < 2 or size < 8:
        raise InputError(
            f"motion: found takes={takes}, frames={frames}, size={size}; expected at least 1, 2 and 8"
        )
    images = OBJECTS[objects](split=None)
    seen, records = set(), []
    columns = [images.column(name) for name in ("id", "image", "split")]
    bases = images.column("base") if "base" in images.columns else columns[0]
    for name, image, source_split, base in zip(*columns, bases, strict=True):
        if base in seen:
            continue
        seen.add(base)
        for motion in MOTIONS:
            for take in range(takes):
                identity = f"{objects}/{name}/{motion}/{take}"
                records.append(
                    {
                        "id": identity,
                        "video": MotionVideo(image, motion, identity, frames, size),
                        "class": motion,
                        "object": name,
                        "split": source_split,
                    }
                )
    rows = Rows(records, name="motion")
    return rows if split is None else rows.split(split)


@dataclasses.dataclass(frozen=True)
class MotionVideo(Lazy):
    """A motion of an image (a path, or a handle to bytes), rendered when read; `key` seeds all random values."""

    image: object
    motion: str
    key: str
    frames: int = FRAMES
    size: int = SIZE

    def read(self) -> np.ndarray:
        """(T, H, W, 3) uint8."""
        return render(_sprite(self.image), self.motion, self.key, self.frames, self.size)


def render(sprite: Image.Image, motion: str, key: str, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """Renders a motion.

    Args:
        sprite: the moving image, RGBA.
        motion: of `MOTIONS`.
        key: seeds position, size, angle, speed and colours.
        frames: T.
        size: H and W.

    Returns:
        (T, H, W, 3) uint8.

    Raises:
        InputError: unknown motion.
    """
    if motion not in MOTIONS:
        raise InputError(f"motion: found {motion!r}, expected one of {', '.join(MOTIONS)}")
    rng = np.random.default_rng(list(hashlib.sha256(key.encode()).digest()))
    time = np.linspace(-0.5, 0.5, frames)  # displacement is 0 at the middle of the video
    # every motion draws the same random numbers, so that they do not reveal the motion
    side, angle, speed = rng.uniform(0.4, 0.7), rng.uniform(0, 360), rng.uniform(0.7, 1.3)
    x, y = rng.uniform(-0.12, 0.12, 2)
    cycles, phase = rng.uniform(1.0, 2.0), rng.uniform(0, 2 * math.pi)
    drift, jitter = rng.uniform(-0.05, 0.05, 2), rng.normal(0, 0.006, (2, frames))
    first, second = rng.uniform(60, 255, (2, 3))
    slope = rng.uniform(-1, 1, 2)

    turn, slide, scale = np.zeros(frames), np.zeros((2, frames)), np.zeros(frames)
    kind, _, direction = motion.partition(" ")
    if kind == "turn":
        turn = (150 if direction == "left" else -150) * speed * time
    elif kind == "slide":
        vector = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[direction]
        slide = 0.55 * speed * np.outer(vector, time)
    elif kind in ("grow", "shrink"):
        scale = (1.1 if kind == "grow" else -1.1) * speed * time
    elif kind == "swing":
        turn = 35 * speed * np.sin(2 * math.pi * cycles * time + phase)

    x_grid, y_grid = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size))
    mix = 0.5 + 0.25 * (slope[0] * x_grid + slope[1] * y_grid)
    background = first + (second - first) * mix[..., None]
    background = Image.fromarray(background.round().astype(np.uint8))
    video = np.empty((frames, size, size, 3), np.uint8)
    for i in range(frames):
        position = np.array([x, y]) + slide[:, i] + drift * time[i] + jitter[:, i]
        width = side * math.exp(scale[i])
        video[i] = np.asarray(_paste(background, sprite, position, width, angle + turn[i]))
    return video


def _paste(
    background: Image.Image, sprite: Image.Image, position: np.ndarray, width: float, angle: float
) -> Image.Image:
    """The sprite on the background: `position` from the centre and `width` as fractions of the side, `angle` in degrees,
    counterclockwise."""
    size, own = background.width, sprite.width
    # Pillow takes the map from pixels of the result to pixels of the sprite
    step = own / (width * size)
    c, s = step * math.cos(math.radians(angle)), step * math.sin(math.radians(angle))
    mx, my = (0.5 + position) * size
    matrix = (c, -s, own / 2 - c * mx + s * my, s, c, own / 2 - s * mx - c * my)
    moved = sprite.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return Image.composite(moved.convert("RGB"), background, moved.getchannel("A"))


@functools.lru_cache(maxsize=1024)
def _sprite(source: object) -> Image.Image:
    """An image as RGBA on a transparent square of 64 pixels."""
    data = source.read() if isinstance(source, Lazy) else source
    try:
        image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data).convert("RGBA")
    except OSError as error:
        raise InputError(f"{source}: {error}; expected an image") from error
    box = image.getbbox()
    image = image.crop(box) if box else image
    # premultiplied alpha, or colours of transparent pixels would bleed into the edges
    image = image.convert("RGBa")
    image.thumbnail((44, 44), Image.Resampling.BOX)
    image = image.convert("RGBA")
    square = Image.new("RGBA", (64, 64))
    square.paste(image, ((64 - image.width) // 2, (64 - image.height) // 2))
    return square
