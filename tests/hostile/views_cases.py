"""Hostile scenes: images with cameras."""

from __future__ import annotations

import json

import numpy as np
from cases import case
from image_cases import encode, halves

K = [[40.0, 0, 32], [0, 40, 16], [0, 0, 1]]
NERF = {"camera_angle_x": 1.0, "frames": [{"file_path": "a", "transform_matrix": np.eye(4).tolist()}]}


def scene(name: str = "cameras.json", text: str | bytes | None = None, **change) -> dict[str, bytes]:
    """Two views of one image, with some entries changed."""
    cameras = {"images": ["a.png", "a.png"], "intrinsics": K, "extrinsics": [np.eye(4).tolist()] * 2} | change
    cameras = {k: v for k, v in cameras.items() if v is not None}
    data = json.dumps(cameras) if text is None else text
    return {name: data if isinstance(data, bytes) else data.encode(), "a.png": encode(halves())}


def nerf(**change) -> dict[str, bytes]:
    return scene("transforms.json", json.dumps(NERF | change))


C = "views"  # 32 x 32, patch 16: 4 tokens per view
far = [[[1.0, 0, 0, 1e20], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]] * 2
case(C, "two-views", 8, lambda: scene())
case(C, "nerf", 4, lambda: nerf())
case(C, "no-cameras", "neither cameras.json", lambda: {"a.png": encode(halves())})
case(C, "no-intrinsics", "has no intrinsics", lambda: scene(intrinsics=None))
case(C, "no-image", "c.png", lambda: scene(images=["a.png", "c.png"]))
case(C, "outside", "outside of its folder", lambda: scene(images=["a.png", "../two-views/a.png"]))
case(C, "absolute", "outside of its folder", lambda: scene(images=["a.png", "/dev/zero"]))
case(C, "zero-byte", "", lambda: scene(images=["a.png", "a\0.png"]))
case(C, "long-name", "", lambda: scene(images=["a.png", "a" * 5000]))
case(C, "number-for-name", "file name", lambda: scene(images=["a.png", 7]))
case(C, "one-camera-short", "2 images", lambda: scene(extrinsics=[np.eye(4).tolist()]))
case(C, "mirrored", "view 0", lambda: scene(extrinsics=[np.diag([1.0, 1, -1, 1]).tolist()] * 2))
case(C, "skewed", "no skew", lambda: scene(intrinsics=[[40, 9, 32], [0, 40, 16], [0, 0, 1]]))
case(C, "nan", "NaN", lambda: scene(intrinsics=[[float("nan"), 0, 32], [0, 40, 16], [0, 0, 1]]))
case(C, "far-away", "beyond", lambda: scene(extrinsics=far))
case(C, "words-for-numbers", "numbers", lambda: scene(intrinsics="wide"))
case(C, "ragged", "numbers", lambda: scene(extrinsics=[[1, 2], [3]]))
case(C, "no-view", "at least one image", lambda: scene(images=[], extrinsics=[]))
case(C, "not-json", "is not JSON", lambda: scene(text="{'images': []}"))
case(C, "deep", "is not JSON", lambda: scene(text="[" * 100_000))
case(C, "list", "holds a list", lambda: scene(text="[]"))
case(C, "bytes", "", lambda: scene(text=bytes(range(256))))
case(C, "empty", "empty", lambda: scene(text=b""))
case(C, "bent-lens", "undistort", lambda: nerf(k1=0.1))
case(C, "no-frames", "`frames`", lambda: nerf(frames=[]))
case(C, "no-angle", "camera_angle_x", lambda: nerf(camera_angle_x=None))
case(C, "other-shape", "the same aspect ratio", lambda: nerf(w=100, h=100))
case(C, "missing", "no such file", lambda path: None)
