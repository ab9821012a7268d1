"""Reads point clouds and meshes: PLY, STL, OFF, GLB, glTF, OBJ, text and NumPy files -> points, faces, extra columns.

trimesh parses PLY, STL, OFF, GLB and glTF. OBJ, text and NumPy files are parsed here: an OBJ may have negative vertex
indices and thousands of groups, which trimesh 5 reads wrongly or slowly.

Notable: parsers get bytes, so a file that references other files (materials, textures, buffers) opens nothing else.
Sizes are checked before anything is decompressed. Counts of a header are compared with the parsed result, because
several parsers accept truncated files.

Shapes: V points, F faces, C extra columns.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import re
from typing import Any

import numpy as np
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.files import MAX_BYTES, read_arrays, read_bytes, read_text

MAX_FACES = 8_000_000  # of a whole scene
MAX_NODES = 10_000
MAX_VALUE = 1e15  # squared float32 distances of larger coordinates could overflow

TRIMESH = ("ply", "stl", "off", "glb", "gltf")
COLUMNS = ("xyz", "txt", "pts", "csv")
KINDS = (*TRIMESH, "obj", *COLUMNS, "npy", "npz")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A point cloud or a mesh.

    Args:
        name: of the source, for error messages.
        points: (V, 3) float64, x, y, z.
        faces: (F, 3) int64 triangles; None for a point cloud.
        extra: (V, C) float64, further columns of a point cloud (colours in [0, 1] if the file has them), or None.
    """

    name: str
    points: np.ndarray
    faces: np.ndarray | None = None
    extra: np.ndarray | None = None


def read_geometry(source: Any) -> Geometry:
    """Reads one point cloud or mesh.

    Args:
        source: a path ending in .ply .obj .stl .off .glb .gltf .xyz .txt .pts .csv .npy or .npz; the bytes of such a file
            or a binary file object (the format of bytes is detected; OBJ and text need a file name); an ndarray or
            tensor (V, 3 + C); or an object with `vertices` and optionally `faces`, such as a trimesh.

    Raises:
        InputError: it cannot be read; names the file, what was found and what to do.
    """
    if isinstance(source, np.ndarray | Tensor):
        a = source.detach().cpu().double().numpy() if isinstance(source, Tensor) else source
        name = f"<{'tensor' if isinstance(source, Tensor) else 'array'} {tuple(source.shape)}>"
        return _from_columns(a, name)
    if hasattr(source, "vertices"):
        name = f"<{type(source).__name__}>"
        return _checked(name, source.vertices, getattr(source, "faces", None))
    name, data, kind = read_bytes(source, KINDS)
    kind = kind or _sniff(data)
    if kind not in KINDS:
        raise InputError(
            f"{name}: begins with {data[:12]!r}, which is no known format; pass a path or file whose name "
            f"ends in one of .{' .'.join(KINDS)}, or an array (V, 3)"
        )
    try:
        if kind in ("npy", "npz"):
            return _from_arrays(read_arrays(data, name), name)
        if kind == "obj":
            return _checked(name, *_obj(data, name))
        if kind in COLUMNS:
            return _from_columns(_columns(data, name), name)
        return _trimesh(data, kind, name)
    except InputError:
        raise
    except MemoryError as e:
        raise InputError(f"{name}: not enough memory to read it") from e
    except Exception as e:  # parsers raise any exception on a damaged file
        raise InputError(
            f"{name}: cannot be read as {kind.upper()}: damaged, truncated or another format "
            f"({type(e).__name__}: {str(e)[:200]}); export it again with a mesh program"
        ) from e


def _sniff(data: bytes) -> str:
    head = data[:80].lstrip()
    for start, kind in ((b"ply", "ply"), (b"glTF", "glb"), (b"\x93NUMPY", "npy"), (b"PK", "npz"), (b"OFF", "off"),
                        (b"COFF", "off"), (b"solid", "stl")):  # fmt: skip
        if head.startswith(start):
            return kind
    binary_stl = len(data) >= 84 and len(data) == 84 + 50 * int.from_bytes(data[80:84], "little")
    return "stl" if binary_stl else ""


# ---- NumPy files and text columns ------------------------------------------------------------------------------


def _from_arrays(arrays: dict[str, np.ndarray], name: str) -> Geometry:
    if "vertices" in arrays:
        return _checked(name, arrays["vertices"], arrays.get("faces"))
    for key in ("points", "xyz", "pos", "data", "arr_0"):
        if key in arrays:
            return _from_columns(arrays[key], name)
    if len(arrays) == 1:
        return _from_columns(next(iter(arrays.values())), name)
    raise InputError(
        f"{name}: has arrays {sorted(arrays)[:8]}, expected `points` (V, 3 + C), or `vertices` and `faces`"
    )


def _from_columns(a: np.ndarray, name: str) -> Geometry:
    if a.ndim != 2 or a.shape[1] < 3 or a.dtype.kind not in "fiu":
        raise InputError(
            f"{name}: is {a.dtype} of shape {a.shape}, expected numbers (V, 3) as x, y, z, or (V, 3 + C) with extra "
            "columns; one point per row"
        )
    return _checked(name, a[:, :3], None, a[:, 3:] if a.shape[1] > 3 else None)


def _columns(data: bytes, name: str) -> np.ndarray:
    rows = [
        r.split("#")[0].replace(",", " ").replace(";", " ").split()
        for r in read_text(data, name).splitlines()
    ]
    rows = [r for r in rows if r and not r[0].startswith("//")]
    if rows and len(rows[0]) == 1:  # .pts and many .xyz files start with the number of points
        if int(rows[0][0]) > len(rows) - 1:
            raise InputError(f"{name}: declares {rows[0][0]} points and has {len(rows) - 1}: truncated")
        rows = rows[1:]
    if rows and not _number(rows[0][0]):  # a line of column names
        rows = rows[1:]
    widths = {len(r) for r in rows}
    if len(widths) > 1:
        raise InputError(
            f"{name}: rows have {sorted(widths)[:5]} columns, expected the same number in each (x y z ...)"
        )
    return np.array(rows, dtype=np.float64) if rows else np.zeros((0, 3))


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _obj(data: bytes, name: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Wavefront OBJ: `v` and `f` lines. Polygons become triangle fans; vertex indices may be negative."""
    points, corners = [], []
    for i, line in enumerate(re.sub(r"\\\r?\n", " ", read_text(data, name)).splitlines(), 1):
        keyword, rest = (*line.split(None, 1), "", "")[:2]
        if keyword == "v":
            points.append([float(v) for v in rest.split("#")[0].split()[:6]])
            if len(points[-1]) < 3:
                raise InputError(f"{name}: line {i} is {line[:60]!r}, expected `v x y z`")
        elif keyword == "f":
            refs = [int(r.split("/", 1)[0]) for r in rest.split("#")[0].split()]
            # vertices count from 1; a negative index beyond the first vertex would wrap around
            if not refs or 0 in refs or min(refs) < -len(points):
                raise InputError(
                    f"{name}: line {i} is {line[:60]!r}, expected `f a b c` with vertices from 1"
                )
            if min(refs) < 0:
                refs = [r if r > 0 else len(points) + 1 + r for r in refs]
            # a fan from the first corner; faces of two corners (edges) have no area and are dropped
            corners += [(refs[0], b, c) for b, c in itertools.pairwise(refs[1:])]
    if not points:
        raise InputError(f"{name}: has no `v x y z` line, expected an OBJ file with vertices")
    width = min(map(len, points))
    a = np.array([p[:width] for p in points])
    faces = np.array(corners, dtype=np.int64) - 1 if corners else None
    return a[:, :3], faces, a[:, 3:6] if width == 6 else None


# ---- formats parsed by trimesh ---------------------------------------------------------------------------------------


def _trimesh(data: bytes, kind: str, name: str) -> Geometry:
    try:
        import trimesh
    except ImportError as e:
        raise InputError(f"{name}: .{kind} files need trimesh: pip install trimesh") from e
    log = logging.getLogger("trimesh")
    if not log.handlers:  # without one it prints tracebacks for damaged files; exceptions report them here
        log.addHandler(logging.NullHandler())
    if kind in ("glb", "gltf"):
        _check_gltf(data, kind, name)
    declared = _declared_faces(data, kind, name)
    scene = trimesh.load_scene(io.BytesIO(data), file_type=kind, process=False, skip_materials=True)
    parts = list(_parts(scene, name))
    for geometry, _ in parts:
        _check_ply(geometry.metadata.get("_ply_raw", {}), name)
    meshes = [(g, m) for g, m in parts if len(getattr(g, "faces", ()))]
    if declared is not None and sum(len(g.faces) for g, _ in meshes) < declared:
        raise InputError(f"{name}: declares {declared:,} faces and has fewer: truncated")
    if sum(len(g.faces) for g, _ in meshes) > MAX_FACES:
        raise InputError(f"{name}: has more than {MAX_FACES:,} faces in total; simplify it first")
    used = meshes or [(g, m) for g, m in parts if isinstance(g, trimesh.PointCloud)]
    points, faces, colours, at = [], [], [], 0
    for geometry, matrix in used:
        v = np.asarray(geometry.vertices, dtype=np.float64)
        points.append(v @ matrix[:3, :3].T + matrix[:3, 3])
        if meshes:
            faces.append(_triangles(geometry.faces, len(v), name) + at)
        elif len(geometry.colors) == len(v):
            colours.append(np.asarray(geometry.colors)[:, :3] / 255.0)
        at += len(v)
    if not points:
        raise InputError(f"{name}: has no points and no faces")
    extra = np.concatenate(colours) if colours and len(colours) == len(points) else None
    return _checked(name, np.concatenate(points), np.concatenate(faces) if faces else None, extra)


def _parts(scene: Any, name: str):
    """(geometry, 4 x 4 world matrix) of each instance in a scene; each node is visited once."""
    below: dict[str, list] = {}
    for parent, child, facts in scene.graph.to_edgelist():
        below.setdefault(parent, []).append((child, facts))
    todo, seen = [(scene.graph.base_frame, np.eye(4))], set()
    while todo:
        parent, world = todo.pop()
        if parent in seen:
            continue
        seen.add(parent)
        for child, facts in below.get(parent, ()):
            matrix = world @ np.asarray(facts.get("matrix", np.eye(4)), dtype=np.float64)
            todo.append((child, matrix))
            if facts.get("geometry") in scene.geometry:
                yield scene.geometry[facts["geometry"]], matrix
        if len(seen) > MAX_NODES:
            raise InputError(
                f"{name}: the scene has more than {MAX_NODES:,} nodes; join them into one mesh first"
            )


def _triangles(faces: np.ndarray, v: int, name: str) -> np.ndarray:
    faces = np.asarray(faces, dtype=np.int64)
    if faces.ndim != 2 or faces.shape[1] not in (3, 4):
        raise InputError(
            f"{name}: has faces of shape {faces.shape}, expected triangles or quads: triangulate it first"
        )
    if faces.size and (faces.min() < 0 or faces.max() >= v):
        raise InputError(f"{name}: a face has index {faces.max()}, but there are {v:,} points: damaged")
    return faces if faces.shape[1] == 3 else np.concatenate([faces[:, [0, 1, 2]], faces[:, [2, 3, 0]]])


def _declared_faces(data: bytes, kind: str, name: str) -> int | None:
    """Minimum number of faces in the file, or None if the parser itself checks it; checks the size of text files."""
    if kind == "off":
        text = re.sub(r"#[^\n]*", "", read_text(data, name))
        head = re.search(r"OFF\s*(\d+)\s+(\d+)[^\n]*", text)
        if head is None:
            raise InputError(f"{name}: begins with {data[:12]!r}, expected OFF and its counts")
        lines = sum(1 for line in text[head.end() :].splitlines() if line.strip())
        if lines < int(head[1]) + int(head[2]):
            raise InputError(f"{name}: declares {head[1]} points and {head[2]} faces, but has {lines:,} lines: "
                             "truncated")  # fmt: skip
    elif kind == "stl" and not (
        len(data) >= 84 and len(data) == 84 + 50 * int.from_bytes(data[80:84], "little")
    ):
        if len(data) >= 84 and b"\0" in data:
            n = int.from_bytes(data[80:84], "little")
            raise InputError(f"{name}: declares {n:,} faces, which take {84 + 50 * n:,} bytes, and has {len(data):,} bytes: "
                             "truncated or damaged")  # fmt: skip
        text = read_text(data, name).lower()
        return text.count("facet") - text.count("endfacet")  # every facet that begins must be complete
    elif kind == "ply":
        head = data[: data.find(b"end_header") + 1 or 4096]
        if b"ascii" in head:
            _check_ascii_ply(read_text(data, name), name)
    return None


def _check_ascii_ply(text: str, name: str) -> None:
    """Compares the declared length of each list with its line; trimesh does not."""
    header, _, body = text.partition("end_header")
    lines = body.splitlines()[1:]
    at = 0
    for element in header.split("element ")[1:]:
        fields = element.split()
        count = int(fields[1])
        if fields[2:].count("property") == 1 and fields[3] == "list":
            for line in lines[at : at + max(count, 0)]:
                values = line.split()
                if values and int(values[0]) != len(values) - 1:
                    raise InputError(f"{name}: a list of `{fields[0]}` declares {values[0][:20]} numbers and has "
                                     f"{len(values) - 1}: damaged")  # fmt: skip
        at += max(count, 0)


def _check_ply(raw: dict, name: str) -> None:
    for element, facts in raw.items():
        rows = facts.get("data")
        rows = next(iter(rows.values()), ()) if isinstance(rows, dict) else rows
        found = 0 if rows is None else len(rows)
        if facts["length"] and found != facts["length"]:
            raise InputError(f"{name}: declares {facts['length']:,} rows of `{element}` and has {found:,}: truncated or "
                             "damaged")  # fmt: skip


def _check_gltf(data: bytes, kind: str, name: str) -> None:
    """Raises for files that decompress to far more than their size, and for encodings that trimesh reads as zeros."""
    if kind == "glb":
        if len(data) < 20 or data[:4] != b"glTF" or len(data) < int.from_bytes(data[8:12], "little"):
            raise InputError(f"{name}: is no complete GLB file: truncated or another format")
        data = data[20 : 20 + int.from_bytes(data[12:16], "little")]
    tree = json.loads(data)
    packed = {"KHR_draco_mesh_compression", "EXT_meshopt_compression"} & set(
        tree.get("extensionsRequired", ())
    )
    accessors = tree.get("accessors", [])
    if packed or any("sparse" in a for a in accessors):
        what = ", ".join(sorted(packed)) or "sparse accessors"
        raise InputError(f"{name}: uses {what}, which is not supported; export it without compression")
    views = sum(v["byteLength"] for v in tree.get("bufferViews", []))
    unpacked = sum(a["count"] * 64 for a in accessors)  # 64 bytes: the largest item, a 4 x 4 matrix
    if max(views, unpacked // 4) > 2 * MAX_BYTES or min([0, *(a["count"] for a in accessors)]) < 0:
        raise InputError(f"{name}: its buffers decompress to more than the limit of {2 * MAX_BYTES:,} bytes")
    used = [p for m in tree.get("meshes", []) for p in m.get("primitives", [])]
    total = sum(accessors[p["attributes"]["POSITION"]]["count"] for p in used)
    total += sum(accessors[p["indices"]]["count"] for p in used if "indices" in p)
    if len(tree.get("nodes", [])) > MAX_NODES or len(used) > MAX_NODES or total > 3 * MAX_FACES:
        raise InputError(f"{name}: has {len(tree.get('nodes', [])):,} nodes and {len(used):,} primitives of {total:,} points and "
                         f"indices, more than {MAX_NODES:,} and {3 * MAX_FACES:,}; simplify it first")  # fmt: skip


# ---- checks ----------------------------------------------------------------------------------------------------


def _checked(name: str, points: Any, faces: Any = None, extra: np.ndarray | None = None) -> Geometry:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 3:
        raise InputError(f"{name}: has points of shape {points.shape}, expected (V, 3)")
    if not len(points):
        raise InputError(f"{name}: has no points")
    faces = None if faces is None or not len(faces) else _triangles(faces, len(points), name)
    used = points if faces is None else points[np.unique(faces)]
    if faces is not None and np.isnan(used).any():
        raise InputError(f"{name}: a vertex of a face is NaN, expected finite coordinates: repair the mesh")
    with np.errstate(invalid="ignore"):
        if (np.abs(used) > MAX_VALUE).any():
            raise InputError(
                f"{name}: has infinite coordinates or coordinates beyond {MAX_VALUE:g}; it is damaged or needs scaling"
            )
    return Geometry(name, points, faces, None if extra is None else np.asarray(extra, dtype=np.float64))
