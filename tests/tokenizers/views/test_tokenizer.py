"""Views to tokens: crops, frames, positions, a token by hand, and the contract."""

import pytest
import torch

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.views.rays import pluecker_rays


def test_positions_are_view_row_column_and_scenes_with_fewer_views_are_padded(scene, front_end):
    t = front_end().tokens([scene(3), scene(1)])
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


def test_a_token_is_the_sum_of_its_patch_and_its_rays(poses, camera, scene, front_end):
    front, given = front_end(frame="world"), scene(2)
    t = front.tokens([given])
    y, x = 1, 2  # the second view's last patch
    pixels = (
        torch.from_numpy(given["images"][1][4 * y : 4 * y + 4, 4 * x : 4 * x + 4]).permute(2, 0, 1).float()
    )
    rays = pluecker_rays(camera(matrix=poses[1]), (8, 12))[0, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
    want = front.proj(((pixels / 255 - 0.5) / 0.5).flatten()) + front.ray_proj(rays.flatten())
    assert (t.x[0, 6 + 3 * y + x] - want).abs().max() < 1e-5


def test_cameras_are_not_rounded_in_half_precision(scene, front_end):
    front = front_end().to(torch.bfloat16)
    batch = front.collate([front.read(scene())])
    assert torch.equal(front.cameras(batch.to(torch.bfloat16)["raw"]), front.cameras(batch["raw"]))


def test_the_contract(folder, scene, front_end, broken):
    check_tokenizer(front_end(), [scene(3), scene(1), scene(2), scene(3, 20, 31)], bad=broken)
    with pytest.raises(wt.InputError, match="scene 0"):
        front_end().collate([torch.zeros(3, 8, 12)])


@pytest.mark.parametrize(
    "options", [{"size": 230, "patch": 16}, {"views": 0}, {"frame": "last"}, {"std": (0, 1, 1)}]
)
def test_settings_out_of_range_raise(options, front_end):
    with pytest.raises(wt.InputError):
        front_end(**options)
