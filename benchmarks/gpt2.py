"""GPT-2 small against transformers, the same weights, in turns in one process: generation and a training step.

    python benchmarks/gpt2.py [--rounds 5] [--new 128] [--threads N] [--bf16]

The model has GPT-2 small's shape (12 layers, 768 wide, 12 heads, 50,257 pieces) and random weights, read from a live
`GPT2LMHeadModel` by `wt.from_hf`; before anything is timed both must give the same logits, greedy tokens and gradients.

- generation: a prompt of 16 tokens, greedy, no early end, batch 1 and 8. transformers' own `generate`, as it comes (its
  growing cache). What packing the weights costs us (`backbone/packed.py`) is inside our time.
- training step: one text of 512 tokens (and, with --rows, more), forward, loss, backward and a fused AdamW step; dropout
  off on both sides. Peak memory is the process's own high-water mark (Linux), in runs apart: above what it held before the
  step, when weights and moments are there and gradients are not; and in all.

--bf16 adds generation with weights in bfloat16 on both sides, and a training step under autocast.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from turns import high_water, report, scatter, turns

import worldtokens as wt
from worldtokens.tasks.language.documents import Window, pack_windows
from worldtokens.tasks.language.loss import IGNORE


def pair() -> tuple[wt.LanguageModel, GPT2LMHeadModel]:
    """Ours and theirs with the same weights."""
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=True)
    torch.manual_seed(0)
    theirs = scatter(GPT2LMHeadModel(config)).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    return wt.from_hf(theirs).eval(), theirs


def generating(ours, theirs, batch: int, new: int) -> dict:
    ids = torch.randint(50000, (batch, 16), generator=torch.Generator().manual_seed(batch))
    prompts = ids.tolist()

    def peer():
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)

    def own():
        return ours.continuations(prompts, new)

    ours.front.end_id = None  # neither ends early
    return {"ours": own, "transformers": peer}


def learning(ours, theirs, rows: int, length: int, half: bool = False) -> dict:
    ids = torch.randint(50257, (rows, length), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([IGNORE])  # theirs predicts nothing from the last one, as it moves the labels itself
    batch = {"text": pack_windows([Window(row, torch.cat((row[1:], last))) for row in ids], length)}

    def step(model, loss):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

        def run():
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                value = loss()
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(value.detach())

        return run

    ours.train(), theirs.train()
    return {
        "ours": step(ours, lambda: ours.loss(batch)["loss"]),
        "transformers": step(theirs, lambda: theirs(ids, labels=ids).loss),
    }


def alike(ours, theirs) -> None:
    """Raise unless both compute the same."""
    ids = torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = ours({"text": wt.Batch(ids=ids, lengths=(24, 24))}), theirs(ids).logits
    print(f"logits: largest difference {float((a - b).abs().max()):.1e}")
    assert (a - b).abs().max() < 1e-4
    same = generating(ours, theirs, 2, 12)
    assert [c.ids for c in same["ours"]()] == same["transformers"]()[:, 16:].tolist(), "greedy tokens differ"
    batch = {"text": pack_windows([Window(row[:-1], row[1:]) for row in ids], 24)}
    a, b = ours.loss(batch)["loss"], theirs(ids, labels=ids).loss
    a.backward(), b.backward()
    ga, gb = ours.front.embedding.weight.grad, theirs.transformer.wte.weight.grad
    print(
        f"loss: {float(a.detach() - b.detach()):.1e}; the embedding's gradient: {float((ga - gb).abs().max()):.1e}"
    )
    assert torch.allclose(a, b, atol=1e-4) and torch.allclose(ga, gb, atol=1e-4)
    ours.zero_grad(), theirs.zero_grad()


def memory(which: str, rows: int, length: int) -> tuple[float, float]:
    """Peak memory of one contender's training step, in a process of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        ours, theirs = pair()
        run = learning(ours, theirs, rows, length)[which]
        del ours, theirs
        run()  # makes the moments
        os.write(write, repr(high_water(run)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.wait()
    return tuple(float(x) for x in text.strip("()").split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[1])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--bf16", action="store_true")
    set = parser.parse_args()
    if set.threads:
        torch.set_num_threads(set.threads)
    held = {
        (which, rows): memory(which, rows, set.length)
        for rows in set.rows
        for which in ("ours", "transformers")
        if Path("/proc/self/clear_refs").exists()
    }
    ours, theirs = pair()
    alike(ours, theirs)
    print(f"{set.rounds} rounds in turns, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for batch in set.batches:
        took = turns(generating(ours, theirs, batch, set.new), set.rounds)
        report(f"GPT-2 small generation, {set.new} new, batch {batch}", took, batch * set.new, "tokens")
    if set.bf16:
        ours.bfloat16(), theirs.bfloat16()
        for batch in set.batches:
            took = turns(generating(ours, theirs, batch, set.new), set.rounds)
            what = f"GPT-2 small generation, {set.new} new, batch {batch}, weights in bf16"
            report(what, took, batch * set.new, "tokens")
        ours, theirs = pair()
    for half in (False, True) if set.bf16 else (False,):
        for rows in set.rows:
            took = turns(learning(ours, theirs, rows, set.length, half), set.rounds)
            note = ""
            if not half and ("ours", rows) in held:
                (a, all_a), (b, all_b) = held["ours", rows], held["transformers", rows]
                note = f"peak above weights and moments {a:.0f} / {b:.0f} MB = {a / b:.2f}, in all {all_a / all_b:.2f}"
            what = f"GPT-2 small training step, {rows} x {set.length}, {'bf16' if half else 'fp32'}"
            report(what, took, rows * set.length, "tokens", note)


if __name__ == "__main__":
    main()
