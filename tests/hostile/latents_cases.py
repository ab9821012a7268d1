"""Hostile triplanes."""

from __future__ import annotations

import numpy as np
from cases import case, truncated
from points_cases import npy, npz

planes = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
L = "latents"  # 2 channels, patches of 2 x 2 cells
case(L, "planes.npy", 12, lambda: npy(planes(3, 2, 4, 4)))
case(L, "named.npz", 3 * 2 * 4, lambda: npz(planes=planes(3, 2, 4, 8), other=planes(1)))
case(L, "nan.npy", "NaN", lambda: npy(np.full((3, 2, 4, 4), np.nan)))
case(L, "three-channels.npy", "expected floats", lambda: npy(planes(3, 3, 4, 4)))
case(L, "odd-side.npy", "multiples", lambda: npy(planes(3, 2, 5, 4)))
case(L, "no-cells.npy", "", lambda: npy(planes(3, 2, 0, 4)))
case(L, "pickled.npz", "numbers only", lambda: npz(planes=np.array([{}], dtype=object)))
case(L, "flat.npy", "expected floats", lambda: npy(planes(96)))
case(L, "cut.npy", "NumPy", truncated(lambda: npy(planes(3, 2, 4, 4))))
case(L, "empty.npz", "empty", lambda: b"")
