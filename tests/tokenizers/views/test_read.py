"""Scenes from dicts and files: conventions, NeRF's format, invalid and corrupted files."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

import worldtokens as wt


def test_a_raw_scene_holds_its_images_and_cameras(scene, front_end):
    front, given = front_end(frame="world"), scene()
    raw = front.read(given)
    assert raw.dtype == torch.uint8 and raw.shape == (3, 3 * 8 * 12 + 64)
    assert np.array_equal(front.images(raw).permute(0, 2, 3, 1).numpy(), np.stack(given["images"]))
    cameras = front.cameras(raw)
    assert cameras[:, :4].tolist() == [[10, 10, 6, 4]] * 3
    assert cameras[:, 4:].view(3, 3, 4).numpy() == pytest.approx(given["extrinsics"][:, :3], abs=1e-6)


def test_intrinsics_follow_resize_and_crop(poses, image, front_end):
    """The centre of an image of twice the size, cropped left and right, keeps its rays."""
    front, k = front_end(frame="world"), np.array([[20.0, 0, 16], [0, 20.0, 8], [0, 0, 1]])
    raw = front.read({"images": [image(16, 32)], "intrinsics": k, "extrinsics": poses[:1]})
    # 16 x 32 -> centre crop 16 x 24 -> 8 x 12
    assert front.cameras(raw)[0, :4].tolist() == [10, 10, 6, 4]


def test_a_rigid_motion_changes_nothing_in_the_frame_of_the_first_view(scene, pose, front_end):
    given, move = scene(), pose(5, -1, 2, ("y", 1.1), ("x", 0.3))
    moved = given | {"extrinsics": move @ given["extrinsics"]}
    front = front_end()
    assert (front.tokens([given]).x - front.tokens([moved]).x).abs().max() < 1e-5
    world = front_end(frame="world")
    assert (world.tokens([given]).x - world.tokens([moved]).x).abs().max() > 1e-2
    first = front.cameras(front.read(given))[0, 4:].view(3, 4)
    assert first.numpy() == pytest.approx(np.eye(4)[:3], abs=1e-6)


def test_cameras_json_equals_the_dict(folder, poses, intrinsics, front_end):
    facts = {
        "images": [f"{i}.png" for i in range(3)],
        "intrinsics": intrinsics.tolist(),
        "extrinsics": np.stack(poses).tolist(),
    }
    (folder / "cameras.json").write_text(json.dumps(facts))
    given = facts | {"images": [folder / n for n in facts["images"]]}
    for source in (folder, str(folder / "cameras.json")):
        assert torch.equal(front_end().read(source), front_end().read(given))


def test_transforms_json_of_nerf(folder, poses, intrinsics, front_end):
    """OpenGL axes are converted, the angle of view gives the focal length, the suffix may be missing, sizes may differ."""
    flip = np.diag([1.0, -1, -1, 1])
    frames = [{"file_path": f"./{i}", "transform_matrix": (m @ flip).tolist()} for i, m in enumerate(poses)]
    angle = 2 * math.atan(12 / 2 / 10)
    facts = {
        "images": [folder / f"{i}.png" for i in range(3)],
        "intrinsics": intrinsics,
        "extrinsics": np.stack(poses),
    }
    ref = front_end(frame="world").read(facts)
    for camera in (
        {"camera_angle_x": angle},
        {"fl_x": 100, "fl_y": 100, "cx": 60, "cy": 40, "w": 120, "h": 80, "k1": 0},
    ):
        (folder / "transforms.json").write_text(json.dumps({"frames": frames} | camera))
        got = front_end(frame="world").read(folder)
        assert torch.equal(got[:, :-64], ref[:, :-64])
        assert (front_end().cameras(got) - front_end().cameras(ref)).abs().max() < 1e-5


def test_views_are_evenly_spaced(scene, front_end):
    front = front_end(views=2, frame="world")
    given = scene()
    raw = front.read(given)
    assert np.array_equal(front.images(raw).permute(0, 2, 3, 1).numpy(), np.stack(given["images"])[[0, 2]])


def test_invalid_scenes_raise_and_name_the_file(folder, front_end, broken):
    for source in broken:
        with pytest.raises(wt.InputError) as e:
            front_end().read(source)
            pytest.fail(
                f"{source} was accepted: {source.read_text()[:200] if hasattr(source, 'read_text') else ''}"
            )
        if hasattr(source, "name"):
            assert source.name in str(e.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@drawn(data=st.data())
def test_corrupted_camera_files_give_a_scene_or_an_input_error(folder, data, poses, front_end):
    frames = [{"file_path": f"{i}.png", "transform_matrix": m.tolist()} for i, m in enumerate(poses)]
    text = bytearray(json.dumps({"camera_angle_x": 1.1, "w": 12, "h": 8, "frames": frames}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(
            st.sampled_from(list(b'"[]{}:,.-e0195tnu \0\xff'))
        )
    (folder / "transforms.json").write_bytes(bytes(text))
    try:
        tokens = front_end().tokens([folder])
    except wt.InputError:
        return
    assert tokens.x.isfinite().all()
