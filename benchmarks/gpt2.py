"""GPT-2 small and transformers with the same weights: generation and a training step.

    python benchmarks/gpt2.py [--rounds 5] [--new 128] [--threads N] [--bf16]

The model has the size of GPT-2 small (depth 12, dim 768, 12 heads, vocabulary of 50,257) and random weights, mapped from a
`GPT2LMHeadModel` by `wt.from_hf`. Logits, greedy tokens and gradients are compared before the timing.

- generation: a prompt of 16 tokens, greedy, without early stop, batch 1 and 8. transformers' `generate` with its defaults
  (dynamic cache). Prepacking of our weights (`backbone/prepacked.py`) is included.
- training step: one text of 512 tokens (and, with --rows, more), forward, loss, backward and a fused AdamW step; dropout
  off in both. Peak memory is that of the process (Linux), measured in separate runs: above the memory before the step,
  which holds weights and optimizer state but no gradients; and in all.

--bf16 adds generation with weights in bfloat16 on both sides, and a training step under autocast.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from timing import interleaved, peak_memory, perturb, report
from transformers import GPT2Config, GPT2LMHeadModel

import worldtokens as wt
from worldtokens.tasks.language.documents import Window, pack_windows
from worldtokens.tasks.language.loss import IGNORE


def pair() -> tuple[wt.LanguageModel, GPT2LMHeadModel]:
    """Our model and transformers' with the same weights."""
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=True)
    torch.manual_seed(0)
    theirs = perturb(GPT2LMHeadModel(config)).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    return wt.from_hf(theirs).eval(), theirs


def generating(ours, theirs, batch: int, new: int) -> dict:
    ids = torch.randint(50000, (batch, 16), generator=torch.Generator().manual_seed(batch))
    prompts = ids.tolist()

    def peer():
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)

    def own():
        return ours.continuations(prompts, new)

    ours.front.end_id = None  # no early stop
    return {"ours": own, "transformers": peer}


def training(ours, theirs, rows: int, length: int, half: bool = False) -> dict:
    ids = torch.randint(50257, (rows, length), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([IGNORE])  # transformers shifts the labels, so its last position has no target
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


def check_equal(ours, theirs) -> None:
    """Raise unless both give equal logits, greedy tokens and gradients."""
    ids = torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = ours({"text": wt.Batch(ids=ids, lengths=(24, 24))}), theirs(ids).logits
    print(f"logits: largest difference {float((a - b).abs().max()):.1e}")
    assert (a - b).abs().max() < 1e-4
    outputs = generating(ours, theirs, 2, 12)
    assert [c.ids for c in outputs["ours"]()] == outputs["transformers"]()[:, 16:].tolist(), (
        "greedy tokens differ"
    )
    batch = {"text": pack_windows([Window(row[:-1], row[1:]) for row in ids], 24)}
    a, b = ours.loss(batch)["loss"], theirs(ids, labels=ids).loss
    a.backward(), b.backward()
    ga, gb = ours.front.embedding.weight.grad, theirs.transformer.wte.weight.grad
    print(
        f"loss: {float(a.detach() - b.detach()):.1e}; gradient of the embedding: {float((ga - gb).abs().max()):.1e}"
    )
    assert torch.allclose(a, b, atol=1e-4) and torch.allclose(ga, gb, atol=1e-4)
    ours.zero_grad(), theirs.zero_grad()


def memory(which: str, rows: int, length: int) -> tuple[float, float]:
    """Peak memory of one contender's training step, in a separate process."""
    read, write = os.pipe()
    if os.fork() == 0:
        ours, theirs = pair()
        run = training(ours, theirs, rows, length)[which]
        del ours, theirs
        run()  # allocates the optimizer state
        os.write(write, repr(peak_memory(run)).encode())
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
    peaks = {
        (which, rows): memory(which, rows, set.length)
        for rows in set.rows
        for which in ("ours", "transformers")
        if Path("/proc/self/clear_refs").exists()
    }
    ours, theirs = pair()
    check_equal(ours, theirs)
    print(f"{set.rounds} interleaved rounds, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for batch in set.batches:
        seconds = interleaved(generating(ours, theirs, batch, set.new), set.rounds)
        report(f"GPT-2 small generation, {set.new} tokens, batch {batch}", seconds, batch * set.new, "tokens")
    if set.bf16:
        ours.bfloat16(), theirs.bfloat16()
        for batch in set.batches:
            seconds = interleaved(generating(ours, theirs, batch, set.new), set.rounds)
            what = f"GPT-2 small generation, {set.new} tokens, batch {batch}, bf16"
            report(what, seconds, batch * set.new, "tokens")
        ours, theirs = pair()
    for half in (False, True) if set.bf16 else (False,):
        for rows in set.rows:
            seconds = interleaved(training(ours, theirs, rows, set.length, half), set.rounds)
            note = ""
            if not half and ("ours", rows) in peaks:
                (a, all_a), (b, all_b) = peaks["ours", rows], peaks["transformers", rows]
                note = f"peak memory above weights and optimizer state {a:.0f} / {b:.0f} MB = {a / b:.2f}, in all {all_a / all_b:.2f}"
            what = f"GPT-2 small training step, {rows} x {set.length}, {'bf16' if half else 'fp32'}"
            report(what, seconds, rows * set.length, "tokens", note)


if __name__ == "__main__":
    main()
