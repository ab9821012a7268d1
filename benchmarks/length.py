"""Time and memory of a causal Transformer by sequence length, compared with SDPA alone: 128 to 16,384 tokens.

    python benchmarks/length.py [--most 16384] [--rounds 3]

The Transformer (dim 256, depth 2, 4 heads) runs on one row of each length. `SDPA` is torch's attention kernel alone on
queries, keys and values of the same shape, once per layer: a lower bound. `dense` is the same Transformer with the dense
mask, whose memory is quadratic in the length. Memory is the peak of a run above the memory before it, in a child process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
import torch.nn.functional as F
from timing import interleaved, peak_memory, record

import worldtokens as wt

DIM, DEPTH, HEADS = 256, 2, 4


def model_and_tokens(n: int) -> tuple[wt.Transformer, wt.Tokens]:
    torch.manual_seed(0)
    tokens = wt.Tokens(torch.randn(1, n, DIM), layout=wt.Layout.simple([n], "causal")).causal()
    return wt.Transformer(DIM, DEPTH, HEADS, rope=1).eval(), tokens


def run(name: str, n: int):
    if name == "SDPA":
        q, k, v = (torch.randn(1, HEADS, n, DIM // HEADS) for _ in range(3))

        def sdpa():
            for _ in range(DEPTH):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return sdpa
    trunk, tokens = model_and_tokens(n)
    return lambda: trunk(tokens, mode="dense" if name == "dense" else None)


def child(name: str, n: int) -> None:
    """Peak memory of one call, in MB."""
    with torch.no_grad():
        f, small = run(name, n), run(name, 128)
        small()
        print(peak_memory(f)[0])


def memory(name: str, n: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, str(n)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--most", type=int, default=16384)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(args.child[0], int(args.child[1]))
    print(
        f"{'tokens':>7}{'trunk ms':>10}{'SDPA ms':>10}{'dense ms':>10}{'trunk MB':>10}{'SDPA MB':>9}{'dense MB':>10}"
    )
    n = 128
    while n <= args.most:
        names = ["trunk", "SDPA"] + (["dense"] if n <= 4096 else [])
        with torch.no_grad():
            seconds = interleaved({k: run(k, n) for k in names}, args.rounds)
        ms = {k: 1e3 * sorted(v)[len(v) // 2] for k, v in seconds.items()}
        mb = {k: memory(k, n) for k in names}
        dense = (f"{ms['dense']:10.1f}", f"{mb['dense']:10.0f}") if "dense" in ms else (f"{'-':>10}",) * 2
        print(
            f"{n:7}{ms['trunk']:10.1f}{ms['SDPA']:10.1f}{dense[0]}{mb['trunk']:10.0f}{mb['SDPA']:9.0f}{dense[1]}",
            flush=True,
        )
        record(
            {
                "what": f"causal Transformer, {n:,} tokens",
                "ours": f"{ms['trunk']:.1f} ms, {mb['trunk']:.0f} MB",
                "peer": f"SDPA alone: {ms['SDPA']:.1f} ms, {mb['SDPA']:.0f} MB",
                "ratio": f"{ms['SDPA'] / ms['trunk']:.2f}",
                "note": f"dense mask {ms['dense']:.1f} ms, {mb['dense']:.0f} MB" if "dense" in ms else "",
            }
        )
        n *= 2
    return None


if __name__ == "__main__":
    main()
