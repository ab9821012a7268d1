"""The identity of a model."""

import pytest
import torch

from worldtokens.apps.index.fingerprint import model_identity
from worldtokens.parts import load

pytest.importorskip("lancedb")


def test_identity_depends_on_weights_and_config_and_survives_saving(model, tmp_path, colours):
    other = colours()
    assert model_identity(other) == model_identity(model)
    assert model_identity(load(other.save(tmp_path / "m"))) == model_identity(model)
    with torch.no_grad():
        other.anchors[0, 0] += 1
    assert model_identity(other) != model_identity(model)
    assert model_identity(colours(sharpness=0.002)) != model_identity(model)
