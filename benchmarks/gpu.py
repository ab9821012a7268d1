"""The comparisons of this folder on one GPU, in under eight minutes.

    python benchmarks/gpu.py [--out FOLDER]          on a CUDA device: bfloat16, torch.compile for both sides
    python benchmarks/gpu.py --trial                 the same code at toy sizes on any device, as a test

Sections: attention modes and the dense mask (values and gradients); ViT-S/16 and CLIP ViT-B/32 training; GPT-2 small
training and generation; packed and padded rows; time and memory by length. A section that fails prints its traceback and
the next one runs. MFU is the FLOP/s of a training step (forward and backward, counted by torch's FlopCounterMode) divided
by the device's bfloat16 peak. Lines are printed and, with --out, appended to `gpu.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import perturb
from torch.utils.flop_counter import FlopCounterMode

import worldtokens as wt

# dense bfloat16 peak in TFLOP/s, from the vendors' data sheets
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "4090": 165, "B200": 2250}


class Bench:
    def __init__(self, trial: bool, out: Path | None) -> None:
        self.trial, self.out = trial, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type != "cuda" and not trial:
            raise SystemExit("no CUDA device: --trial runs the same code at toy sizes")
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        self.peak = next((v * 1e12 for k, v in PEAKS.items() if k in name), None)
        self.log(what="device", name=name, torch=torch.__version__, peak=self.peak)

    def log(self, **line) -> None:
        print(
            "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in line.items()),
            flush=True,
        )
        if self.out:
            with (self.out / "gpu.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], least: float = 1.0) -> float:
        """Median seconds of a call, over about `least` seconds of calls."""
        for _ in range(2 if self.trial else 5):
            run()
        times, end = [], time.perf_counter() + (0 if self.trial else least)
        while not times or time.perf_counter() < end:
            self.sync()
            start = time.perf_counter()
            run()
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def memory(self, run: Callable[[], object]) -> float:
        """Peak MB of a call above the memory allocated before."""
        if self.device.type != "cuda":
            return float("nan")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.sync()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16)

    def compiled(self, f):
        return f if self.trial else torch.compile(f, dynamic=False)

    def pair(
        self, what: str, work: int, unit: str, ours, peer, peer_name: str, flops: float | None = None
    ) -> None:
        a, b = self.seconds(ours), self.seconds(peer)
        line = {"what": what, f"{unit}/s": work / a, peer_name: work / b, "ratio": b / a}
        if flops and self.peak:
            line |= {"MFU": flops / a / self.peak, "MFU of peer": flops / b / self.peak}
        line |= {"MB": self.memory(ours), "MB of peer": self.memory(peer)}
        self.log(**line)

    def step(self, model, loss) -> Callable[[], None]:
        """A training step: forward, backward, AdamW."""
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=self.device.type == "cuda")
        forward = self.compiled(loss)

        def run() -> None:
            with self.autocast():
                value = forward()
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def flops(self, loss) -> float:
        """FLOPs of a forward and a backward pass, uncompiled."""
        with FlopCounterMode(display=False) as counter, self.autocast():
            loss().backward()
        return float(counter.get_total_flops())


def attention_modes(b: Bench) -> None:
    """Every fast attention mode compared with the dense mask: values and gradients."""
    torch.manual_seed(0)
    dim, lengths = (64, [5, 30, 21]) if b.trial else (512, [700, 33, 150, 380, 512, 64, 90, 119])
    on_cpu = b.device.type == "cpu"
    for order, window in (("bidirectional", None), ("causal", None), ("causal", 16)):
        trunk = perturb(wt.Transformer(dim, 2, 4, rope=1, kv_heads=2, window=window)).to(b.device).eval()
        one = [wt.Tokens(torch.randn(1, n, dim), layout=wt.Layout.simple([n], order)) for n in lengths]
        one = [t.causal() if order == "causal" else t for t in one]
        for name, t in (("packed", wt.pack(one, max(lengths) + 100)), ("padded", wt.Tokens.stack(one))):
            t = t.to(b.device)
            found = []
            for kind in (None, "dense"):
                x = t.x.clone().requires_grad_()
                out = trunk(t.replace(x=x), mode=kind).x
                out.square().mean().backward()
                found.append((out.detach(), x.grad))
            error = [float((p - q).abs().max() / q.abs().max()) for p, q in zip(*found, strict=True)]
            b.log(
                what=f"{name}, {order}, window {window}: fast and dense, fp32",
                value=error[0],
                gradient=error[1],
            )
            if on_cpu:
                continue
            fast, dense = (
                b.seconds(lambda k=k, t=t, trunk=trunk: trunk(t, mode=k), 0.3) for k in (None, "dense")
            )
            b.log(what=f"{name}, {order}, window {window}: forward", ratio=dense / fast)


def vit(b: Bench) -> None:
    import timm

    n, name = (2, "vit_tiny_patch16_224") if b.trial else (256, "vit_small_patch16_224")
    theirs = perturb(timm.create_model(name, num_classes=1000))
    ours = wt.from_timm(theirs).to(b.device).train()
    theirs = theirs.to(b.device).train()
    pixels, labels = (
        torch.randn(n, 3, 224, 224, device=b.device),
        torch.randint(0, 1000, (n,), device=b.device),
    )

    def our_loss():
        return F.cross_entropy(ours({"image": pixels}).float(), labels)

    def their_loss():
        return F.cross_entropy(theirs(pixels).float(), labels)

    flops = b.flops(their_loss)
    b.pair(
        f"{name} training step, batch {n}",
        n,
        "images",
        b.step(ours, our_loss),
        b.step(theirs, their_loss),
        "timm",
        flops,
    )
    ours.eval()
    theirs.eval()
    f, g = b.compiled(lambda: ours({"image": pixels})), b.compiled(lambda: theirs(pixels))

    def forward(run):
        with torch.no_grad(), b.autocast():
            run()

    b.pair(f"{name} forward, batch {n}", n, "images", lambda: forward(f), lambda: forward(g), "timm")


def clip(b: Bench) -> None:
    import open_clip
    from open_clip.loss import ClipLoss

    from worldtokens.data import samples

    n = 4 if b.trial else 256
    theirs = perturb(open_clip.create_model("ViT-B-32"))
    ours = wt.from_open_clip(theirs).to(b.device).train()
    theirs = theirs.to(b.device).train()
    texts = [t for row in samples.open("emoji", split="train") for t in row["text"]][:n]
    text = ours.tokenizers["text"]
    batch = text.collate([text.read(t) for t in texts]).to(b.device)
    ids = open_clip.get_tokenizer("ViT-B-32")(texts).to(b.device)
    pixels = torch.randn(n, 3, 224, 224, device=b.device)
    whole = wt.Batch(weight=n, has={"image": None, "text": None}, image=wt.Batch(pixels=pixels), text=batch)
    criterion = ClipLoss()

    def their_loss():
        image, words, scale = theirs(pixels, ids)[:3]
        return criterion(image, words, scale)

    b.pair(
        f"CLIP ViT-B/32 training step, batch {n}", n, "pairs",
        b.step(ours, lambda: ours.loss(whole)["loss"]), b.step(theirs, their_loss), "open_clip",
    )  # fmt: skip


def language(b: Bench) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from worldtokens.tasks.language.documents import Window, pack_windows
    from worldtokens.tasks.language.loss import IGNORE

    small = {"n_layer": 2, "n_embd": 64, "n_head": 2} if b.trial else {}
    rows, length, new = (2, 32, 4) if b.trial else (16, 1024, 128)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **small)
    theirs = perturb(GPT2LMHeadModel(config))
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    ours = wt.from_hf(theirs).to(b.device).train()
    theirs = theirs.to(b.device).train()
    ids = torch.randint(50257, (rows, length))
    last = torch.tensor([IGNORE])
    batch = pack_windows([Window(row, torch.cat((row[1:], last))) for row in ids], length).to(b.device)
    ids = ids.to(b.device)

    def our_loss():
        return ours.loss({"text": batch})["loss"]

    def their_loss():
        return theirs(ids, labels=ids).loss

    b.log(what="GPT-2 loss", ours=float(our_loss().detach()), transformers=float(their_loss().detach()))
    flops = b.flops(their_loss)
    b.pair(
        f"GPT-2 small training step, {rows} x {length}", rows * length, "tokens",
        b.step(ours, our_loss), b.step(theirs, their_loss), "transformers", flops,
    )  # fmt: skip
    ours.eval()
    theirs.eval()
    ours.front.end_id = None  # no early stop
    for n in (1, 8):
        prompts = ids[:n, :16] if n <= rows else ids[:1, :16].repeat(n, 1)

        def own(prompts=prompts.tolist()):
            with b.autocast():
                ours.continuations(prompts, new)

        def peer(prompts=prompts):
            with b.autocast():
                theirs.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False
                )

        b.pair(f"GPT-2 small generation, batch {n}", n * new, "tokens", own, peer, "transformers")


def packing(b: Bench) -> None:
    """Samples whose mean length is a third of the longest: packed and padded."""
    torch.manual_seed(0)
    dim, depth, longest, count = (64, 2, 48, 12) if b.trial else (768, 12, 768, 96)
    lengths = (torch.rand(count) ** 2 * longest).long().clamp(min=8).tolist()
    lengths[0] = longest
    one = [
        wt.Tokens(torch.randn(1, n, dim), layout=wt.Layout.simple([n], "causal")).causal() for n in lengths
    ]
    trunk = wt.Transformer(dim, depth, dim // 64, rope=1).to(b.device).eval()
    packed, padded = wt.pack(one, longest).to(b.device), wt.Tokens.stack(one).to(b.device)

    def forward(t):
        with torch.no_grad(), b.autocast():
            trunk(t)

    share = sum(lengths) / len(lengths) / longest
    b.pair(
        f"packed rows, mean length {share:.2f} of the longest",
        count,
        "samples",
        lambda: forward(packed),
        lambda: forward(padded),
        "padded",
    )


def length(b: Bench) -> None:
    """A causal Transformer by sequence length, and SDPA alone."""
    dim, depth, heads = (64, 2, 1) if b.trial else (1024, 2, 16)
    trunk = wt.Transformer(dim, depth, heads, rope=1).to(b.device).eval()
    for n in (128, 256) if b.trial else (128, 512, 2048, 8192, 16384, 65536):
        x = torch.randn(1, n, dim, device=b.device)
        t = wt.Tokens(x, layout=wt.Layout.simple([n], "causal")).causal()
        q = torch.randn(1, heads, n, dim // heads, device=b.device, dtype=torch.bfloat16)

        def ours(t=t):
            with torch.no_grad(), b.autocast():
                trunk(t)

        def alone(q=q):
            for _ in range(depth):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)

        b.log(
            what=f"causal Transformer, {n} tokens",
            ms=1e3 * b.seconds(ours, 0.3),
            sdpa_ms=1e3 * b.seconds(alone, 0.3),
            MB=b.memory(ours),
        )


SECTIONS = (attention_modes, vit, clip, language, packing, length)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trial", action="store_true")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    b = Bench(args.trial, args.out)
    failed = 0
    for section in SECTIONS:
        start = time.monotonic()
        try:
            section(b)
        except Exception:  # a failing section must not stop the others
            failed += 1
            traceback.print_exc()
        b.log(what=f"-- {section.__name__}", seconds=time.monotonic() - start)
    raise SystemExit(failed and args.trial)


if __name__ == "__main__":
    main()
