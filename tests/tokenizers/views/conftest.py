"""Cameras and scenes of 8 x 12 pixels for the tests of views."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import worldtokens as wt

RNG = np.random.default_rng(0)
INTRINSICS = np.array([[10.0, 0, 6], [0, 10.0, 4], [0, 0, 1]])


def _rotation(axis: str, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    m = np.eye(4)
    m[i, i], m[i, j], m[j, i], m[j, j] = c, -s, s, c
    return m


def _pose(x: float, y: float, z: float, *rotations: tuple[str, float]) -> np.ndarray:
    m = np.eye(4)
    for axis, angle in rotations:
        m = m @ _rotation(axis, angle)
    m[:3, 3] = x, y, z
    return m


POSES = [_pose(0, 0, -3), _pose(3, 0, 0, ("y", -1.5)), _pose(1, -2, 0, ("x", 0.4), ("z", 0.3))]


def _image(h: int = 8, w: int = 12) -> np.ndarray:
    return RNG.integers(0, 256, (h, w, 3), dtype=np.uint8)


def _scene(v: int = 3, h: int = 8, w: int = 12) -> dict:
    images = [_image(h, w) for _ in range(v)]
    return {"images": images, "intrinsics": INTRINSICS, "extrinsics": np.stack(POSES[:v])}


@pytest.fixture
def front_end():
    """A function: options of `ViewTokenizer` -> a small one in eval mode."""

    def make(**options) -> wt.ViewTokenizer:
        torch.manual_seed(0)
        return wt.ViewTokenizer(**({"dim": 16, "patch": 4, "size": (8, 12)} | options)).eval()

    return make


@pytest.fixture
def rotation():
    """A function: ("x" | "y" | "z", angle) -> (4, 4)."""
    return _rotation


@pytest.fixture
def pose():
    """A function: position and rotations -> (4, 4) camera to world."""
    return _pose


@pytest.fixture
def poses():
    return POSES


@pytest.fixture
def intrinsics():
    return INTRINSICS


@pytest.fixture
def image():
    """A function: (h, w) -> random pixels (h, w, 3) uint8."""
    return _image


@pytest.fixture
def scene():
    """A function: (views, h, w) -> a scene as a dict."""
    return _scene


@pytest.fixture
def camera():
    """A function: fx, fy, cx, cy and a pose -> (1, 16) as `pluecker_rays` takes it."""

    def make(fx=10.0, fy=10.0, cx=6.0, cy=4.0, matrix=None) -> torch.Tensor:
        matrix = np.eye(4) if matrix is None else matrix
        return torch.tensor(np.r_[fx, fy, cx, cy, matrix[:3].reshape(-1)], dtype=torch.float32)[None]

    return make


@pytest.fixture
def folder(tmp_path):
    """A folder with three images of 8 x 12."""
    for i in range(3):
        Image.fromarray(_image()).save(tmp_path / f"{i}.png")
    return tmp_path


@pytest.fixture
def broken(folder) -> list:
    """Invalid scenes, each one change of a valid one."""
    good = _scene()
    mirrored = good["extrinsics"] * np.array([-1.0, 1, 1, 1])
    out = [good | change for change in (
        {"images": []}, {"images": "a.png"}, {"images": [_image()]}, {"images": ["none.png"] * 3},
        {"intrinsics": np.eye(4)}, {"intrinsics": INTRINSICS * np.nan}, {"intrinsics": INTRINSICS * [[-1], [1], [1]]},
        {"intrinsics": INTRINSICS + np.array([[0, 3, 0], [0, 0, 0], [0, 0, 0]])}, {"intrinsics": "wide"},
        {"extrinsics": mirrored}, {"extrinsics": good["extrinsics"] * 2}, {"extrinsics": good["extrinsics"][:2]},
        {"extrinsics": good["extrinsics"] + 1e30}, {"extrinsics": None}, {"extrinsics": [[1, 2], [3]]})]  # fmt: skip
    out += [{"images": []}, 5, None, b"", folder / "nothing", folder]
    frame = {"file_path": "0.png", "transform_matrix": np.eye(4).tolist()}
    content = {"camera_angle_x": 1.0, "frames": [frame]}
    for i, text in enumerate((
        "", "{", "[1]", "[" * 100_000, '{"frames": 3}', '{"frames": []}', '{"frames": [1]}',
        json.dumps(content | {"camera_angle_x": 0}), json.dumps(content | {"camera_angle_x": [1, 2]}),
        json.dumps(content | {"camera_angle_x": None}), json.dumps(content | {"k1": 0.1}),
        json.dumps(content | {"w": 10, "h": 100}), json.dumps(content | {"w": 0, "h": 0}),
        json.dumps(content | {"fl_x": -5}), json.dumps(content | {"fl_x": 10**400}),
        json.dumps(content | {"frames": [frame | {"file_path": "../../etc/passwd"}]}),
        json.dumps(content | {"frames": [frame | {"file_path": "/etc/passwd"}]}),
        json.dumps(content | {"frames": [frame | {"file_path": "a\0b"}]}),
        json.dumps(content | {"frames": [frame | {"file_path": "x" * 5000}]}),
        json.dumps(content | {"frames": [frame | {"file_path": 7}]}),
        json.dumps(content | {"frames": [{"file_path": "0.png"}]}),
        json.dumps(content | {"frames": [frame | {"transform_matrix": [[1]]}]}),
        json.dumps(content | {"frames": [frame | {"transform_matrix": np.zeros((4, 4)).tolist()}]}),
        json.dumps({"images": [1], "intrinsics": INTRINSICS.tolist(), "extrinsics": [np.eye(4).tolist()]}),
    )):  # fmt: skip
        (folder / f"bad{i}.json").write_text(text)
        out.append(folder / f"bad{i}.json")
    return out
