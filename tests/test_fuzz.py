"""Valid files of every reader with bytes changed, cut out or put in: tokens or `InputError`, and nothing else."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")  # limits of memory; not on Windows

HERE = Path(__file__).parent / "hostile"


def fuzz(folder: Path, count: int) -> None:
    sys.path.insert(0, str(HERE))
    try:
        from damage import SEEDS
        from make import write
        from watch import watch
    finally:
        sys.path.remove(str(HERE))
    write(folder)
    answers = watch("fuzz", folder, len(SEEDS), count, still=60 + count)
    faults = [f"{seed}: {got}" for seed, got in zip(SEEDS, answers, strict=True)
              if got.get("wrong", "crash") or got["cpu"] > 5 or got["bytes"] > 1 << 30]  # fmt: skip
    assert not faults, "\n".join(faults)
    tried, refused = (sum(got[k] for got in answers) for k in ("tried", "refused"))
    # damage that every reader lets pass, or none, would test nothing
    assert tried >= len(SEEDS) * count * 0.5 and 0.2 < refused / tried < 0.95
    print(f"{tried} files, {refused} refused; slowest {max(a['cpu'] for a in answers):.2f} s, "
          f"most {max(a['bytes'] for a in answers) >> 20} MB")  # fmt: skip


def test_damaged_files_give_tokens_or_input_error(tmp_path):
    fuzz(tmp_path, 12)


@pytest.mark.slow
def test_many_damaged_files_give_tokens_or_input_error(tmp_path):
    fuzz(tmp_path, 400)
