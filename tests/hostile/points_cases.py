"""Hostile point clouds and meshes."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import numpy as np
from cases import case, truncated


def points(n: int) -> np.ndarray:
    return np.random.default_rng(0).random((n, 3))


def xyz(cloud: np.ndarray) -> bytes:
    return "\n".join(" ".join(map(repr, map(float, p))) for p in cloud).encode()


def ply(cloud: np.ndarray, declared: int | None = None, tail: str = "") -> bytes:
    n = len(cloud) if declared is None else declared
    head = f"ply\nformat ascii 1.0\nelement vertex {n}\n"
    head += "property float x\nproperty float y\nproperty float z\n" + tail
    return f"{head}end_header\n".encode() + xyz(cloud) + b"\n"


def binary_ply(declared: int, data: bytes) -> bytes:
    head = f"ply\nformat binary_little_endian 1.0\nelement vertex {declared}\n"
    head += "property float x\nproperty float y\nproperty float z\nend_header\n"
    return head.encode() + data


def npy(a: np.ndarray, **options) -> bytes:
    out = io.BytesIO()
    np.save(out, a, **options)
    return out.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def npz_bomb(megabytes: int) -> bytes:
    """Zeros, compressed to a thousandth."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z, z.open("points.npy", "w") as f:
        f.write(npy(np.zeros((1, 3)))[:128].replace(b"(1, 3)", b"(9, 3)"))
        for _ in range(megabytes):
            f.write(bytes(1 << 20))
    return out.getvalue()


def header_only_npy(shape: str) -> bytes:
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + bytes(240)


def pickled() -> bytes:
    return npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)


def box(kind: str) -> bytes:
    """A cube of 12 triangles as trimesh writes it."""
    import trimesh

    data = trimesh.creation.box().export(file_type=kind)
    return data if isinstance(data, bytes) else data.encode()


def gltf(**more) -> bytes:
    return json.dumps({"asset": {"version": "2.0"}, **more}).encode()


def stl(declared: int, n: int) -> bytes:
    return bytes(80) + struct.pack("<I", declared) + struct.pack("<12fH", *range(12), 0) * n


CUBE = b"v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0 0 1\nv 1 0 1\nv 1 1 1\nv 0 1 1\n"
P = "points"  # at most 64 patches; a mesh gives 64
for kind in ("ply", "stl", "stl_ascii", "off", "glb"):
    case(P, f"box-{kind}.{kind[:3]}", 64, lambda kind=kind: box(kind))
case(P, "46-points.ply", 46, lambda: ply(points(46)))
case(P, "46-points.pts", 46, lambda: b"46\n" + xyz(points(46)))
case(P, "46-points.npz", 46, lambda: npz(points=points(46)))
case(P, "46-points.xyz", 46, lambda: xyz(points(46)))
case(P, "one-point.xyz", 1, lambda: b"1 2 3\n")
case(P, "same-point.xyz", 1, lambda: xyz(np.ones((100, 3))))
case(P, "in-a-row.xyz", 64, lambda: xyz(np.arange(100)[:, None] * np.ones((1, 3))))
case(
    P, "ring.xyz", 32, lambda: xyz(np.array([[np.cos(a), np.sin(a), 0] for a in np.arange(32) * np.pi / 16]))
)
case(P, "nan-rows.xyz", 46, lambda: xyz(np.concatenate([points(46), np.full((9, 3), np.nan)])))
case(P, "all-nan.xyz", "NaN", lambda: xyz(np.full((9, 3), np.nan)))
case(P, "infinite.xyz", "infinite", lambda: b"0 0 0\ninf 0 0\n")
case(P, "huge.xyz", "beyond", lambda: b"0 0 0\n1e300 0 0\n")
case(P, "two-columns.xyz", "", lambda: b"1 2\n3 4\n")
case(P, "ragged.xyz", "columns", lambda: b"1 2 3\n4 5 6 7\n")
case(P, "text.xyz", "", lambda: b"once upon a\ntime there was\n")
case(P, "declares-more.pts", "truncated", lambda: b"1000\n1 2 3\n")
case(P, "zero-bytes.xyz", "zero bytes", lambda: b"1 2 3\n\0\0\0\n")
case(P, "one-long-line.xyz", "a line has more", lambda: b"1 " * (1 << 20))
case(P, "three-million-lines.xyz", "lines", lambda: b"\n" * 3_000_000)
case(P, "empty.ply", "empty", lambda: b"")
case(P, "no-vertex.ply", "no points", lambda: ply(np.zeros((0, 3))))
case(P, "declares-a-billion.ply", "", lambda: ply(points(5), 1_000_000_000))
case(P, "declares-a-billion-binary.ply", "", lambda: binary_ply(1_000_000_000, bytes(120)))
case(P, "negative-count.ply", "", lambda: ply(points(5), -5))
case(
    P,
    "long-list.ply",
    "declares 250 numbers and has 3",
    lambda: ply(points(3), tail="element face 1\nproperty list uchar int vertex_indices\n") + b"250 0 1 2\n",
)
case(P, "cube.obj", 64, lambda: CUBE + b"f 1 2 3 4\nf 5 6 7 8\nf 1 2 6 5\nf 4 3 7 8\n")
case(P, "backwards.obj", 64, lambda: CUBE + b"f -8 -7 -6 -5\nf -1 -2 -3\n")
case(P, "lines-for-faces.obj", 4, lambda: CUBE + b"f 1 2 3\n".replace(b"3", b"2") + b"f 3 3 4\n")
case(P, "face-too-far.obj", "damaged", lambda: CUBE + b"f 1 2 999999999\n")
case(P, "face-zero.obj", "from 1", lambda: CUBE + b"f 0 1 2\n")
case(P, "number-of-5000-digits.obj", "", lambda: CUBE + b"f 1 2 " + b"9" * 5000 + b"\n")
case(P, "names-a-material.obj", 8, lambda: b"mtllib /dev/zero\nusemtl x\n" + CUBE)
case(P, "cut.stl", "declares 100 faces", lambda: stl(100, 3))
case(P, "declares-4-billion.stl", "", lambda: stl(0xFFFFFFFF, 2))
case(P, "cut.off", "truncated", lambda: b"OFF\n8 6 0\n0 0 0\n")
case(P, "cut.glb", "complete GLB", lambda: b"glTF" + struct.pack("<II", 2, 4000) + bytes(20))
case(
    P,
    "elsewhere.gltf",
    "",
    lambda: gltf(buffers=[{"uri": "file:///dev/zero", "byteLength": 99}], scenes=[{}]),
)
case(
    P,
    "decompresses.gltf",
    "decompress",
    lambda: gltf(accessors=[{"count": 1 << 40, "componentType": 5126, "type": "VEC3"}]),
)
case(
    P, "circle.gltf", "", lambda: gltf(scenes=[{"nodes": [0]}], nodes=[{"children": [1]}, {"children": [0]}])
)
case(P, "deep.gltf", "", lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
case(P, "pickled.npy", "numbers only", pickled)
case(P, "declares-terabytes.npy", "", lambda: header_only_npy("(1000000000000, 3)"))
case(P, "wide.npy", "columns", lambda: npy(np.zeros((9, 2))))
case(P, "float16.npy", 46, lambda: npy(points(46).astype(np.float16)))
case(P, "unfolds.npz", "decompresses to", lambda: npz_bomb(300))
case(P, "cut.npz", "NumPy", truncated(lambda: npz(points=points(46))))
case(P, "no-such-kind.fbx", "ends in .fbx", lambda: b"Kaydara FBX Binary  ")
