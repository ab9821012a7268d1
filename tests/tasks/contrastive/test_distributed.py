"""Distributed training of CLIP: two processes with uneven pairs have the gradients of one.

The test starts this file twice as a script.
"""

import subprocess
import sys

import pytest
import torch

KINDS = {"clip": {}, "siglip": {"loss": "siglip"}, "standardize": {"standardize": True}}


def uneven_rows(rows):
    """Six rows; the second process has fewer pairs than the first, and two rows, one per process, share a caption."""
    rows = [{"image": r["image"], "text": r["text"][0]} for r in rows[:6]]
    rows[3]["text"] = rows[0]["text"]
    del rows[4]["image"], rows[5]["text"]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_uneven_pairs_equal_one(tmp_path, kind, make_clip, collate, emoji_rows):
    """Max abs difference of a gradient below 1e-5 of its largest value (of 1 if that is smaller); three pairs and one."""
    both = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path), kind]) for rank in (0, 1)]
    assert [p.wait(300) for p in both] == [0, 0]
    gradients = torch.load(tmp_path / "grads.pt")
    model = make_clip(**KINDS[kind])
    model.loss(collate(model, uneven_rows(emoji_rows)))["loss"].backward()
    for name, p in model.named_parameters():
        assert (gradients[name] - p.grad).abs().max() < 1e-5 * p.grad.abs().max().clamp(min=1), name


def train_half(rank, folder, kind):
    """One of two processes: gradients of its three rows, averaged as DDP does."""
    from conftest import EMOJI_ROWS, build_clip, collate_rows  # beside this script

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = build_clip(**KINDS[kind])
    model.loss(collate_rows(model, uneven_rows(EMOJI_ROWS)[3 * rank : 3 * rank + 3]))["loss"].backward()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        torch.distributed.all_reduce(p.grad)
        p.grad /= 2
    if rank == 0:
        torch.save({k: p.grad for k, p in model.named_parameters()}, f"{folder}/grads.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train_half(int(sys.argv[1]), *sys.argv[2:])
