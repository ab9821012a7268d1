"""Latents: triplanes with places on their axes, and any front-end read into a fixed number of tokens."""

import io

import numpy as np
import pytest
import torch

import worldtokens as wt
from worldtokens.testing import check_tokenizer

RNG = np.random.default_rng(0)


def planes(h: int = 4, w: int = 6, c: int = 2) -> torch.Tensor:
    return torch.from_numpy(RNG.normal(size=(3, c, h, w))).float()


def small(**options) -> wt.LatentTokenizer:
    torch.manual_seed(0)
    return wt.LatentTokenizer(**({"dim": 16, "channels": 2, "heads": 2} | options)).eval()


def test_places_run_along_each_plane_s_axes():
    t = small(patch=2).tokens([planes()])
    assert t.shape == (1, 18, 16)
    assert t.pos[0, :3].tolist() == [[-1, 0, 0], [-1, 0, 1], [-1, 0, 2]]  # y, x
    assert t.pos[0, 9:12].tolist() == [[1, -1, 0], [1, -1, 1], [1, -1, 2]]  # z, x: second row
    assert t.pos[0, 12:15].tolist() == [[0, 0, -1], [0, 1, -1], [0, 2, -1]]  # z, y
    assert len(t.pos[0].unique(dim=0)) == 18


def test_a_token_is_its_cell_its_place_and_its_plane():
    front, x = small(), planes()
    t = front.tokens([x]).x[0].view(3, 4, 6, 16)
    a = front.front.proj(x[1, :, 2, 3]) - front.front.proj(x[1, :, 2, 4])
    other = x.clone()
    other[1, :, 2, 3] = x[1, :, 2, 4]
    moved = front.tokens([other]).x[0].view(3, 4, 6, 16)
    assert (t[1, 2, 3] - moved[1, 2, 3] - a).abs().max() < 1e-5  # linear in the cell
    same = torch.ones(3, 4, 6, dtype=torch.bool)
    same[1, 2, 3] = False
    assert torch.equal(t[same], moved[same])  # and in nothing else
    flat = front.tokens([torch.zeros(3, 2, 4, 6)]).x[0]
    assert len(flat.round(decimals=4).unique(dim=0)) == 72  # equal cells differ by place and plane


def test_files_hold_what_tensors_do(tmp_path):
    x = planes()
    np.save(tmp_path / "a.npy", x.numpy())
    np.savez(tmp_path / "b.npz", planes=x.numpy(), other=np.zeros(3))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x.numpy())
    for source in (tmp_path / "a.npy", str(tmp_path / "b.npz"), buffer.getvalue(), x.numpy(), x.double()):
        assert torch.equal(small().read(source), x)


def bad_sources(tmp_path) -> list:
    (tmp_path / "text.npy").write_text("planes")
    (tmp_path / "cut.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2,"
    )
    np.savez(tmp_path / "two.npz", a=np.zeros((3, 2, 4, 4)), b=np.zeros(3))
    return [tmp_path / "text.npy", tmp_path / "cut.npy", tmp_path / "two.npz", tmp_path / "none.npz", b"", 5, None,
            planes(c=3), planes()[:2], planes()[0], planes(0, 4), torch.full((3, 2, 4, 4), torch.nan),
            torch.zeros(3, 2, 4, 4, dtype=torch.complex64), np.array([["a"]])]  # fmt: skip


def test_what_is_wrong_is_refused(tmp_path):
    for source in bad_sources(tmp_path):
        with pytest.raises(wt.InputError):
            small().read(source)
    with pytest.raises(wt.InputError, match="multiples of the patch"):
        small(patch=4).read(planes())


def test_the_contract_with_planes_as_they_are(tmp_path):
    check_tokenizer(small(), [planes(), planes(2, 2), planes(5, 3)], bad=bad_sources(tmp_path))


def test_the_contract_with_planes_read_into_latents(tmp_path):
    front = small(latents=5)
    check_tokenizer(front, [planes(), planes(2, 2), planes(5, 3)], bad=bad_sources(tmp_path))
    assert front.tokens([planes(), planes(2, 2)]).valid.all()


def test_the_contract_with_another_front_end():
    torch.manual_seed(0)
    cloud = wt.PointTokenizer(24, points=64, patches=16, neighbours=8, hidden=(16, 16, 16))
    front = wt.LatentTokenizer(16, tokenizer=cloud, latents=4, heads=2)
    clouds = [RNG.normal(size=(n, 3)) for n in (64, 5, 40, 1)]
    check_tokenizer(front, clouds, bad=[b"", np.zeros((0, 3))])
    t = front.tokens(clouds)
    assert t.shape == (4, 4, 16) and t.valid.all()
    # what the latents read is the cloud's tokens
    assert torch.equal(t.x, front.resampler(cloud.tokens(clouds)).x)
    mixed = [c[RNG.permutation(len(c))] for c in clouds]
    assert torch.equal(front.tokens(mixed).x, t.x)


@pytest.mark.parametrize("options", [{}, {"channels": 2, "tokenizer": wt.PointTokenizer(16), "latents": 4},
                                     {"tokenizer": wt.PointTokenizer(16)}, {"channels": 0}, {"channels": 2, "latents": 0},
                                     {"channels": 2, "latents": 4, "heads": 5}, {"channels": 2, "dim": 4}])  # fmt: skip
def test_settings_out_of_range(options):
    with pytest.raises(wt.InputError):
        wt.LatentTokenizer(**({"dim": 16} | options))
