"""Valid files of every reader with bytes replaced, deleted or inserted: tokens or `InputError`, nothing else."""

from pathlib import Path

import pytest

pytest.importorskip("resource")  # limits of memory; not on Windows


def fuzz(load, folder: Path, count: int) -> None:
    seeds = load("mutations").SEEDS
    load("corpus").write(folder)
    results = load("supervisor").supervise("fuzz", folder, len(seeds), count, timeout=60 + count)
    faults = [f"{seed}: {got}" for seed, got in zip(seeds, results, strict=True)
              if got.get("wrong", "crash") or got["cpu"] > 5 or got["bytes"] > 1 << 30]  # fmt: skip
    assert not faults, "\n".join(faults)
    tried, errors = (sum(got[k] for got in results) for k in ("tried", "errors"))
    # mutations that never or always raise would test nothing
    assert tried >= len(seeds) * count * 0.5 and 0.2 < errors / tried < 0.95
    print(f"{tried} files, {errors} errors; slowest {max(r['cpu'] for r in results):.2f} s, "
          f"most memory {max(r['bytes'] for r in results) >> 20} MB")  # fmt: skip


def test_mutated_files_give_tokens_or_input_error(load, tmp_path):
    fuzz(load, tmp_path, 12)


@pytest.mark.slow
def test_many_mutated_files_give_tokens_or_input_error(load, tmp_path):
    fuzz(load, tmp_path, 400)
