"""Several images of one scene, with their cameras -> Tokens: patches of colour plus Pluecker rays.

Conventions, the same everywhere here:

- extrinsics are **camera to world**, 4 x 4, with OpenCV's camera axes: x right, y down, z forward;
- intrinsics are 3 x 3 in pixels of the image as a person sees it (upright), where the top left pixel's centre is
  (0.5, 0.5), as COLMAP counts; a file in which it is (0, 0) needs 0.5 added to cx and cy;
- NeRF's `transforms.json` has OpenGL axes (y up, z backward), which are turned when it is read.

Shapes: S scenes, V views, N patches of a view, D width.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.files import read_bytes
from worldtokens.tokenizers.image.read import read_image
from worldtokens.tokenizers.patches import grid_coords, grid_size, patchify, sides
from worldtokens.tokens import Tokens

MEAN = STD = (0.5, 0.5, 0.5)
CAMERA = 16  # fx, fy, cx, cy, then the 3 x 4 camera-to-world matrix row by row
MAX_FRAMES = 10_000
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


class ViewTokenizer(Tokenizer):
    """Images of one scene -> a token for every patch of every view.

    A token is a linear map of its patch's colours plus one of its pixels' rays, each ray given by its six Pluecker
    coordinates (direction, moment), as in LFN (Sitzmann et al. 2021) and LVSM (Jin et al. 2024): no other position is
    needed, since a ray tells where in the world its pixel looks.

    `pos` is (view, y, x) in patches. All tokens of a scene read each other (block 0). Scenes with fewer views are padded.

    Args:
        dim: width D of the tokens.
        patch: side of a patch in pixels, or (height, width).
        size: side, or (height, width), of every view in pixels; a multiple of `patch`. An image is scaled to cover
            it and its centre is cut out; the intrinsics follow.
        views: the most views of a scene; of more, so many are taken evenly spaced from the first to the last. None: all.
        frame: ``"first"`` (the world moves into the first view's camera, so that moving a scene changes nothing) or
            ``"world"`` (the extrinsics as they are).
        mean, std: RGB normalisation of values in [0, 1].

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "views"

    def __init__(
        self,
        dim: int,
        patch: int | tuple[int, int] = 16,
        size: int | tuple[int, int] = 224,
        views: int | None = None,
        frame: str = "first",
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.patch, self.size = sides(patch, 2, "patch"), sides(size, 2, "size")
        if any(s % p for s, p in zip(self.size, self.patch, strict=True)):
            raise InputError(
                f"size {self.size} is not a multiple of the patch {self.patch}, and rays cannot be padded"
            )
        if views is not None:
            sides(views, 1, "views")
        if frame not in ("first", "world"):
            raise InputError(f"frame is {frame!r}, expected 'first' or 'world'")
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean is {mean!r} and std {std!r}, expected three numbers each, std above 0")
        self.views, self.frame = views, frame
        area = math.prod(self.patch)
        self.proj = nn.Linear(3 * area, dim)
        self.ray_proj = nn.Linear(6 * area, dim, bias=False)

    # ---- raw scenes ----------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One scene -> (V, 3 h w + 64) uint8: for each view its pixels, then the bytes of its camera.

        `images` and `cameras` take that apart.

        Args:
            source: a dict ``{"images": [...], "intrinsics": ..., "extrinsics": ...}``, where images are what
                `image.read_image` takes, intrinsics are (3, 3) for all or (V, 3, 3), extrinsics (V, 4, 4) or
                (V, 3, 4); or a folder with `cameras.json` (the same as JSON, images by file name) or with NeRF's
                `transforms.json`; or the path of such a file.

        Raises:
            InputError: something is missing or does not fit; names the file or view.
        """
        name, scene, folder = _open_scene(source)
        images = scene["images"]
        chosen = range(len(images))
        if self.views is not None and len(images) > self.views:
            chosen = np.linspace(0, len(images) - 1, self.views).round().astype(int).tolist()
        poses = scene["extrinsics"][list(chosen)]
        if self.frame == "first":
            poses = np.linalg.inv(poses[0]) @ poses
        rows = []
        for i, pose in zip(chosen, poses, strict=True):
            picture = read_image(_inside(folder, images[i], name) if folder else images[i])
            k = _pinhole(scene["intrinsics"][i], picture, f"{name}, view {i}")
            pixels, k = self._fitted(picture, k)
            camera = np.concatenate([k, pose[:3].reshape(-1)]).astype(np.float32)
            rows.append(np.concatenate([pixels.reshape(-1), camera.view(np.uint8)]))
        return torch.from_numpy(np.stack(rows))

    def _fitted(self, picture: Tensor, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scale to cover `size`, cut the centre out: (3, H, W) -> (3, h, w), with fx, fy, cx, cy to match."""
        (h, w), (rows, columns) = self.size, picture.shape[1:]
        ratio = min(rows / h, columns / w)
        left, top = (columns - w * ratio) / 2, (rows - h * ratio) / 2
        im = Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).numpy()))
        box = (left, top, left + w * ratio, top + h * ratio)
        if im.size != (w, h):
            im = im.resize((w, h), Image.Resampling.BICUBIC, box=box)
        fx, fy, cx, cy = k
        return np.asarray(im).transpose(2, 0, 1), np.array([fx, fy, cx - left, cy - top]) / ratio

    def pictures(self, raw: Tensor) -> Tensor:
        """The pixels of a raw scene: (..., 3 h w + 64) uint8 -> (..., 3, h, w) uint8."""
        return raw[..., : -4 * CAMERA].unflatten(-1, (3, *self.size))

    def cameras(self, raw: Tensor) -> Tensor:
        """The cameras of a raw scene: -> (..., 16) float32: fx, fy, cx, cy for `size`, then 3 x 4 camera to world."""
        return raw[..., -4 * CAMERA :].contiguous().view(torch.float32)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw scenes -> one batch: `raw` (S, V, 3 h w + 64) uint8, `lengths` in tokens.

        Cameras stay bytes on the way, so that half-precision weights do not round them.

        Raises:
            InputError: a raw scene is not what read() gives, or there is none.
        """
        wide = 3 * math.prod(self.size) + 4 * CAMERA
        if not len(raws):
            raise InputError("no scene to collate: expected at least one")
        for i, raw in enumerate(raws):
            right = (
                isinstance(raw, Tensor)
                and raw.dtype == torch.uint8
                and raw.ndim == 2
                and raw.shape[1] == wide
            )
            if not right or not len(raw):
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"scene {i} of the batch is {found}, expected uint8 (V, {wide}) as read() gives"
                )
        n = math.prod(grid_size(self.size, self.patch))
        return Batch(
            raw=nn.utils.rnn.pad_sequence(list(raws), batch_first=True),
            lengths=tuple(len(r) * n for r in raws),
        )

    # ---- tokens --------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate`, on the model's device -> (S, V N, D)."""
        raw = batch["raw"]
        s, v, _ = raw.shape
        dtype = self.proj.weight.dtype
        colours = patchify(self.pictures(raw).flatten(0, 1), self.patch).float()  # (S V, N, 3 area)
        parts = colours.unflatten(-1, (3, -1)).unbind(-2)
        colours = torch.cat(
            [(c / 255 - m) / d for c, m, d in zip(parts, self.mean, self.std, strict=True)], -1
        )
        rays = pluecker(self.cameras(raw).flatten(0, 1), self.size)  # (S V, 6, h, w)
        x = self.proj(colours.to(dtype)) + self.ray_proj(patchify(rays, self.patch).to(dtype))
        coords = grid_coords(grid_size(self.size, self.patch), x.device).float()  # (N, 2)
        view = torch.arange(v, dtype=torch.float32, device=x.device)
        pos = torch.cat(
            [view[:, None, None].expand(v, len(coords), 1), coords.expand(v, -1, -1)], -1
        ).flatten(0, 1)
        return self.wrap(
            x.unflatten(0, (s, v)).flatten(1, 2), batch["lengths"], "bidirectional", pos=pos.expand(s, -1, -1)
        )


def pluecker(cameras: Tensor, size: tuple[int, int]) -> Tensor:
    """The ray of every pixel's centre in Pluecker coordinates.

    A ray is its unit direction d and its moment o x d about the origin, where o is the camera's place. Any other point
    of the ray in place of o gives the same moment, so the six numbers name the line and not where it begins.

    Args:
        cameras: (V, 16) float32: fx, fy, cx, cy in pixels of `size`, then the 3 x 4 camera-to-world matrix.
        size: (h, w).

    Returns:
        (V, 6, h, w) float32: d as x, y, z in the world, then the moment.
    """
    h, w = size
    fx, fy, cx, cy = cameras[:, :4, None, None].unbind(1)  # each (V, 1, 1)
    pose = cameras[:, 4:].unflatten(-1, (3, 4))
    # a padded view has no camera; a focal length of 1 keeps its rays finite
    fx, fy = (f.masked_fill(f == 0, 1) for f in (fx, fy))
    x = (torch.arange(w, device=cameras.device) + 0.5 - cx) / fx  # (V, 1, w)
    y = (torch.arange(h, device=cameras.device)[:, None] + 0.5 - cy) / fy  # (V, h, 1)
    local = torch.stack(torch.broadcast_tensors(x, y, torch.ones_like(x)), -1)  # (V, h, w, 3)
    # written as sums: a matrix product might be rounded to TF32 on a GPU
    d = (pose[:, None, None, :, :3] * local[..., None, :]).sum(-1)
    d = nn.functional.normalize(d, dim=-1)
    o = pose[:, None, None, :, 3].expand_as(d)
    return torch.cat([d, torch.linalg.cross(o, d)], -1).permute(0, 3, 1, 2)


# ---- reading scenes --------------------------------------------------------------------------------------------


def _open_scene(source: Any) -> tuple[str, dict[str, Any], Path | None]:
    """(name, {"images", "intrinsics", "extrinsics" (V, 4, 4)}, folder of the images or None)."""
    if isinstance(source, Mapping):
        return "<scene>", _checked(source, "<scene>"), None
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a scene cannot be read from a {type(source).__name__}: pass a dict with images, intrinsics and extrinsics, a "
            "folder, or its cameras.json or transforms.json"
        )
    path = Path(source)
    try:
        folder = path.is_dir()
    except (OSError, ValueError) as e:  # a NUL byte in the name, or one too long
        raise InputError(f"{str(path)!r}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    if folder:
        found = [path / n for n in ("cameras.json", "transforms.json") if (path / n).is_file()]
        if not found:
            raise InputError(f"{path}: holds neither cameras.json nor transforms.json")
        path = found[0]
    name, data, _ = read_bytes(path, ("json",))
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{name}: is not JSON: {str(e)[:200]}") from e
    if not isinstance(given, dict):
        raise InputError(
            f"{name}: holds a {type(given).__name__}, expected an object with images and cameras"
        )
    return name, _from_nerf(given, name) if "frames" in given else _checked(given, name), path.parent


def _checked(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    missing = {"images", "intrinsics", "extrinsics"} - set(given)
    if missing:
        raise InputError(
            f"{name}: has no {', '.join(sorted(missing))}; expected images, intrinsics and extrinsics"
        )
    images = given["images"]
    if isinstance(images, str | bytes | Mapping) or not hasattr(images, "__len__") or not len(images):
        raise InputError(f"{name}: `images` is {repr(images)[:60]}, expected a list of at least one image")
    v = len(images)
    if v > MAX_FRAMES:
        raise InputError(f"{name}: has {v:,} views, more than the {MAX_FRAMES:,} that are read")
    k, pose = (_numbers(given[key], f"{name}: `{key}`") for key in ("intrinsics", "extrinsics"))
    k = np.broadcast_to(k, (v, 3, 3)) if k.shape == (3, 3) else k
    if k.shape != (v, 3, 3) or pose.shape not in ((v, 4, 4), (v, 3, 4)):
        raise InputError(
            f"{name}: {v} images with intrinsics {k.shape} and extrinsics {pose.shape}, expected (3, 3) or ({v}, 3, 3), "
            f"and ({v}, 4, 4) camera to world"
        )
    rest = np.stack([k[:, 0, 1], k[:, 1, 0], k[:, 2, 0], k[:, 2, 1], k[:, 2, 2] - 1], 1)
    if np.abs(rest).max() > 1e-6 * np.abs(k).max() or k[:, 0, 0].min() <= 0 or k[:, 1, 1].min() <= 0:
        raise InputError(
            f"{name}: intrinsics are not [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] with fx and fy above 0 pixels (no skew)"
        )
    k = k[:, [0, 1, 0, 1], [0, 1, 2, 2]]  # fx, fy, cx, cy
    return {"images": list(images), "intrinsics": k, "extrinsics": _poses(pose, name)}


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


def _poses(pose: np.ndarray, name: str) -> np.ndarray:
    """(V, 3 | 4, 4) -> (V, 4, 4), each a turn and a move."""
    if pose.shape[1] == 3:
        pose = np.concatenate([pose, np.broadcast_to([[[0.0, 0, 0, 1]]], (len(pose), 1, 4))], 1)
    turn = pose[:, :3, :3]
    off = np.abs(turn @ turn.transpose(0, 2, 1) - np.eye(3)).max((1, 2)) + np.abs(
        pose[:, 3] - [0, 0, 0, 1]
    ).max(1)
    wrong = np.flatnonzero((off > 1e-2) | (np.linalg.det(turn) < 0))
    if len(wrong):
        raise InputError(
            f"{name}, view {wrong[0]}: its extrinsics are not a turn and a move (3 x 3 orthonormal, not mirrored, last row 0 0 "
            "0 1); expected camera to world with axes x right, y down, z forward"
        )
    return pose


def _from_nerf(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """NeRF's transforms.json: one pinhole for all or one for each frame, OpenGL axes."""
    frames = given["frames"]
    if (
        not isinstance(frames, list)
        or not 0 < len(frames) <= MAX_FRAMES
        or not all(isinstance(f, dict) for f in frames)
    ):
        raise InputError(f"{name}: `frames` is not a list of 1 to {MAX_FRAMES:,} objects")
    intrinsics = []
    for i, frame in enumerate(frames):
        where = f"{name}, frame {i}"
        facts = dict(given) | frame
        if not isinstance(facts.get("file_path"), str) or "transform_matrix" not in facts:
            raise InputError(f"{where}: has no file_path or no transform_matrix")
        bent = [k for k in ("k1", "k2", "k3", "k4", "p1", "p2") if facts.get(k)]
        if bent:
            raise InputError(f"{where}: its lens is bent ({', '.join(bent)}); undistort the images first, e.g. with "
                             "`colmap image_undistorter`, or set these to 0")  # fmt: skip
        wanted = ("w", "h", "fl_x", "fl_y", "cx", "cy", "camera_angle_x", "camera_angle_y")
        value = {k: _number(facts[k], f"{where}: `{k}`") for k in wanted if facts.get(k) is not None}
        intrinsics.append(value)
    poses = _numbers([f["transform_matrix"] for f in frames], f"{name}: transform_matrix")
    if poses.shape[1:] not in ((4, 4), (3, 4)):
        raise InputError(f"{name}: transform_matrix is {poses.shape[1:]}, expected (4, 4)")
    poses = _poses(poses, name) * np.array([1.0, -1.0, -1.0, 1.0])  # y and z of the camera turn round
    return {"images": [f["file_path"] for f in frames], "intrinsics": intrinsics, "extrinsics": poses}


def _pinhole(k: Any, picture: Tensor, where: str) -> np.ndarray:
    """fx, fy, cx, cy in pixels of this image; NeRF's facts may tell of another size and leave some out."""
    if not isinstance(k, dict):
        return k
    rows, columns = picture.shape[1:]
    w, h = k.get("w", columns), k.get("h", rows)
    if not (w > 0 and h > 0) or abs(columns / w * h / rows - 1) > 0.01:
        raise InputError(
            f"{where}: its image is {columns}x{rows}, its camera {w:g}x{h:g}: expected the same shape"
        )
    fx = _focal(k.get("fl_x"), k.get("camera_angle_x"), w)
    fy = _focal(k.get("fl_y"), k.get("camera_angle_y"), h) or fx
    if not (0 < fx < math.inf and 0 < fy < math.inf):
        raise InputError(f"{where}: has no fl_x above 0 and no camera_angle_x between 0 and pi")
    scale = np.array([columns / w, rows / h] * 2)
    return np.array([fx, fy, k.get("cx", w / 2), k.get("cy", h / 2)]) * scale


def _focal(length: float | None, angle: float | None, side: float) -> float:
    """Focal length in pixels, or 0 where it is not told."""
    if length:
        return length
    return side / 2 / math.tan(angle / 2) if angle is not None and 0 < angle < math.pi else 0.0


def _inside(folder: Path, image: Any, name: str) -> Path:
    """The path of an image that a file names: below the folder of that file, its ending perhaps left out."""
    if not isinstance(image, str):
        raise InputError(f"{name}: names an image {repr(image)[:60]}, expected a file name")
    try:
        root, path = folder.resolve(), (folder / image).resolve()
        inside = path.is_relative_to(root)
        if inside and not (path.suffix and path.is_file()):
            path = next((p for e in ENDINGS if (p := path.with_name(path.name + e)).is_file()), path)
    except (OSError, ValueError) as e:  # names with NUL bytes, or too long
        raise InputError(
            f"{name}: names {image[:60]!r}, which cannot be a file: {getattr(e, 'strerror', None) or e}"
        ) from e
    if not inside:
        raise InputError(f"{name}: names {image!r}, which is outside of its folder; put the images beside it")
    return path
