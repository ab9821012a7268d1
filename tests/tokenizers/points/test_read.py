"""Reading of point clouds and meshes: every format, damaged files, limits."""

import io
import json
import os
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.tokenizers import files
from worldtokens.tokenizers.points.read import Geometry, read_geometry

trimesh = pytest.importorskip("trimesh")
RNG = np.random.default_rng(0)
MESHES = (
    "table.ply",
    "table.obj",
    "table.stl",
    "table.off",
    "table.glb",
    "ascii.ply",
    "ascii.stl",
    "mesh.npz",
)
CLOUDS = ("cloud.xyz", "cloud.npy", "cloud.npz", "cloud.ply")


@pytest.mark.parametrize("name", MESHES)
def test_every_format_gives_the_same_mesh(folder, table, name):
    mesh = read_geometry(folder / name)
    got = trimesh.Trimesh(mesh.points, mesh.faces, process=False)
    assert len(mesh.faces) == len(table.faces)
    assert abs(got.area / table.area - 1) < 1e-6
    assert np.abs(np.subtract(got.bounds, table.bounds)).max() < 1e-6
    same = read_geometry((folder / name).open("rb"))
    assert np.array_equal(same.points, mesh.points) and np.array_equal(same.faces, mesh.faces)


@pytest.mark.parametrize("name", CLOUDS)
def test_every_format_gives_the_same_cloud(folder, name):
    mesh = read_geometry(str(folder / name))
    assert mesh.faces is None and np.abs(mesh.points - np.load(folder / "cloud.npy")).max() < 1e-6


@pytest.mark.parametrize(
    "name", ["table.ply", "table.stl", "table.off", "table.glb", "cloud.npy", "cloud.npz"]
)
def test_the_format_of_bytes_is_detected(folder, name):
    assert np.array_equal(
        read_geometry((folder / name).read_bytes()).points, read_geometry(folder / name).points
    )


def obj(text: str) -> Geometry:
    f = io.BytesIO(text.encode())
    f.name = "x.obj"
    return read_geometry(f)


def test_obj_with_negative_indices_polygons_and_other_lines():
    mesh = obj("mtllib ../secret.mtl\no a\nv 0 0 0 # here\nv\t1 0 0\nv 1 1 0\nv 0 1 \\\n0\nusemtl m\nf 1/1/1 2//2 3/3 4\n"
                "o b\nv 5 0 0\nv 6 0 0\nv 5 1 0\nf -3 -2 -1\nf 1 2\nl 1 2\n")  # fmt: skip
    assert mesh.points.shape == (7, 3) and mesh.points[3].tolist() == [0, 1, 0]
    assert mesh.faces.tolist() == [[0, 1, 2], [0, 2, 3], [4, 5, 6]]
    cloud = obj("v 1 2 3 0.5 0.25 1\nv 4 5 6 0 0 0\n")
    assert cloud.faces is None and cloud.extra.tolist() == [[0.5, 0.25, 1], [0, 0, 0]]


@pytest.mark.parametrize("text", ["f 1 2 3\n", "v 1 2\n", "v a b c\n", "v 0 0 0\nf 0 1 1\n", "v 0 0 0\nf 1 2 3\n",
                                  "v 0 0 0\nf -2 -1 -1\n", "hello\n", "v 0 0 0\nf 1.5 1 1\n"])  # fmt: skip
def test_a_wrong_obj_raises_with_its_name(text):
    with pytest.raises(wt.InputError, match=r"x\.obj"):
        obj(text)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("3\n1 2 3\n4 5 6\n7 8 9\n", (3, 3)),
        ("x,y,z,i\n1,2,3,4\n5,6,7,8", (2, 4)),
        ("# c\n1;2;3\n\n4;5;6 # d\n", (2, 3)),
    ],
)
def test_text_with_counts_column_names_and_separators(text, shape):
    f = io.BytesIO(text.encode())
    f.name = "x.xyz"
    got = read_geometry(f)
    assert (len(got.points), 3 + (0 if got.extra is None else got.extra.shape[1])) == shape


def test_a_scene_is_merged_with_its_transforms():
    box = trimesh.creation.box((1, 1, 1))
    scene = trimesh.Scene()
    move = np.eye(4)
    move[0, 3] = 10
    scene.add_geometry(box, node_name="a")
    scene.add_geometry(box, node_name="b", transform=move)
    mesh = read_geometry(scene.export(file_type="glb"))
    assert mesh.faces.shape == (24, 3)
    assert mesh.points[:, 0].min() == -0.5 and mesh.points[:, 0].max() == 10.5


def test_colours_normals_and_columns_are_features(small, folder):
    cloud = trimesh.PointCloud(RNG.normal(size=(46, 3)), colors=np.full((46, 4), (255, 0, 51, 255)))
    raw = small(features=3).read(cloud.export(file_type="ply"))
    assert raw.shape == (46, 6) and raw[0, 3:].tolist() == [1.0, 0.0, 0.2]
    raw = small(features=3).read(folder / "table.obj")
    assert (raw[:, 3:].norm(dim=1) - 1).abs().max() < 1e-12
    on_top = raw[:, 1] == raw[:, 1].max()
    assert on_top.any() and (raw[on_top, 3:] == torch.tensor([0.0, 1.0, 0.0])).all()
    with pytest.raises(wt.InputError, match="0 columns besides"):
        small(features=3).read(RNG.normal(size=(9, 3)))


def bad_glb(**changes) -> bytes:
    tree = {"asset": {"version": "2.0"}, "scene": 0, "scenes": [{"nodes": [0]}], "nodes": [{"mesh": 0}],
            "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}], "buffers": [{"byteLength": 36}],
            "bufferViews": [{"buffer": 0, "byteLength": 36}],
            "accessors": [{"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"}]} | changes  # fmt: skip
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 4)
    body = np.arange(9, dtype="<f4").tobytes()
    total = 12 + 8 + len(text) + 8 + len(body)
    return (struct.pack("<4sII", b"glTF", 2, total) + struct.pack("<II", len(text), 0x4E4F534A) + text
            + struct.pack("<II", len(body), 0x004E4942) + body)  # fmt: skip


def zip_of_zeros() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z, z.open("points.npy", "w") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f8", "fortran_order": False, "shape": (2**24, 3)})
        for _ in range(3 * 2**24 * 8 >> 20):
            f.write(bytes(1 << 20))
    return out.getvalue()


def pickled() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([{}, None], dtype=object), allow_pickle=True)
    return out.getvalue()


def broken(folder: Path) -> dict[str, bytes]:
    """Broken files by name; some would decompress to far more than their size."""
    whole = {n: (folder / n).read_bytes() for n in (*MESHES, *CLOUDS)}
    cut = {f"cut-{n}": b[: len(b) * 2 // 3] for n, b in whole.items() if not n.endswith((".obj", ".xyz"))}
    header = b"ply\nformat %b 1.0\nelement vertex %d\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    many = [{"mesh": 0}] * 20_000
    accessor = {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"}
    return cut | {
        "empty.ply": b"",
        "text.ply": b"This is a letter, not a mesh.\n" * 50,
        "text.glb": b"This is a letter, not a mesh.\n" * 50,
        "text.stl": b"solid mind\n" * 50,
        "text.off": b"OFFICE\n" * 50,
        "text.npz": b"PK" + b"\0" * 500,
        "html.obj": b"<!doctype html><html>404</html>",
        "text.xyz": b"one two three\nfour five six\n",
        "ragged.xyz": b"1 2 3\n4 5\n",
        "short.pts": b"100\n1 2 3\n",
        "huge-count.ply": header % (b"binary_little_endian", 10**12) + b"\0" * 120,
        "huge-ascii.ply": header % (b"ascii", 10**12) + b"0 0 0\n" * 10,
        "negative.ply": header % (b"binary_little_endian", -5) + b"\0" * 60,
        "letters.ply": header % (b"ascii", 2) + b"0 0 zero\n1 1 one\n",
        "none.ply": header % (b"ascii", 0),
        "huge-count.off": b"OFF\n1000000000 1000000000 0\n0 0 0\n",
        "index.off": b"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 7\n",
        "huge-count.stl": b"\0" * 80 + struct.pack("<I", 2**32 - 1) + b"\0" * 50,
        "cut-solid.stl": b"solid a\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendloop\n"
                         b"endfacet\nendsolid a\nsolid b\nfacet normal 0 0 1\nouter loop\nvertex 0 0",
        "bomb.npz": zip_of_zeros(),
        "pickle.npy": pickled(),
        "flat.npy": (lambda f: (np.save(f, np.zeros(9)), f.getvalue())[1])(io.BytesIO()),
        "zeros.glb": bad_glb(accessors=[{"componentType": 5126, "count": 10**10, "type": "VEC3"}]),
        "views.glb": bad_glb(bufferViews=[{"buffer": 0, "byteLength": 2**30}] * 100),
        "accessors.glb": bad_glb(accessors=[accessor | {"count": 10**6}] * 1000),
        "nodes.glb": bad_glb(nodes=many, scenes=[{"nodes": list(range(20_000))}]),
        "outside.glb": bad_glb(buffers=[{"uri": "/etc/hostname", "byteLength": 36}]),
        "draco.glb": bad_glb(extensionsRequired=["KHR_draco_mesh_compression"]),
        "sparse.glb": bad_glb(accessors=[accessor | {"sparse": {"count": 1}}]),
        "circle.glb": bad_glb(nodes=[{"children": [0]}]),
        "deep.gltf": b"[" * 100_000,
        "nan.obj": b"v nan 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n",
        "infinite.xyz": b"inf 0 0\n1 2 3\n",
        "far.xyz": b"1e300 0 0\n1 2 3\n",
        "all-nan.xyz": b"nan nan nan\n" * 3,
        "long.obj": b"v 0 0 0\nf " + b"1 " * 2**20,
    }  # fmt: skip


def test_broken_files_raise_with_their_name_within_5_s(small, folder, tmp_path):
    front = small()
    for name, data in broken(folder).items():
        path = tmp_path / name
        path.write_bytes(data)
        start = time.perf_counter()
        with pytest.raises(wt.InputError) as e:
            front.read(path)
            pytest.fail(f"{name} was accepted")
        assert name in str(e.value), f"{name}: {e.value}"
        assert time.perf_counter() - start < 5, name


@pytest.mark.parametrize("source", ["no-such.ply", "photo.jpg", ".", b"", b"hello", 5, None, np.zeros((0, 3)),
                                    np.zeros((3, 2)), np.zeros((2, 3, 3)), torch.zeros(7), np.array([["a"] * 3])])  # fmt: skip
def test_sources_that_are_no_geometry_raise(small, source):
    with pytest.raises(wt.InputError):
        small().read(source)


def test_a_pipe_raises_at_once(small, tmp_path):
    os.mkfifo(tmp_path / "p.ply")
    with pytest.raises(wt.InputError, match="no regular file"):
        small().read(tmp_path / "p.ply")


def test_limits_are_checked_before_reading(small, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    (tmp_path / "a.xyz").write_bytes(b"1 2 3\n" * 20)
    for source in (tmp_path / "a.xyz", (tmp_path / "a.xyz").open("rb"), (tmp_path / "a.xyz").read_bytes()):
        with pytest.raises(wt.InputError, match="more than the 100"):
            small().read(source)
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MAX_LINES", 10)
    with pytest.raises(wt.InputError, match="20 lines"):
        small().read(tmp_path / "a.xyz")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_give_points_or_an_input_error(small, folder, data):
    name = data.draw(st.sampled_from((*MESHES, *CLOUDS)))
    raw = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        # damage in headers matters most
        limit = data.draw(st.sampled_from((min(len(raw), 400), len(raw))))
        raw[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
    f = io.BytesIO(bytes(raw))
    f.name = name
    start = time.perf_counter()
    try:
        cloud = small().read(f)
    except wt.InputError:
        pass
    else:
        assert cloud.isfinite().all() and 1 <= len(cloud) <= 128
    assert time.perf_counter() - start < 5
