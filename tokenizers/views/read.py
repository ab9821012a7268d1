"""Reading of scenes: images and their cameras from a dict, `cameras.json` or NeRF's `transforms.json`.

Conventions:

- extrinsics are **camera to world**, 4 x 4, with OpenCV's camera axes: x right, y down, z forward;
- intrinsics are 3 x 3 in pixels of the upright image, where the centre of the top left pixel is (0.5, 0.5), as in
  COLMAP; a file in which it is (0, 0) needs 0.5 added to cx and cy;
- NeRF's `transforms.json` has OpenGL axes (y up, z backward), which are converted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.files import read_bytes
from worldtokens.tokenizers.image.read import read_image

MAX_VIEWS = 10_000
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
NERF_KEYS = ("w", "h", "fl_x", "fl_y", "cx", "cy", "camera_angle_x", "camera_angle_y")
DISTORTION_KEYS = ("k1", "k2", "k3", "k4", "p1", "p2")


@dataclasses.dataclass(frozen=True)
class Scene:
    """Checked cameras of a scene; its images are read one by one.

    Args:
        name: of the file, for messages.
        images: V sources of `read_image`, or file names in `folder`.
        intrinsics: (V, 4) as fx, fy, cx, cy; or V dicts with the numbers of `transforms.json`.
        poses: (V, 4, 4) camera to world.
        folder: of the image files; None: `images` are sources.
    """

    name: str
    images: list[Any]
    intrinsics: np.ndarray | list[dict[str, float]]
    poses: np.ndarray
    folder: Path | None = None

    def view(self, i: int) -> tuple[Tensor, np.ndarray]:
        """(image (3, H, W) uint8, (fx, fy, cx, cy) in its pixels) of view i.

        Raises:
            InputError: the image cannot be read, or does not fit its camera.
        """
        source = self.images[i]
        image = read_image(_image_path(self.folder, source, self.name) if self.folder else source)
        return image, _pinhole(self.intrinsics[i], image, f"{self.name}, view {i}")


def read_scene(source: Any) -> Scene:
    """The cameras of a scene, checked, and where its images are.

    Args:
        source: a dict with `images`, `intrinsics` and `extrinsics`; a folder with `cameras.json` or `transforms.json`;
            or the path of such a file.

    Raises:
        InputError: something is missing or does not fit; names the file.
    """
    if isinstance(source, Mapping):
        return _from_arrays(source, "<scene>")
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a scene cannot be read from a {type(source).__name__}: pass a dict with images, intrinsics and extrinsics, a "
            "folder, or its cameras.json or transforms.json"
        )
    path = Path(source)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as e:  # a NUL byte in the name, or one too long
        raise InputError(f"{str(path)!r}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    if is_folder:
        found = [path / n for n in ("cameras.json", "transforms.json") if (path / n).is_file()]
        if not found:
            raise InputError(f"{path}: has neither cameras.json nor transforms.json")
        path = found[0]
    name, data, _ = read_bytes(path, ("json",))
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{name}: is not JSON: {str(e)[:200]}") from e
    if not isinstance(content, dict):
        raise InputError(
            f"{name}: holds a {type(content).__name__}, expected an object with images and cameras"
        )
    scene = _from_nerf(content, name) if "frames" in content else _from_arrays(content, name)
    return dataclasses.replace(scene, folder=path.parent)


def _from_arrays(content: Mapping[str, Any], name: str) -> Scene:
    """A dict with images, intrinsics (3, 3) or (V, 3, 3), and extrinsics (V, 4, 4) or (V, 3, 4)."""
    missing = {"images", "intrinsics", "extrinsics"} - set(content)
    if missing:
        raise InputError(
            f"{name}: has no {', '.join(sorted(missing))}; expected images, intrinsics and extrinsics"
        )
    images = content["images"]
    if isinstance(images, str | bytes | Mapping) or not hasattr(images, "__len__") or not len(images):
        raise InputError(f"{name}: `images` is {repr(images)[:60]}, expected a list of at least one image")
    v = len(images)
    if v > MAX_VIEWS:
        raise InputError(f"{name}: has {v:,} views, more than the {MAX_VIEWS:,} that are read")
    k, poses = (_numbers(content[key], f"{name}: `{key}`") for key in ("intrinsics", "extrinsics"))
    k = np.broadcast_to(k, (v, 3, 3)) if k.shape == (3, 3) else k
    if k.shape != (v, 3, 3) or poses.shape not in ((v, 4, 4), (v, 3, 4)):
        raise InputError(
            f"{name}: {v} images with intrinsics {k.shape} and extrinsics {poses.shape}, expected (3, 3) or ({v}, 3, 3), "
            f"and ({v}, 4, 4) camera to world"
        )
    rest = np.stack([k[:, 0, 1], k[:, 1, 0], k[:, 2, 0], k[:, 2, 1], k[:, 2, 2] - 1], 1)
    if np.abs(rest).max() > 1e-6 * np.abs(k).max() or k[:, 0, 0].min() <= 0 or k[:, 1, 1].min() <= 0:
        raise InputError(
            f"{name}: intrinsics are not [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] with fx and fy above 0 pixels (no skew)"
        )
    return Scene(name, list(images), k[:, [0, 1, 0, 1], [0, 1, 2, 2]], _rigid(poses, name))


def _from_nerf(content: Mapping[str, Any], name: str) -> Scene:
    """NeRF's transforms.json: one pinhole for all or one for each frame, OpenGL axes."""
    frames = content["frames"]
    right_count = isinstance(frames, list) and 0 < len(frames) <= MAX_VIEWS
    if not right_count or not all(isinstance(f, dict) for f in frames):
        raise InputError(f"{name}: `frames` is not a list of 1 to {MAX_VIEWS:,} objects")
    intrinsics = []
    for i, frame in enumerate(frames):
        where = f"{name}, frame {i}"
        entry = dict(content) | frame
        if not isinstance(entry.get("file_path"), str) or "transform_matrix" not in entry:
            raise InputError(f"{where}: has no file_path or no transform_matrix")
        distorted = [k for k in DISTORTION_KEYS if entry.get(k)]
        if distorted:
            raise InputError(
                f"{where}: its lens is distorted ({', '.join(distorted)}); undistort the images first, e.g. with "
                "`colmap image_undistorter`, or set these to 0"
            )
        given = [k for k in NERF_KEYS if entry.get(k) is not None]
        intrinsics.append({k: _number(entry[k], f"{where}: `{k}`") for k in given})
    poses = _numbers([f["transform_matrix"] for f in frames], f"{name}: transform_matrix")
    if poses.shape[1:] not in ((4, 4), (3, 4)):
        raise InputError(f"{name}: transform_matrix is {poses.shape[1:]}, expected (4, 4)")
    poses = _rigid(poses, name) * np.array([1.0, -1.0, -1.0, 1.0])  # OpenGL -> OpenCV: y and z change sign
    return Scene(name, [f["file_path"] for f in frames], intrinsics, poses)


def _numbers(value: Any, what: str) -> np.ndarray:
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().double()
        elif isinstance(value, list | tuple):
            value = [v.detach().cpu().double().numpy() if isinstance(v, Tensor) else v for v in value]
        a = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as e:
        raise InputError(f"{what} is not an array of numbers: {str(e)[:100]}") from e
    if not (np.abs(a) < 1e15).all():
        raise InputError(f"{what} holds NaN, infinity or values beyond 1e15")
    return a


def _number(value: Any, what: str) -> float:
    a = _numbers(value, what)
    if a.ndim:
        raise InputError(f"{what} is {repr(value)[:60]}, expected one number")
    return float(a)


def _rigid(poses: np.ndarray, name: str) -> np.ndarray:
    """(V, 3 | 4, 4) -> (V, 4, 4), each checked to be a rotation and a translation."""
    if poses.shape[1] == 3:
        last_row = np.broadcast_to([[[0.0, 0, 0, 1]]], (len(poses), 1, 4))
        poses = np.concatenate([poses, last_row], 1)
    rotation = poses[:, :3, :3]
    error = np.abs(rotation @ rotation.transpose(0, 2, 1) - np.eye(3)).max((1, 2))
    error = error + np.abs(poses[:, 3] - [0, 0, 0, 1]).max(1)
    wrong = np.flatnonzero((error > 1e-2) | (np.linalg.det(rotation) < 0))
    if len(wrong):
        raise InputError(
            f"{name}, view {wrong[0]}: its extrinsics are not a rotation and a translation (3 x 3 orthonormal, not "
            "mirrored, last row 0 0 0 1); expected camera to world with axes x right, y down, z forward"
        )
    return poses


def _pinhole(k: Any, image: Tensor, where: str) -> np.ndarray:
    """fx, fy, cx, cy in pixels of this image; the numbers of NeRF may be for another size, and some may be missing."""
    if not isinstance(k, dict):
        return k
    rows, columns = image.shape[1:]
    w, h = k.get("w", columns), k.get("h", rows)
    if not (w > 0 and h > 0) or abs(columns / w * h / rows - 1) > 0.01:
        raise InputError(
            f"{where}: its image is {columns}x{rows}, its camera {w:g}x{h:g}: expected the same aspect ratio"
        )
    fx = _focal_length(k.get("fl_x"), k.get("camera_angle_x"), w)
    fy = _focal_length(k.get("fl_y"), k.get("camera_angle_y"), h) or fx
    if not (0 < fx < math.inf and 0 < fy < math.inf):
        raise InputError(f"{where}: has no fl_x above 0 and no camera_angle_x between 0 and pi")
    scale = np.array([columns / w, rows / h] * 2)
    return np.array([fx, fy, k.get("cx", w / 2), k.get("cy", h / 2)]) * scale


def _focal_length(length: float | None, angle: float | None, side: float) -> float:
    """Focal length in pixels, or 0 where neither it nor a valid angle of view (radians) is given."""
    if length:
        return length
    return side / 2 / math.tan(angle / 2) if angle is not None and 0 < angle < math.pi else 0.0


def _image_path(folder: Path, image: Any, name: str) -> Path:
    """The path of an image that a file names: inside the folder of that file; the suffix may be missing."""
    if not isinstance(image, str):
        raise InputError(f"{name}: names an image {repr(image)[:60]}, expected a file name")
    try:
        root, path = folder.resolve(), (folder / image).resolve()
        inside = path.is_relative_to(root)
        if inside and not (path.suffix and path.is_file()):
            path = next((p for e in SUFFIXES if (p := path.with_name(path.name + e)).is_file()), path)
    except (OSError, ValueError) as e:  # names with NUL bytes, or too long
        raise InputError(
            f"{name}: names {image[:60]!r}, which cannot be a file: {getattr(e, 'strerror', None) or e}"
        ) from e
    if not inside:
        raise InputError(f"{name}: names {image!r}, which is outside of its folder; put the images beside it")
    return path
