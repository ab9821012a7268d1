"""Teach a small model to write English of 1611: the verses, chapter by chapter, then its own continuations.

    python examples/language_model.py [--steps 1400]

Minutes on a CPU; `worldtokens results lm_verses` sets such a model beside a Kneser-Ney 5-gram and an LSTM.
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1400)
steps = parser.parse_args().steps

# 1. Text: chapters as rows; seven whole books are kept for the test. Its 2,000 pieces are learned from the training rows.
train, test = (wt.samples.open("verse_chapters", split=s) for s in ("train", "test"))
text = wt.TextTokenizer.train(
    train.texts("text"), vocab_size=2000, dim=256, context=128, start="<|startoftext|>"
)

# 2. A trunk that reads left to right; the head is the embedding itself.
model = wt.LanguageModel(text, wt.Transformer(dim=256, depth=4, heads=4))

# 3. Training: chapters are cut in windows of 128 pieces and packed; the loss is the mean over pieces.
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        steps=steps, batch_size=2, out="runs/language_model", overwrite=True, precision="auto"
    ),
    optim=wt.OptimSettings(lr=2e-3, weight_decay=0.1),
)

# 4. How well does it tell books that it has never read?
figures = model.evaluate(list(test)[:8])
print(f"{figures['bits_per_byte']:.2f} bits per byte, perplexity of a piece {figures['perplexity']:.0f}")

# 5. Ask it to go on. Prompts of different lengths are continued together.
prompts = ["And it came to pass", "Then said Jesus unto them,", "The heavens"]
for prompt, rest in zip(
    prompts, model.generate(prompts, 40, temperature=0.8, top_p=0.95, seed=0, stop=["\n"]), strict=True
):
    print(f"{prompt}|{rest}")

# 6. Or watch it write.
print("The LORD", end="")
for piece in model.stream("The LORD", max_new_tokens=60):
    print(piece, end="", flush=True)
print()
