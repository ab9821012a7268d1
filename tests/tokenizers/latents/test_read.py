"""Reading of triplanes: files equal arrays, and wrong sources raise."""

import io

import numpy as np
import pytest
import torch

import worldtokens as wt


def test_files_equal_tensors(small, planes, tmp_path):
    x = planes()
    np.save(tmp_path / "a.npy", x.numpy())
    np.savez(tmp_path / "b.npz", planes=x.numpy(), other=np.zeros(3))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x.numpy())
    for source in (tmp_path / "a.npy", str(tmp_path / "b.npz"), buffer.getvalue(), x.numpy(), x.double()):
        assert torch.equal(small().read(source), x)


def test_wrong_sources_raise(small, planes, bad_sources):
    for source in bad_sources:
        with pytest.raises(wt.InputError):
            small().read(source)
    with pytest.raises(wt.InputError, match="multiples of the patch"):
        small(patch=4).read(planes())
