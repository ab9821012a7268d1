"""The confusion figure: its pixels and its errors."""

import numpy as np
import pytest
import torch
from PIL import Image

import worldtokens as wt
from worldtokens.figures.confusion import confusion_figure


def test_the_confusion_figure_is_dark_where_predictions_are_correct(tmp_path):
    matrix = torch.tensor([[9, 1], [0, 4]])
    path = confusion_figure(matrix, ["yes", "no"], tmp_path / "new" / "confusion.png", "trial")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0] > 60).mean()
    assert 0.1 < blue < 0.6
    swapped = confusion_figure(matrix.flip(1), None, tmp_path / "b.png")
    assert path.read_bytes() != swapped.read_bytes()
    with pytest.raises(wt.InputError, match="3 names"):
        confusion_figure(matrix, ["a", "b", "c"], tmp_path / "c.png")
    with pytest.raises(wt.InputError, match=r"\(2, 3\)"):
        confusion_figure(torch.zeros(2, 3), None, tmp_path / "c.png")
