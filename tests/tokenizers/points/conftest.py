"""Meshes and point clouds in every format, and a small front-end."""

from pathlib import Path

import numpy as np
import pytest
import torch

import worldtokens as wt

trimesh = pytest.importorskip("trimesh")


@pytest.fixture(scope="session")
def small():
    """A function that builds a small `PointTokenizer`, always with the same weights."""

    def build(**options) -> wt.PointTokenizer:
        torch.manual_seed(0)
        return wt.PointTokenizer(
            **({"dim": 16, "points": 128, "patches": 16, "neighbours": 8, "hidden": (16, 24, 32)} | options)
        ).eval()

    return build


@pytest.fixture(scope="session")
def table() -> "trimesh.Trimesh":
    """A table: a box on four cylinders."""
    top = trimesh.creation.box((2.0, 0.1, 1.0))
    legs = [trimesh.creation.cylinder(0.05, 1.0, sections=12) for _ in range(4)]
    for leg, x, z in zip(legs, (-0.9, 0.9, -0.9, 0.9), (-0.4, -0.4, 0.4, 0.4), strict=True):
        leg.apply_transform(trimesh.transformations.rotation_matrix(np.pi / 2, (1, 0, 0)))
        leg.apply_translation((x, -0.5, z))
    return trimesh.util.concatenate([top, *legs])


@pytest.fixture(scope="session")
def folder(tmp_path_factory, table) -> Path:
    """The table as a mesh, and one point cloud, in every format."""
    folder, rng = tmp_path_factory.mktemp("points"), np.random.default_rng(0)
    for kind in ("ply", "obj", "stl", "off", "glb"):
        table.export(folder / f"table.{kind}")
    (folder / "ascii.ply").write_bytes(trimesh.exchange.ply.export_ply(table, encoding="ascii"))
    (folder / "ascii.stl").write_text(trimesh.exchange.stl.export_stl_ascii(table))
    cloud = rng.normal(size=(46, 3))
    np.savetxt(folder / "cloud.xyz", cloud)
    np.save(folder / "cloud.npy", cloud)
    np.savez_compressed(folder / "cloud.npz", points=cloud)
    np.savez(folder / "mesh.npz", vertices=table.vertices, faces=table.faces)
    trimesh.PointCloud(cloud, colors=rng.integers(0, 255, (46, 4))).export(folder / "cloud.ply")
    return folder
