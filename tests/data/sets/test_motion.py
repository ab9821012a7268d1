"""Rendered motions: each shows its label, is deterministic, and objects are in one split."""

import pickle

import numpy as np
import pytest
from PIL import Image

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.data.sets import motion

ROWS = motion.open_motion(objects="emoji")


def bar() -> Image.Image:
    """A white bar with a red end on the right."""
    image = Image.new("RGBA", (64, 64))
    image.paste((255, 255, 255, 255), (10, 28, 54, 36))
    image.paste((255, 0, 0, 255), (46, 24, 58, 40))
    return image


def traces(name: str, keys=range(12)):
    """For videos of one motion: positions of the bar's centre and red end in each frame, and its area."""
    for key in keys:
        video = motion.render(bar(), name, f"k{key}", frames=16, size=64).astype(int)
        red = (video[..., 0] - video[..., 1:].max(-1)).clip(0)
        red = np.where(red > 120, red, 0)
        bright = np.where(video.min(-1) > 250, 1.0, 0.0) + (red > 0)
        x, y = np.meshgrid(np.arange(64), np.arange(64))
        mass = bright.sum((1, 2)).clip(min=1)
        middle = np.stack([(bright * a).sum((1, 2)) / mass for a in (x, y)], 1)
        end = np.stack([(red * a).sum((1, 2)) / red.sum((1, 2)).clip(min=1) for a in (x, y)], 1)
        yield middle, end, mass


@pytest.mark.parametrize(("name", "axis", "sign"), [
    ("slide left", 0, -1), ("slide right", 0, 1), ("slide up", 1, -1), ("slide down", 1, 1),
])  # fmt: skip
def test_slides_have_their_direction(name, axis, sign):
    for middle, _, _ in traces(name):
        shift = middle[12] - middle[3]
        assert shift[axis] * sign > 8 and abs(shift[1 - axis]) < 6


@pytest.mark.parametrize(("name", "sign"), [("turn left", 1), ("turn right", -1)])
def test_turning_left_is_counterclockwise(name, sign):
    for middle, end, _ in traces(name):
        arm = end - middle
        angle = np.unwrap(np.arctan2(-arm[:, 1], arm[:, 0]))  # rows count downward
        assert 60 < np.degrees(angle[-1] - angle[0]) * sign < 220


@pytest.mark.parametrize(("name", "sign"), [("grow", 1), ("shrink", -1), ("rest", 0)])
def test_growing_shrinking_and_rest(name, sign):
    for middle, end, mass in traces(name):
        change = np.log(mass[11] / mass[4])
        assert change * sign > 0.25 if sign else abs(change) < 0.15
        if not sign:
            assert np.abs(middle[-1] - middle[0]).max() < 6 and np.abs(end[-1] - end[0]).max() < 7


def test_a_swing_changes_direction():
    for middle, end, _ in traces("swing"):
        arm = end - middle
        angle = np.degrees(np.unwrap(np.arctan2(-arm[:, 1], arm[:, 0])))
        steps = np.sign(np.diff(angle)[np.abs(np.diff(angle)) > 1])
        assert np.ptp(angle) > 20 and {1.0, -1.0} <= set(steps)


def test_a_video_is_deterministic_and_can_be_pickled():
    row = ROWS[1234]
    assert row["video"].shape == (16, 32, 32, 3) and row["video"].dtype == np.uint8
    again = pickle.loads(pickle.dumps(ROWS))[1234]
    assert np.array_equal(row["video"], again["video"])
    assert not np.array_equal(row["video"], ROWS[1235]["video"])
    motion._sprite.cache_clear()
    assert np.array_equal(row["video"], ROWS[1234]["video"])
    raw = wt.VideoTokenizer(8, tubelet=(4, 8, 8), size=32, positions="none").read(row["video"])
    assert np.array_equal(raw.permute(0, 2, 3, 1).numpy(), row["video"])


def test_an_object_is_in_one_split_with_all_its_motions():
    assert len(ROWS) == 10 * len(set(ROWS.column("object"))) == len(set(ROWS.column("id")))
    splits = [set(motion.open_motion(s, "emoji").column("object")) for s in ("train", "validation", "test")]
    assert len(set.union(*splits)) == sum(map(len, splits)) == 1911
    few = motion.open_motion("test", "emoji", takes=2, frames=5, size=24)
    assert len(few) == 20 * len(splits[2]) and few[0]["video"].shape == (5, 24, 24, 3)
    assert not np.array_equal(few[0]["video"], few[1]["video"])


def test_wrong_arguments_raise():
    for wrong in ({"objects": "cats"}, {"takes": 0}, {"frames": 1}, {"size": 4}):
        with pytest.raises(wt.InputError, match="motion: found"):
            motion.open_motion(**{"objects": "emoji", **wrong})
    with pytest.raises(wt.InputError, match="jump"):
        motion.render(bar(), "jump", "k")
    assert "motion" in samples.SETS
