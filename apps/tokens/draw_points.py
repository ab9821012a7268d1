"""Drawing of a point cloud, coloured by the patch of each point."""

from __future__ import annotations

import numpy as np
from matplotlib.collections import LineCollection

from worldtokens.apps.tokens.inspect import Inspected
from worldtokens.apps.tokens.panel import GAP, HEAD, INK, UNIT, Panel


def draw_points(panel: Panel, s: Inspected) -> str:
    """The visible points in the colour of their nearest patch centre."""
    xyz, centres, owner = nearest_centres(s)
    patches = len(centres)
    up = [0, 2, 1] if s.name.lower().endswith(".stl") else [0, 1, 2]  # STL files have z upward
    mirror = np.array([1, 1, -1 if up == [0, 2, 1] else 1])
    flat = _rotated(np.concatenate([xyz, centres])[:, up] * mirror)
    dots, hubs = flat[: len(xyz)], flat[len(xyz) :]
    hues = np.arange(patches) * 0.61803398875 % 1  # consecutive patches have distant hues
    colours = _hsv(hues, 0.72, np.where(np.arange(patches) % 2, 0.88, 0.7))[owner]
    depth = (dots[:, 2] - dots[:, 2].min()) / max(1e-6, np.ptp(dots[:, 2]))
    colours = colours * (0.35 + 0.65 * depth[:, None]) + 0.65 * (1 - depth[:, None])
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, min(panel.height, UNIT - GAP + HEAD) - HEAD - GAP)
    visible = _visible(dots)
    order = np.flatnonzero(visible)[np.argsort(dots[visible, 2])]  # back to front
    spokes = np.stack([dots[order, :2], hubs[owner[order], :2]], 1)
    ax.add_collection(LineCollection(spokes, colors=colours[order], linewidths=0.9, alpha=0.55))
    ax.scatter(
        dots[order, 0], dots[order, 1], s=9 + 13 * depth[order], c=colours[order], linewidths=0, zorder=3
    )
    at_hub = ((dots[:, None] - hubs) ** 2).sum(-1).argmin(0)  # centres are points of the cloud
    near = np.flatnonzero(visible[at_hub])
    ax.scatter(
        hubs[near, 0], hubs[near, 1], s=24, facecolors="white", edgecolors=INK, linewidths=1.1, zorder=5
    )
    ax.set_aspect("equal")
    ax.margins(0.04)
    return f"patches of {s.grid[1]} of {len(xyz):,} points; colour: nearest centre"


def nearest_centres(s: Inspected) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points (n, 3) as the front-end samples them, patch centres (G, 3), and the nearest centre of each point (n,)."""
    import torch

    xyz = s.batch["bits"].view(torch.float32)[0, :, :3].numpy()
    centres = s.tokens.pos[0].flip(-1).numpy() / s.tokenizer.pos_scale  # pos is (z, y, x)
    return xyz, centres, ((xyz[:, None] - centres) ** 2).sum(-1).argmin(1)


def _visible(dots: np.ndarray) -> np.ndarray:
    """Points that are not hidden by others in front of them: (n,) bool."""
    size = np.ptp(dots, axis=0).max() or 1.0
    apart = np.hypot(*(dots[:, None, :2] - dots[None, :, :2]).transpose(2, 0, 1))
    covers = (apart < 0.05 * size) & (dots[None, :, 2] - dots[:, None, 2] > 0.1 * size)
    return covers.sum(1) < 2


def _rotated(xyz: np.ndarray) -> np.ndarray:
    """View from the front, slightly from the right and above: (n, 3), depth last, higher is nearer."""
    a, b = np.radians(-28), np.radians(18)
    x, z = np.cos(a) * xyz[:, 0] + np.sin(a) * xyz[:, 2], -np.sin(a) * xyz[:, 0] + np.cos(a) * xyz[:, 2]
    return np.stack([x, np.cos(b) * xyz[:, 1] - np.sin(b) * z, np.sin(b) * xyz[:, 1] + np.cos(b) * z], 1)


def _hsv(h: np.ndarray, s: float, v: np.ndarray) -> np.ndarray:
    from matplotlib.colors import hsv_to_rgb

    return hsv_to_rgb(np.stack([h, np.full_like(h, s), v], -1))
