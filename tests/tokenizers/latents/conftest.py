"""Random triplanes, a small front-end, and sources that are no triplane."""

import numpy as np
import pytest
import torch

import worldtokens as wt

RNG = np.random.default_rng(0)


@pytest.fixture(scope="session")
def planes():
    """A function that gives random planes (3, C, H, W)."""

    def make(h: int = 4, w: int = 6, c: int = 2) -> torch.Tensor:
        return torch.from_numpy(RNG.normal(size=(3, c, h, w))).float()

    return make


@pytest.fixture(scope="session")
def small():
    """A function that builds a small `LatentTokenizer`, always with the same weights."""

    def build(**options) -> wt.LatentTokenizer:
        torch.manual_seed(0)
        return wt.LatentTokenizer(**({"dim": 16, "channels": 2, "heads": 2} | options)).eval()

    return build


@pytest.fixture
def bad_sources(tmp_path, planes) -> list:
    (tmp_path / "text.npy").write_text("planes")
    (tmp_path / "cut.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2,"
    )
    np.savez(tmp_path / "two.npz", a=np.zeros((3, 2, 4, 4)), b=np.zeros(3))
    return [tmp_path / "text.npy", tmp_path / "cut.npy", tmp_path / "two.npz", tmp_path / "none.npz", b"", 5, None,
            planes(c=3), planes()[:2], planes()[0], planes(0, 4), torch.full((3, 2, 4, 4), torch.nan),
            torch.zeros(3, 2, 4, 4, dtype=torch.complex64), np.array([["a"]])]  # fmt: skip
