"""`LatentTokenizer`: positions of triplane patches, resampling to latents, and the tokenizer contract."""

import numpy as np
import pytest
import torch

import worldtokens as wt
from worldtokens.testing import check_tokenizer

RNG = np.random.default_rng(0)


def test_positions_follow_the_axes_of_each_plane(small, planes):
    t = small(patch=2).tokens([planes()])
    assert t.shape == (1, 18, 16)
    assert t.pos[0, :3].tolist() == [[-1, 0, 0], [-1, 0, 1], [-1, 0, 2]]  # y, x
    assert t.pos[0, 9:12].tolist() == [[1, -1, 0], [1, -1, 1], [1, -1, 2]]  # z, x: second row
    assert t.pos[0, 12:15].tolist() == [[0, 0, -1], [0, 1, -1], [0, 2, -1]]  # z, y
    assert len(t.pos[0].unique(dim=0)) == 18


def test_a_token_embeds_its_cell_its_position_and_its_plane(small, planes):
    front, x = small(), planes()
    t = front.tokens([x]).x[0].view(3, 4, 6, 16)
    a = front.base.proj(x[1, :, 2, 3]) - front.base.proj(x[1, :, 2, 4])
    other = x.clone()
    other[1, :, 2, 3] = x[1, :, 2, 4]
    moved = front.tokens([other]).x[0].view(3, 4, 6, 16)
    assert (t[1, 2, 3] - moved[1, 2, 3] - a).abs().max() < 1e-5  # linear in the cell
    same = torch.ones(3, 4, 6, dtype=torch.bool)
    same[1, 2, 3] = False
    assert torch.equal(t[same], moved[same])  # and independent of all others
    flat = front.tokens([torch.zeros(3, 2, 4, 6)]).x[0]
    assert len(flat.round(decimals=4).unique(dim=0)) == 72  # equal cells differ by position and plane


def test_the_contract_without_resampling(small, planes, bad_sources):
    check_tokenizer(small(), [planes(), planes(2, 2), planes(5, 3)], bad=bad_sources)


def test_the_contract_with_latents(small, planes, bad_sources):
    front = small(latents=5)
    check_tokenizer(front, [planes(), planes(2, 2), planes(5, 3)], bad=bad_sources)
    assert front.tokens([planes(), planes(2, 2)]).valid.all()


def test_the_contract_with_another_front_end():
    torch.manual_seed(0)
    cloud = wt.PointTokenizer(24, points=64, patches=16, neighbours=8, hidden=(16, 16, 16))
    front = wt.LatentTokenizer(16, tokenizer=cloud, latents=4, heads=2)
    clouds = [RNG.normal(size=(n, 3)) for n in (64, 5, 40, 1)]
    check_tokenizer(front, clouds, bad=[b"", np.zeros((0, 3))])
    t = front.tokens(clouds)
    assert t.shape == (4, 4, 16) and t.valid.all()
    # the latents attend to the point cloud's tokens
    assert torch.equal(t.x, front.resampler(cloud.tokens(clouds)).x)
    mixed = [c[RNG.permutation(len(c))] for c in clouds]
    assert torch.equal(front.tokens(mixed).x, t.x)


@pytest.mark.parametrize("options", [{}, {"channels": 2, "tokenizer": wt.PointTokenizer(16), "latents": 4},
                                     {"tokenizer": wt.PointTokenizer(16)}, {"channels": 0}, {"channels": 2, "latents": 0},
                                     {"channels": 2, "latents": 4, "heads": 5}, {"channels": 2, "dim": 4}])  # fmt: skip
def test_settings_out_of_range(options):
    with pytest.raises(wt.InputError):
        wt.LatentTokenizer(**({"dim": 16} | options))
