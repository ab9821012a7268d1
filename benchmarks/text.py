"""Text encoding and open_clip's tokenizer: strings per second on 5,000 real captions.

    python benchmarks/text.py [--rounds 15]

Captions are those of the included emoji set: English only, and English, French, German, Spanish, Russian and Japanese
mixed. open_clip returns a (5000, 77) tensor; ours is timed up to lists of ids and up to the padded batch.

- warm: both have encoded these captions before, as in the second epoch of a training run; both cache words.
- cold: both are constructed anew for every round (not timed), so that their caches are empty.

The ratio is open_clip's time divided by ours in the same round: median, minimum and maximum over rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from open_clip.tokenizer import SimpleTokenizer
from timing import record

# open_clip disables the threads of Rust tokenizers when imported, which would slow ours down
os.environ.pop("TOKENIZERS_PARALLELISM", None)

import worldtokens as wt
from worldtokens.data import samples

COUNT = 5000


def captions(languages: tuple[str, ...]) -> list[str]:
    """5,000 distinct captions, the same ones in every run."""
    rows = samples.open("emoji", languages=languages)
    texts = sorted({text for row in rows for text in row["text"]})
    return random.Random(0).sample(texts, COUNT)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def work(name: str, ours: wt.TextTokenizer, peer: SimpleTokenizer, texts: list[str]) -> Callable[[], object]:
    return {
        "peer": lambda: peer(texts),
        "lists": lambda: ours.encode_batch(texts),
        "batch": lambda: ours.batch(texts),
    }[name]


def measure(texts: list[str], rounds: int, cold: bool) -> dict[str, list[float]]:
    ours, peer = wt.TextTokenizer.clip(dim=1), SimpleTokenizer()
    assert [r[:n] for r, n in zip(peer(texts).tolist(), map(len, ours.encode_batch(texts)), strict=True)] == (
        ours.encode_batch(texts)
    ), "the token ids differ"
    times: dict[str, list[float]] = {"peer": [], "lists": [], "batch": []}
    for _ in range(rounds):
        for name in times:
            if cold:
                ours, peer = wt.TextTokenizer.clip(dim=1), SimpleTokenizer()
            times[name].append(seconds(work(name, ours, peer, texts)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")  # both truncate captions longer than 77 ids
    print(f"{COUNT} captions, {rounds} interleaved rounds, {os.cpu_count()} cores, torch {torch.__version__}")
    head = f"{'captions':13} {'state':5} {'open_clip':>10} {'ours, lists':>12} {'ours, batch':>12}"
    print(f"{head}   strings/s;   ratio lists (low-high)   ratio batch (low-high)")
    for name, languages in (("English", ("en",)), ("six languages", ("en", "fr", "de", "es", "ru", "ja"))):
        texts = captions(languages)
        for state in ("warm", "cold"):
            times = measure(texts, rounds if state == "warm" else max(3, rounds // 3), state == "cold")
            rate = {k: COUNT / statistics.median(v) for k, v in times.items()}
            ratios = []
            for kind in ("lists", "batch"):
                each = [p / o for p, o in zip(times["peer"], times[kind], strict=True)]
                ratios.append(f"{statistics.median(each):8.1f} ({min(each):.1f}-{max(each):.1f})")
            print(
                f"{name:13} {state:5} {rate['peer']:10,.0f} {rate['lists']:12,.0f} {rate['batch']:12,.0f}"
                f"              {ratios[0]:>24} {ratios[1]:>24}"
            )
            record(
                {
                    "what": f"text encoding, 5,000 captions, {name}, {state}",
                    "ours": f"{rate['batch']:,.0f} strings/s",
                    "peer": f"open_clip: {rate['peer']:,.0f}",
                    "ratio": ratios[1].strip(),
                    "note": f"ratio where both return lists of ids {ratios[0].strip()}",
                }
            )


if __name__ == "__main__":
    main()
