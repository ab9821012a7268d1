"""Draw docs/architecture.png from the imports: packages as boxes, arrows from a package to those that it imports.

    python scripts/draw_architecture.py [OUT.png]

Transitive arrows are omitted.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
ABOUT = {
    "cli": "the worldtokens command",
    "apps": "demo, train, index, search, tokens",
    "evals": "tasks compared with baselines",
    "figures": "attention maps, confusion, sheets",
    "training": "rows + task -> a trained model",
    "pretrained": "timm, open_clip, Hugging Face, GGUF",
    "tasks": "Tokens -> loss, predictions",
    "tokenizers": "raw data -> Tokens, a folder per modality",
    "backbone": "Tokens -> Tokens",
    "data": "files -> rows",
    "core": "Tokens, packing, save and load",
    "testing": "check_tokenizer",
}
# centre of each box; arrows must point down
SPOTS = {
    "cli": (6.5, 7.2), "apps": (3.6, 6.1), "evals": (9.4, 6.1), "figures": (1.9, 4.9), "training": (6.5, 4.9),
    "pretrained": (11.1, 4.9), "tasks": (6.5, 3.7), "data": (1.9, 2.5), "testing": (11.1, 3.4), "tokenizers": (6.5, 2.5),
    "backbone": (6.5, 1.3), "core": (6.5, 0.1),
}  # fmt: skip
COLOURS = {"tokenizers": "#dbeafe", "backbone": "#dcfce7", "tasks": "#fef3c7", "core": "#e5e7eb"}


def package_of(module: str) -> str:
    name = module.split(".")[0]
    return name if name in ABOUT else "core"


def edges() -> set[tuple[str, str]]:
    """(importing package, imported package) for every import of one package by another."""
    found = set()
    for package in [*ABOUT, ""]:
        files = ROOT.glob("*.py") if not package else (ROOT / package).rglob("*.py")
        for file in files:
            if file.name in ("setup.py", "__init__.py", "__main__.py"):
                continue
            own = package_of(package if package else file.stem)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("worldtokens"):
                    modules = [node.module.removeprefix("worldtokens").lstrip(".")]
                    modules = modules if modules[0] else [a.name for a in node.names]
                    found |= {(own, package_of(m)) for m in modules if not m.startswith("__")}
    # the command line loads its subcommands by name
    return {(a, b) for a, b in found | {("cli", "apps"), ("cli", "evals")} if a != b}


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without transitive pairs."""
    below: dict[str, set[str]] = {}

    def reach(package: str) -> set[str]:
        if package not in below:
            below[package] = set()
            for a, b in pairs:
                if a == package:
                    below[package] |= {b} | reach(b)
        return below[package]

    return {(a, b) for a, b in pairs if not any(b in reach(c) for x, c in pairs if x == a and c != b)}


def draw(out: Path) -> None:
    fig, ax = plt.subplots(figsize=(11, 6.6), dpi=130)
    width, height = 3.7, 0.66
    for package, (x, y) in SPOTS.items():
        box = FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.04,rounding_size=0.1",
            facecolor=COLOURS.get(package, "#ffffff"), edgecolor="#374151", linewidth=1.1, zorder=3,
        )  # fmt: skip
        ax.add_patch(box)
        title = f"{package}/" if (ROOT / package).is_dir() else f"{package}.py"
        title = "tokens.py, parts.py, ..." if package == "core" else title
        ax.text(x, y + 0.13, title, ha="center", va="center", fontsize=10.5, fontweight="bold", zorder=4)
        ax.text(
            x, y - 0.16, ABOUT[package], ha="center", va="center", fontsize=7.6, color="#374151", zorder=4
        )
    for a, b in sorted(reduced(edges())):
        (x0, y0), (x1, y1) = SPOTS[a], SPOTS[b]
        assert y1 < y0, f"{a} imports {b}, which is not below it"
        lean = 0.28 * (x1 - x0)  # start and end on the side of the other box
        lean = max(-1.5, min(1.5, lean))
        arrow = FancyArrowPatch(
            (x0 + lean, y0 - height / 2 - 0.05), (x1 - lean, y1 + height / 2 + 0.05),
            arrowstyle="-|>", mutation_scale=11, color="#6b7280", linewidth=1.1, zorder=2,
        )  # fmt: skip
        ax.add_patch(arrow)
    ax.set_xlim(-0.1, 13.1)
    ax.set_ylim(-0.4, 7.7)
    ax.axis("off")
    fig.savefig(out, bbox_inches="tight", facecolor="white")
    plt.close(fig)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.png")
