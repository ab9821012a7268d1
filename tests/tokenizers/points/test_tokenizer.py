"""Points: reading files, sampling surfaces, patches of a set, and the contract of a front-end."""

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
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers import files
from worldtokens.tokenizers.points import read as meshes
from worldtokens.tokenizers.points.read import read_geometry, sample_surface
from worldtokens.tokenizers.points.tokenizer import farthest_points, nearest, thin

trimesh = pytest.importorskip("trimesh")
ASSETS = os.environ.get("WORLDTOKENS_ASSETS")
RNG = np.random.default_rng(0)
CUBE = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
GRID = np.stack(np.meshgrid(*[np.arange(5.0)] * 3), -1).reshape(-1, 3)  # full of ties


def small(**options) -> wt.PointTokenizer:
    torch.manual_seed(0)
    return wt.PointTokenizer(
        **({"dim": 16, "points": 128, "patches": 16, "neighbours": 8, "hidden": (16, 24, 32)} | options)
    ).eval()


def table() -> "trimesh.Trimesh":
    top = trimesh.creation.box((2.0, 0.1, 1.0))
    legs = [trimesh.creation.cylinder(0.05, 1.0, sections=12) for _ in range(4)]
    for leg, x, z in zip(legs, (-0.9, 0.9, -0.9, 0.9), (-0.4, -0.4, 0.4, 0.4), strict=True):
        leg.apply_transform(trimesh.transformations.rotation_matrix(np.pi / 2, (1, 0, 0)))
        leg.apply_translation((x, -0.5, z))
    return trimesh.util.concatenate([top, *legs])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One mesh in every format, and clouds."""
    folder = tmp_path_factory.mktemp("shapes")
    mesh = table()
    for kind in ("ply", "obj", "stl", "off", "glb"):
        mesh.export(folder / f"table.{kind}")
    (folder / "ascii.ply").write_bytes(trimesh.exchange.ply.export_ply(mesh, encoding="ascii"))
    (folder / "ascii.stl").write_text(trimesh.exchange.stl.export_stl_ascii(mesh))
    cloud = RNG.normal(size=(46, 3))
    np.savetxt(folder / "cloud.xyz", cloud)
    np.save(folder / "cloud.npy", cloud)
    np.savez_compressed(folder / "cloud.npz", points=cloud)
    np.savez(folder / "mesh.npz", vertices=mesh.vertices, faces=mesh.faces)
    trimesh.PointCloud(cloud, colors=RNG.integers(0, 255, (46, 4))).export(folder / "cloud.ply")
    return folder


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


# ---- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESHES)
def test_every_format_holds_the_same_mesh(folder, name):
    shape = read_geometry(folder / name)
    got = trimesh.Trimesh(shape.points, shape.faces, process=False)
    assert len(shape.faces) == len(table().faces)
    assert abs(got.area / table().area - 1) < 1e-6
    assert np.abs(np.subtract(got.bounds, table().bounds)).max() < 1e-6
    same = read_geometry((folder / name).open("rb"))
    assert np.array_equal(same.points, shape.points) and np.array_equal(same.faces, shape.faces)


@pytest.mark.parametrize("name", CLOUDS)
def test_every_format_holds_the_same_cloud(folder, name):
    shape = read_geometry(str(folder / name))
    assert shape.faces is None and np.abs(shape.points - np.load(folder / "cloud.npy")).max() < 1e-6


@pytest.mark.parametrize(
    "name", ["table.ply", "table.stl", "table.off", "table.glb", "cloud.npy", "cloud.npz"]
)
def test_bytes_tell_their_kind(folder, name):
    assert np.array_equal(
        read_geometry((folder / name).read_bytes()).points, read_geometry(folder / name).points
    )


def obj(text: str) -> meshes.Geometry:
    f = io.BytesIO(text.encode())
    f.name = "x.obj"
    return read_geometry(f)


def test_obj_counts_backwards_fans_polygons_and_skips_the_rest():
    shape = obj("mtllib ../secret.mtl\no a\nv 0 0 0 # here\nv\t1 0 0\nv 1 1 0\nv 0 1 \\\n0\nusemtl m\nf 1/1/1 2//2 3/3 4\n"
                "o b\nv 5 0 0\nv 6 0 0\nv 5 1 0\nf -3 -2 -1\nf 1 2\nl 1 2\n")  # fmt: skip
    assert shape.points.shape == (7, 3) and shape.points[3].tolist() == [0, 1, 0]
    assert shape.faces.tolist() == [[0, 1, 2], [0, 2, 3], [4, 5, 6]]
    cloud = obj("v 1 2 3 0.5 0.25 1\nv 4 5 6 0 0 0\n")
    assert cloud.faces is None and cloud.extra.tolist() == [[0.5, 0.25, 1], [0, 0, 0]]


@pytest.mark.parametrize("text", ["f 1 2 3\n", "v 1 2\n", "v a b c\n", "v 0 0 0\nf 0 1 1\n", "v 0 0 0\nf 1 2 3\n",
                                  "v 0 0 0\nf -2 -1 -1\n", "hello\n", "v 0 0 0\nf 1.5 1 1\n"])  # fmt: skip
def test_an_obj_that_is_wrong_is_refused_by_name(text):
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
def test_columns_with_counts_names_and_commas(text, shape):
    f = io.BytesIO(text.encode())
    f.name = "x.xyz"
    got = read_geometry(f)
    assert (len(got.points), 3 + (0 if got.extra is None else got.extra.shape[1])) == shape


def test_a_scene_is_put_together_with_its_transforms():
    box = trimesh.creation.box((1, 1, 1))
    scene = trimesh.Scene()
    move = np.eye(4)
    move[0, 3] = 10
    scene.add_geometry(box, node_name="a")
    scene.add_geometry(box, node_name="b", transform=move)
    shape = read_geometry(scene.export(file_type="glb"))
    assert shape.faces.shape == (24, 3)
    assert shape.points[:, 0].min() == -0.5 and shape.points[:, 0].max() == 10.5


def test_colours_normals_and_columns_are_features(folder):
    cloud = trimesh.PointCloud(RNG.normal(size=(46, 3)), colors=np.full((46, 4), (255, 0, 51, 255)))
    raw = small(features=3).read(cloud.export(file_type="ply"))
    assert raw.shape == (46, 6) and raw[0, 3:].tolist() == [1.0, 0.0, 0.2]
    raw = small(features=3).read(folder / "table.obj")
    assert (raw[:, 3:].norm(dim=1) - 1).abs().max() < 1e-12
    on_top = raw[:, 1] == raw[:, 1].max()
    assert on_top.any() and (raw[on_top, 3:] == torch.tensor([0.0, 1.0, 0.0])).all()
    with pytest.raises(wt.InputError, match="0 columns beside"):
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


def hostile(folder: Path) -> dict[str, bytes]:
    """Broken files by name; what they unfold to would often be far larger than they are."""
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
        "words.xyz": b"one two three\nfour five six\n",
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


def test_hostile_files_are_refused_by_name_and_soon(folder, tmp_path):
    front = small()
    for name, data in hostile(folder).items():
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
def test_what_is_no_shape_is_refused(source):
    with pytest.raises(wt.InputError):
        small().read(source)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.ply")
    with pytest.raises(wt.InputError, match="no regular file"):
        small().read(tmp_path / "p.ply")


def test_limits_are_checked_before_reading(tmp_path, monkeypatch):
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
def test_flipped_bytes_give_tokens_or_an_input_error(folder, data):
    name = data.draw(st.sampled_from((*MESHES, *CLOUDS)))
    raw = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        # most damage is done in headers
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


# ---- surfaces --------------------------------------------------------------------------------------------------


def test_a_face_gets_its_share_of_points_and_they_lie_on_it():
    points = np.array([[0, 0, 0], [3, 0, 0], [0, 3, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1.0]])
    faces = np.array([[0, 1, 2], [3, 4, 5]])  # areas 4.5 and 0.5
    where, normals = sample_surface(points, faces, 100)
    low = where[where[:, 2] == 0]
    assert len(low) == 90 and (low[:, :2] >= 0).all() and (low.sum(1) <= 3 + 1e-9).all()
    assert normals.tolist() == [[0, 0, 1]] * 100
    assert np.abs(low.mean(0) - [1, 1, 0]).max() < 0.05  # the centre of the triangle


def test_samples_cover_a_square_more_evenly_than_random_ones():
    points = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    where, _ = sample_surface(points, np.array([[0, 1, 2], [0, 2, 3]]), 256)

    def unevenness(p):
        counts, _, _ = np.histogram2d(p[:, 0], p[:, 1], bins=8, range=[[0, 1], [0, 1]])
        return counts.std()

    random = [unevenness(np.random.default_rng(i).random((256, 2))) for i in range(10)]
    assert unevenness(where) < 0.75 * min(random)


def test_a_mesh_gives_exactly_so_many_different_points_always_the_same(folder):
    a, b = (small(points=1000).read(folder / "table.obj") for _ in range(2))
    assert a.shape == (1000, 3) and torch.equal(a, b) and len(a.unique(dim=0)) == 1000


def test_a_mesh_without_area_gives_its_corners():
    raw = small().read(trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [2, 0, 0]], [[0, 1, 2]], process=False))
    assert raw.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


# ---- sets ------------------------------------------------------------------------------------------------------


def fps_by_hand(points: np.ndarray, n: int) -> list[int]:
    """One cloud, one pick at a time, in float32."""
    middle = (points.min(0) + points.max(0)) / np.float32(2)

    def d(q):
        e = points - q
        return e[:, 0] * e[:, 0] + e[:, 1] * e[:, 1] + e[:, 2] * e[:, 2]

    picks = [int(np.argmax(d(middle)))]
    while len(picks) < n:
        far = np.min([d(points[p]) for p in picks], axis=0)
        far[picks] = -1
        picks.append(int(np.argmax(far)))
    return picks


@pytest.mark.parametrize("points", [RNG.normal(size=(200, 3)), GRID, CUBE, np.zeros((5, 3))])
def test_farthest_points_and_neighbours_equal_a_plain_reference(points):
    x = torch.tensor(np.unique(points, axis=0) if points.any() else points, dtype=torch.float32)
    n, a = min(20, len(x)), x.numpy()
    picks = farthest_points(x[None], n)[0].tolist()
    assert picks == fps_by_hand(a, n)
    members, real = nearest(x[None], x[None, picks], 9)
    assert real.all()
    for i, pick in enumerate(picks):
        e = a - a[pick]
        d = e[:, 0] * e[:, 0] + e[:, 1] * e[:, 1] + e[:, 2] * e[:, 2]
        assert members[0, i].tolist() == sorted(range(len(a)), key=lambda j: (d[j], j))[:9]


def test_neighbours_in_pieces_equal_those_at_once(monkeypatch):
    x = torch.randn(2, 50, 3)
    whole = nearest(x, x[:, :20], 5)
    monkeypatch.setattr("worldtokens.tokenizers.points.tokenizer.CHUNK", 300)
    parts = nearest(x, x[:, :20], 5)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_k_equals_n_picks_every_point_once_even_when_all_tie():
    for points in (torch.zeros(1, 12, 3), torch.tensor(CUBE[None], dtype=torch.float32)):
        n = points.shape[1]
        assert sorted(farthest_points(points, n)[0].tolist()) == list(range(n))


@pytest.mark.parametrize("points", [CUBE, GRID, RNG.normal(size=(46, 3)), RNG.normal(size=(500, 3)),
                                    np.c_[np.arange(30.0), np.zeros((30, 2))], RNG.integers(0, 4, (300, 3)) * 1.0])  # fmt: skip
def test_the_order_of_points_and_repetitions_change_nothing_to_the_bit(points):
    front = small()
    ref = front.tokens([points])
    for seed in range(4):
        mixed = np.random.default_rng(seed).permutation(np.concatenate([points, points[: 3 * seed]]))
        got = front.tokens([mixed])
        assert (
            torch.equal(got.x, ref.x) and torch.equal(got.pos, ref.pos) and torch.equal(got.valid, ref.valid)
        )


def test_the_order_of_a_plain_tensor_changes_nothing():
    front = small(features=1)
    x = torch.randn(2, 60, 4).round(decimals=1)
    ref = front(x)
    assert torch.equal(front(x[:, torch.randperm(60)]).x, ref.x)
    # and it is what collate makes of the same numbers
    same = small(features=1, normalise="none")
    assert torch.equal(same(x[:1].unique(dim=1)).x, same(same.collate([x[0].unique(dim=0)])).x)


def test_46_points_are_46_tokens_and_nothing_is_repeated():
    front = small(points=1024, patches=64, neighbours=32)
    few = RNG.normal(size=(46, 3))
    t = front.tokens([few, RNG.normal(size=(2000, 3))])
    assert t.shape == (2, 64, 16) and t.valid.sum(1).tolist() == [46, 64]
    assert len(t.pos[0][t.valid[0]].unique(dim=0)) == 46
    alone = front.tokens([few])
    assert alone.shape[1] == 46 and torch.equal(alone.x[0], t.x[0, :46])


def test_a_patch_is_masked_where_points_are_missing():
    """A cloud of 5 gives the same with 8 neighbours as with 5: the three missing ones are not there."""
    points = RNG.normal(size=(5, 3))
    eight, five = small(neighbours=8), small(neighbours=5)
    five.load_state_dict(eight.state_dict())
    both = eight.tokens([points, RNG.normal(size=(100, 3))])
    assert (both.x[0, :5] - five.tokens([points]).x[0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "points", [[[1, 2, 3]], [[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [1, 1, 1], [3, 3, 3]], [[7, 7, 7]] * 9]
)
def test_one_two_collinear_and_equal_points(points):
    t = small().tokens([np.array(points, dtype=float)])
    assert t.valid.all() and t.shape[1] == len(np.unique(points, axis=0)) and t.x.isfinite().all()
    assert t.pos.isfinite().all()


def test_rows_of_nan_are_missing_returns():
    points = RNG.normal(size=(40, 3))
    holes = np.insert(points, [0, 7, 20], np.nan, axis=0)
    assert torch.equal(small().tokens([holes]).x, small().tokens([points]).x)
    with pytest.raises(wt.InputError, match="feature is NaN"):
        small(features=1).read(np.c_[points, np.full(40, np.nan)])


def test_moving_and_scaling_change_nothing_when_normalised():
    points = RNG.integers(-50, 50, (100, 3)).astype(float)
    front = small()
    ref = front.tokens([points])
    far = front.tokens([points * 4.0 + np.array([4_500_000.0, -300_000.0, 80.0])])
    assert (far.x - ref.x).abs().max() < 1e-4 and (far.pos - ref.pos).abs().max() < 1e-4
    assert (
        small(normalise="none").tokens([points * 2]).pos - small(normalise="none").tokens([points]).pos * 2
    ).abs().max() == 0
    centred = small(normalise="centre").tokens([points + 9.0]).pos
    assert (centred - small(normalise="centre").tokens([points]).pos).abs().max() < 1e-4


def test_pos_is_z_y_x_of_the_centre_in_token_steps():
    # the corners of a box: mean 0, farthest at distance 1 after scaling
    points = CUBE * np.array([1.0, 2.0, 2.0])
    t = small(patches=16).tokens([points])
    assert t.pos.abs().amax((0, 1)).tolist() == pytest.approx([2 * 2 / 3, 2 * 2 / 3, 2 * 1 / 3])
    first = t.pos[0, 0] / torch.tensor([4 / 3, 4 / 3, 2 / 3])
    assert first.tolist() == pytest.approx(
        [-1, -1, -1]
    )  # all corners tie: the first in the order of coordinates


def test_large_clouds_are_thinned_evenly_whatever_their_order():
    points = RNG.random((20_000, 3)) * np.array([4.0, 1.0, 1.0])
    kept = thin(points, 500)
    assert len(np.unique(kept, axis=0)) == 500
    assert np.array_equal(thin(RNG.permutation(points), 500), kept)
    counts, _ = np.histogram(kept[:, 0], bins=4, range=(0, 4))
    assert np.abs(counts - 125).max() <= 5  # random choice has a deviation of 10
    assert len(thin(points[:500], 500)) == 500


def test_a_batch_knows_its_own_points_at_half_precision():
    """Coordinates travel as bits: weights in bfloat16 pick the very same centres."""
    front = small()
    clouds = [RNG.normal(size=(120, 3)), RNG.normal(size=(30, 3))]
    ref = front.tokens(clouds)
    half = small().to(torch.bfloat16)
    got = half(half.collate([half.read(c) for c in clouds]).to(torch.bfloat16))
    assert torch.equal(got.pos, ref.pos) and got.x.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{"patches": 129}, {"patches": 0}, {"normalise": "cube"}, {"features": -1}, {"points": 2.5}]
)
def test_settings_out_of_range(options):
    with pytest.raises(wt.InputError, match=r"expected|patches"):
        small(**options)


def test_collate_refuses_what_read_does_not_give():
    front = small()
    for raws in ([], [torch.zeros(0, 3)], [torch.zeros(4, 4)], [torch.full((4, 3), torch.nan)], [np.zeros((4, 3))],
                 [torch.zeros(4, 3, dtype=torch.long)]):  # fmt: skip
        with pytest.raises(wt.InputError):
            front.collate(raws)
    with pytest.raises(wt.InputError, match=r"\(B, N, 3\)"):
        front(torch.zeros(2, 5, 4))


def test_the_contract(folder, tmp_path):
    (tmp_path / "broken.ply").write_bytes(b"ply\nhello\n")
    samples = [
        folder / "table.obj",
        folder / "cloud.ply",
        CUBE,
        np.array([[1.0, 2, 3]]),
        GRID,
        folder / "table.glb",
    ]
    bad = [tmp_path / "broken.ply", tmp_path / "none.ply", b"", np.zeros((0, 3)), 5]
    check_tokenizer(small(), samples, bad=bad, ordered=False)
    check_tokenizer(
        small(features=3),
        [folder / "table.obj", folder / "cloud.ply", RNG.normal(size=(70, 6))],
        ordered=False,
    )


def test_it_learns_to_tell_a_ball_from_a_box():
    torch.manual_seed(0)
    front = small(points=64, patches=8, dim=32)
    head = torch.nn.Linear(32, 2)
    rng = np.random.default_rng(1)

    def clouds(n):
        out, labels = [], rng.integers(0, 2, n)
        for label in labels:
            p = rng.normal(size=(64, 3))
            p /= (np.linalg.norm(p, axis=1) if label else np.abs(p).max(1))[:, None]
            out.append(torch.from_numpy(p * rng.uniform(0.5, 2)))
        return front.collate(out), torch.from_numpy(labels)

    opt = torch.optim.AdamW([*front.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(120):
        batch, labels = clouds(32)
        loss = torch.nn.functional.cross_entropy(head(front(batch).pool("mean")), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
    batch, labels = clouds(200)
    with torch.no_grad():
        right = (head(front(batch).pool("mean")).argmax(1) == labels).float().mean()
    assert right > 0.9  # guessing: 0.5


@pytest.mark.skipif(not ASSETS, reason="WORLDTOKENS_ASSETS names no folder of real data")
def test_real_furniture():
    archives = sorted(Path(ASSETS).glob("root/usr/share/sweethome3d/furniture/*.sh3f"))
    if not archives:
        pytest.skip("no furniture in the folder")
    front = small(points=256, patches=32)
    sources = []
    for archive in archives:
        with zipfile.ZipFile(archive) as z:
            names = sorted(
                i.filename for i in z.infolist() if i.filename.endswith(".obj") and i.file_size < 300_000
            )
            for name in names[:: max(1, len(names) // 4)]:
                f = io.BytesIO(z.read(name))
                f.name = name
                shape, ours = read_geometry(f), trimesh.load_mesh(io.BytesIO(f.getvalue()), file_type="obj", process=False,
                                                               skip_materials=True)  # fmt: skip
                area = trimesh.Trimesh(shape.points, shape.faces, process=False).area
                assert abs(area / ours.area - 1) < 1e-9, name
                f.seek(0)
                sources.append(front.read(f))
    assert len(sources) >= 16
    ref = front(front.collate(sources))
    mixed = [s[torch.randperm(len(s))] for s in sources]
    assert torch.equal(front(front.collate(mixed)).x, ref.x)
    check_tokenizer(front, [s.numpy() for s in sources[:6]], ordered=False)
