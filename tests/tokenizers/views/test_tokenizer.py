"""Views: cameras, Pluecker rays worked out by hand, scenes from dicts and files, and the contract."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from PIL import Image

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.views.tokenizer import pluecker

RNG = np.random.default_rng(0)


def small(**options) -> wt.ViewTokenizer:
    torch.manual_seed(0)
    return wt.ViewTokenizer(**({"dim": 16, "patch": 4, "size": (8, 12)} | options)).eval()


def turn(axis: str, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    m = np.eye(4)
    m[i, i], m[i, j], m[j, i], m[j, j] = c, -s, s, c
    return m


def pose(x: float, y: float, z: float, *turns: tuple[str, float]) -> np.ndarray:
    m = np.eye(4)
    for axis, angle in turns:
        m = m @ turn(axis, angle)
    m[:3, 3] = x, y, z
    return m


def picture(h: int = 8, w: int = 12) -> np.ndarray:
    return RNG.integers(0, 256, (h, w, 3), dtype=np.uint8)


K = np.array([[10.0, 0, 6], [0, 10.0, 4], [0, 0, 1]])
POSES = [pose(0, 0, -3), pose(3, 0, 0, ("y", -1.5)), pose(1, -2, 0, ("x", 0.4), ("z", 0.3))]


def scene(v: int = 3, h: int = 8, w: int = 12) -> dict:
    return {"images": [picture(h, w) for _ in range(v)], "intrinsics": K, "extrinsics": np.stack(POSES[:v])}


def camera(fx=10.0, fy=10.0, cx=6.0, cy=4.0, matrix=None) -> torch.Tensor:
    matrix = np.eye(4) if matrix is None else matrix
    return torch.tensor(np.r_[fx, fy, cx, cy, matrix[:3].reshape(-1)], dtype=torch.float32)[None]


# ---- rays ------------------------------------------------------------------------------------------------------


def test_rays_worked_out_by_hand():
    # a camera at (0, 0, -3) that looks along z; pixel (row 1, column 2) has its centre at (2.5, 1.5)
    rays = pluecker(camera(matrix=pose(0, 0, -3)), (8, 12))[0, :, 1, 2]
    d = np.array([(2.5 - 6) / 10, (1.5 - 4) / 10, 1.0])
    d /= np.linalg.norm(d)
    moment = np.array([3 * d[1], -3 * d[0], 0.0])  # (0, 0, -3) x (a, b, c) = (3 b, -3 a, 0)
    assert rays[:3].numpy() == pytest.approx(d, abs=1e-6) and rays[3:].numpy() == pytest.approx(
        moment, abs=1e-6
    )


def test_the_axes_are_opencv_s():
    rays = pluecker(camera(cx=6.5, cy=4.5), (8, 12))[0]
    assert rays[:3, 4, 6].tolist() == pytest.approx([0, 0, 1])  # the middle looks forward, along z
    assert rays[0, 4, 7] > 0 and rays[1, 5, 6] > 0  # the next column is to the right, the next row below
    # turned to the left about y by a quarter, the middle looks along -x
    left = pluecker(camera(cx=6.5, cy=4.5, matrix=turn("y", -math.pi / 2)), (8, 12))[0]
    assert left[:3, 4, 6].tolist() == pytest.approx([-1, 0, 0], abs=1e-6)


def test_directions_are_units_and_moments_stand_on_them():
    rays = pluecker(torch.cat([camera(matrix=m) for m in POSES]), (8, 12))
    d, m = rays.split(3, 1)
    assert (d.norm(dim=1) - 1).abs().max() < 1e-6 and (d * m).sum(1).abs().max() < 1e-5


def test_a_ray_is_the_same_line_wherever_it_begins():
    """Sliding the camera along one pixel's ray leaves that pixel's six numbers, and moves the others'."""
    matrix = pose(1, 2, -3, ("y", 0.3), ("x", -0.2))
    ref = pluecker(camera(matrix=matrix), (8, 12))[0]
    for way in (-2.0, 0.5, 4.0):
        slid = matrix.copy()
        slid[:3, 3] += way * ref[:3, 3, 5].double().numpy()
        got = pluecker(camera(matrix=slid), (8, 12))[0]
        assert (got[:, 3, 5] - ref[:, 3, 5]).abs().max() < 1e-5
        assert (got[3:, 0, 0] - ref[3:, 0, 0]).abs().max() > 1e-2


def test_two_views_of_one_point_meet_there():
    point = np.array([0.4, -0.3, 2.0])
    for matrix in [*POSES[:1], pose(1, 0, 0, ("y", -0.3))]:
        local = np.linalg.inv(matrix) @ np.r_[point, 1]
        # an image of one pixel whose centre (0.5, 0.5) sees the point
        cx, cy = 0.5 - 10 * local[0] / local[2], 0.5 - 10 * local[1] / local[2]
        ray = pluecker(camera(cx=cx, cy=cy, matrix=matrix), (1, 1))[0, :, 0, 0].double().numpy()
        # a point p lies on the line when p x d is its moment
        assert np.cross(point, ray[:3]) == pytest.approx(ray[3:], abs=1e-5)


# ---- reading ---------------------------------------------------------------------------------------------------


def test_a_raw_scene_holds_its_pictures_and_cameras():
    front, given = small(frame="world"), scene()
    raw = front.read(given)
    assert raw.dtype == torch.uint8 and raw.shape == (3, 3 * 8 * 12 + 64)
    assert np.array_equal(front.pictures(raw).permute(0, 2, 3, 1).numpy(), np.stack(given["images"]))
    cameras = front.cameras(raw)
    assert cameras[:, :4].tolist() == [[10, 10, 6, 4]] * 3
    assert cameras[:, 4:].view(3, 3, 4).numpy() == pytest.approx(given["extrinsics"][:, :3], abs=1e-6)


def test_intrinsics_follow_scaling_and_cutting():
    """Twice as large and with margins cut off left and right, an image's middle keeps its rays."""
    front, k = small(frame="world"), np.array([[20.0, 0, 16], [0, 20.0, 8], [0, 0, 1]])
    raw = front.read({"images": [picture(16, 32)], "intrinsics": k, "extrinsics": POSES[:1]})
    # 16 x 32 -> the middle 16 x 24 -> 8 x 12
    assert front.cameras(raw)[0, :4].tolist() == [10, 10, 6, 4]


def test_moving_the_scene_changes_nothing_in_the_first_view_s_frame():
    given, move = scene(), pose(5, -1, 2, ("y", 1.1), ("x", 0.3))
    moved = given | {"extrinsics": move @ given["extrinsics"]}
    front = small()
    assert (front.tokens([given]).x - front.tokens([moved]).x).abs().max() < 1e-5
    world = small(frame="world")
    assert (world.tokens([given]).x - world.tokens([moved]).x).abs().max() > 1e-2
    first = front.cameras(front.read(given))[0, 4:].view(3, 4)
    assert first.numpy() == pytest.approx(np.eye(4)[:3], abs=1e-6)


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        Image.fromarray(picture()).save(tmp_path / f"{i}.png")
    return tmp_path


def test_cameras_json_equals_the_dict(folder):
    facts = {
        "images": [f"{i}.png" for i in range(3)],
        "intrinsics": K.tolist(),
        "extrinsics": np.stack(POSES).tolist(),
    }
    (folder / "cameras.json").write_text(json.dumps(facts))
    given = facts | {"images": [folder / n for n in facts["images"]]}
    for source in (folder, str(folder / "cameras.json")):
        assert torch.equal(small().read(source), small().read(given))


def test_nerf_s_transforms_json(folder):
    """OpenGL axes are turned, the angle gives the focal length, the ending may be left out, sizes may differ."""
    flip = np.diag([1.0, -1, -1, 1])
    frames = [{"file_path": f"./{i}", "transform_matrix": (m @ flip).tolist()} for i, m in enumerate(POSES)]
    angle = 2 * math.atan(12 / 2 / 10)
    facts = {
        "images": [folder / f"{i}.png" for i in range(3)],
        "intrinsics": K,
        "extrinsics": np.stack(POSES),
    }
    ref = small(frame="world").read(facts)
    for camera in (
        {"camera_angle_x": angle},
        {"fl_x": 100, "fl_y": 100, "cx": 60, "cy": 40, "w": 120, "h": 80, "k1": 0},
    ):
        (folder / "transforms.json").write_text(json.dumps({"frames": frames} | camera))
        got = small(frame="world").read(folder)
        assert torch.equal(got[:, :-64], ref[:, :-64])
        assert (small().cameras(got) - small().cameras(ref)).abs().max() < 1e-5


def test_views_are_taken_evenly():
    front = small(views=2, frame="world")
    given = scene()
    raw = front.read(given)
    assert np.array_equal(front.pictures(raw).permute(0, 2, 3, 1).numpy(), np.stack(given["images"])[[0, 2]])


def broken(folder) -> list:
    """Scenes that must be refused; each is one change of a right one."""
    good = scene()
    mirrored = good["extrinsics"] * np.array([-1.0, 1, 1, 1])
    out = [good | change for change in (
        {"images": []}, {"images": "a.png"}, {"images": [picture()]}, {"images": ["none.png"] * 3},
        {"intrinsics": np.eye(4)}, {"intrinsics": K * np.nan}, {"intrinsics": K * [[-1], [1], [1]]},
        {"intrinsics": K + np.array([[0, 3, 0], [0, 0, 0], [0, 0, 0]])}, {"intrinsics": "wide"},
        {"extrinsics": mirrored}, {"extrinsics": good["extrinsics"] * 2}, {"extrinsics": good["extrinsics"][:2]},
        {"extrinsics": good["extrinsics"] + 1e30}, {"extrinsics": None}, {"extrinsics": [[1, 2], [3]]})]  # fmt: skip
    out += [{"images": []}, 5, None, b"", folder / "nothing", folder]
    frame = {"file_path": "0.png", "transform_matrix": np.eye(4).tolist()}
    facts = {"camera_angle_x": 1.0, "frames": [frame]}
    for i, text in enumerate((
        "", "{", "[1]", "[" * 100_000, '{"frames": 3}', '{"frames": []}', '{"frames": [1]}',
        json.dumps(facts | {"camera_angle_x": 0}), json.dumps(facts | {"camera_angle_x": [1, 2]}),
        json.dumps(facts | {"camera_angle_x": None}), json.dumps(facts | {"k1": 0.1}),
        json.dumps(facts | {"w": 10, "h": 100}), json.dumps(facts | {"w": 0, "h": 0}),
        json.dumps(facts | {"fl_x": -5}), json.dumps(facts | {"fl_x": 10**400}),
        json.dumps(facts | {"frames": [frame | {"file_path": "../../etc/passwd"}]}),
        json.dumps(facts | {"frames": [frame | {"file_path": "/etc/passwd"}]}),
        json.dumps(facts | {"frames": [frame | {"file_path": "a\0b"}]}),
        json.dumps(facts | {"frames": [frame | {"file_path": "x" * 5000}]}),
        json.dumps(facts | {"frames": [frame | {"file_path": 7}]}),
        json.dumps(facts | {"frames": [{"file_path": "0.png"}]}),
        json.dumps(facts | {"frames": [frame | {"transform_matrix": [[1]]}]}),
        json.dumps(facts | {"frames": [frame | {"transform_matrix": np.zeros((4, 4)).tolist()}]}),
        json.dumps({"images": [1], "intrinsics": K.tolist(), "extrinsics": [np.eye(4).tolist()]}),
    )):  # fmt: skip
        (folder / f"bad{i}.json").write_text(text)
        out.append(folder / f"bad{i}.json")
    return out


def test_what_is_wrong_is_refused(folder):
    for source in broken(folder):
        with pytest.raises(wt.InputError) as e:
            small().read(source)
            pytest.fail(
                f"{source} was accepted: {source.read_text()[:200] if hasattr(source, 'read_text') else ''}"
            )
        if hasattr(source, "name"):
            assert source.name in str(e.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@drawn(data=st.data())
def test_damaged_camera_files_give_a_scene_or_an_input_error(folder, data):
    frames = [{"file_path": f"{i}.png", "transform_matrix": m.tolist()} for i, m in enumerate(POSES)]
    text = bytearray(json.dumps({"camera_angle_x": 1.1, "w": 12, "h": 8, "frames": frames}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(
            st.sampled_from(list(b'"[]{}:,.-e0195tnu \0\xff'))
        )
    (folder / "transforms.json").write_bytes(bytes(text))
    try:
        tokens = small().tokens([folder])
    except wt.InputError:
        return
    assert tokens.x.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"size": 230, "patch": 16}, {"views": 0}, {"frame": "last"}, {"std": (0, 1, 1)}]
)
def test_settings_out_of_range(options):
    with pytest.raises(wt.InputError):
        small(**options)


# ---- tokens ----------------------------------------------------------------------------------------------------


def test_positions_are_view_row_column_and_short_scenes_are_padded():
    t = small().tokens([scene(3), scene(1)])
    assert t.shape == (2, 18, 16) and t.valid.sum(1).tolist() == [18, 6]
    assert t.pos[0, :7].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [1, 0, 0],
    ]
    assert t.x.isfinite().all()


def test_a_token_is_its_patch_and_its_rays():
    front, given = small(frame="world"), scene(2)
    t = front.tokens([given])
    y, x = 1, 2  # the second view's last patch
    pixels = (
        torch.from_numpy(given["images"][1][4 * y : 4 * y + 4, 4 * x : 4 * x + 4]).permute(2, 0, 1).float()
    )
    rays = pluecker(camera(matrix=POSES[1]), (8, 12))[0, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
    want = front.proj(((pixels / 255 - 0.5) / 0.5).flatten()) + front.ray_proj(rays.flatten())
    assert (t.x[0, 6 + 3 * y + x] - want).abs().max() < 1e-5


def test_cameras_are_whole_at_half_precision():
    front = small().to(torch.bfloat16)
    batch = front.collate([front.read(scene())])
    assert torch.equal(front.cameras(batch.to(torch.bfloat16)["raw"]), front.cameras(batch["raw"]))


def test_the_contract(folder):
    check_tokenizer(small(), [scene(3), scene(1), scene(2), scene(3, 20, 31)], bad=broken(folder))
    with pytest.raises(wt.InputError, match="scene 0"):
        small().collate([torch.zeros(3, 8, 12)])
