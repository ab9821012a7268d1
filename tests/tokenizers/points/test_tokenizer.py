"""`PointTokenizer`: invariance to order, position and scale, few points, and the tokenizer contract."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.points.read import read_geometry

trimesh = pytest.importorskip("trimesh")
ASSETS = os.environ.get("WORLDTOKENS_ASSETS")
RNG = np.random.default_rng(0)
CUBE = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
GRID = np.stack(np.meshgrid(*[np.arange(5.0)] * 3), -1).reshape(-1, 3)  # full of ties


def test_a_mesh_gives_exactly_n_distinct_points_deterministically(small, folder):
    a, b = (small(points=1000).read(folder / "table.obj") for _ in range(2))
    assert a.shape == (1000, 3) and torch.equal(a, b) and len(a.unique(dim=0)) == 1000


def test_a_mesh_without_area_gives_its_corners(small):
    raw = small().read(trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [2, 0, 0]], [[0, 1, 2]], process=False))
    assert raw.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize("points", [CUBE, GRID, RNG.normal(size=(46, 3)), RNG.normal(size=(500, 3)),
                                    np.c_[np.arange(30.0), np.zeros((30, 2))], RNG.integers(0, 4, (300, 3)) * 1.0])  # fmt: skip
def test_order_and_repetitions_of_points_change_no_bit(small, points):
    front = small()
    ref = front.tokens([points])
    for seed in range(4):
        mixed = np.random.default_rng(seed).permutation(np.concatenate([points, points[: 3 * seed]]))
        got = front.tokens([mixed])
        assert (
            torch.equal(got.x, ref.x) and torch.equal(got.pos, ref.pos) and torch.equal(got.valid, ref.valid)
        )


def test_the_order_of_a_plain_tensor_changes_nothing(small):
    front = small(features=1)
    x = torch.randn(2, 60, 4).round(decimals=1)
    ref = front(x)
    assert torch.equal(front(x[:, torch.randperm(60)]).x, ref.x)
    # and collate gives the same result
    same = small(features=1, normalize="none")
    assert torch.equal(same(x[:1].unique(dim=1)).x, same(same.collate([x[0].unique(dim=0)])).x)


def test_46_points_give_46_tokens_without_repetition(small):
    front = small(points=1024, patches=64, neighbours=32)
    few = RNG.normal(size=(46, 3))
    t = front.tokens([few, RNG.normal(size=(2000, 3))])
    assert t.shape == (2, 64, 16) and t.valid.sum(1).tolist() == [46, 64]
    assert len(t.pos[0][t.valid[0]].unique(dim=0)) == 46
    alone = front.tokens([few])
    assert alone.shape[1] == 46 and torch.equal(alone.x[0], t.x[0, :46])


def test_missing_neighbours_are_masked(small):
    """A cloud of 5 points gives the same with 8 neighbours as with 5: the three missing ones are masked."""
    points = RNG.normal(size=(5, 3))
    eight, five = small(neighbours=8), small(neighbours=5)
    five.load_state_dict(eight.state_dict())
    both = eight.tokens([points, RNG.normal(size=(100, 3))])
    assert (both.x[0, :5] - five.tokens([points]).x[0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "points", [[[1, 2, 3]], [[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [1, 1, 1], [3, 3, 3]], [[7, 7, 7]] * 9]
)
def test_one_two_collinear_and_equal_points(small, points):
    t = small().tokens([np.array(points, dtype=float)])
    assert t.valid.all() and t.shape[1] == len(np.unique(points, axis=0)) and t.x.isfinite().all()
    assert t.pos.isfinite().all()


def test_points_with_nan_are_dropped(small):
    points = RNG.normal(size=(40, 3))
    holes = np.insert(points, [0, 7, 20], np.nan, axis=0)
    assert torch.equal(small().tokens([holes]).x, small().tokens([points]).x)
    with pytest.raises(wt.InputError, match="feature is NaN"):
        small(features=1).read(np.c_[points, np.full(40, np.nan)])


def test_translation_and_scale_change_nothing_with_normalization(small):
    points = RNG.integers(-50, 50, (100, 3)).astype(float)
    front = small()
    ref = front.tokens([points])
    far = front.tokens([points * 4.0 + np.array([4_500_000.0, -300_000.0, 80.0])])
    assert (far.x - ref.x).abs().max() < 1e-4 and (far.pos - ref.pos).abs().max() < 1e-4
    assert (
        small(normalize="none").tokens([points * 2]).pos - small(normalize="none").tokens([points]).pos * 2
    ).abs().max() == 0
    centred = small(normalize="centre").tokens([points + 9.0]).pos
    assert (centred - small(normalize="centre").tokens([points]).pos).abs().max() < 1e-4


def test_pos_is_z_y_x_of_the_centre_in_token_units(small):
    # the corners of a box: mean 0, farthest at distance 1 after scaling
    points = CUBE * np.array([1.0, 2.0, 2.0])
    t = small(patches=16).tokens([points])
    assert t.pos.abs().amax((0, 1)).tolist() == pytest.approx([2 * 2 / 3, 2 * 2 / 3, 2 * 1 / 3])
    first = t.pos[0, 0] / torch.tensor([4 / 3, 4 / 3, 2 / 3])
    assert first.tolist() == pytest.approx([-1, -1, -1])  # all corners tie: the first one in sorted order


def test_half_precision_keeps_the_same_centres(small):
    """Coordinates are stored as bits: a model in bfloat16 groups the same points."""
    front = small()
    clouds = [RNG.normal(size=(120, 3)), RNG.normal(size=(30, 3))]
    ref = front.tokens(clouds)
    half = small().to(torch.bfloat16)
    got = half(half.collate([half.read(c) for c in clouds]).to(torch.bfloat16))
    assert torch.equal(got.pos, ref.pos) and got.x.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{"patches": 129}, {"patches": 0}, {"normalize": "cube"}, {"features": -1}, {"points": 2.5}]
)
def test_settings_out_of_range(small, options):
    with pytest.raises(wt.InputError, match=r"expected|patches"):
        small(**options)


def test_collate_raises_for_wrong_raw_clouds(small):
    front = small()
    for raws in ([], [torch.zeros(0, 3)], [torch.zeros(4, 4)], [torch.full((4, 3), torch.nan)], [np.zeros((4, 3))],
                 [torch.zeros(4, 3, dtype=torch.long)]):  # fmt: skip
        with pytest.raises(wt.InputError):
            front.collate(raws)
    with pytest.raises(wt.InputError, match=r"\(B, N, 3\)"):
        front(torch.zeros(2, 5, 4))


def test_the_contract(small, folder, tmp_path):
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


def test_it_learns_to_classify_spheres_and_boxes(small):
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
    assert right > 0.9  # chance: 0.5


@pytest.mark.skipif(not ASSETS, reason="WORLDTOKENS_ASSETS is not set to a folder of real data")
def test_real_furniture(small):
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
                mesh, reference = read_geometry(f), trimesh.load_mesh(io.BytesIO(f.getvalue()), file_type="obj", process=False,
                                                               skip_materials=True)  # fmt: skip
                area = trimesh.Trimesh(mesh.points, mesh.faces, process=False).area
                assert abs(area / reference.area - 1) < 1e-9, name
                f.seek(0)
                sources.append(front.read(f))
    assert len(sources) >= 16
    ref = front(front.collate(sources))
    mixed = [s[torch.randperm(len(s))] for s in sources]
    assert torch.equal(front(front.collate(mixed)).x, ref.x)
    check_tokenizer(front, [s.numpy() for s in sources[:6]], ordered=False)
