"""Train a small language model on Bible chapters (English of 1611), and generate continuations.

    python examples/language_model.py [--steps 1400]

Minutes on a CPU; `worldtokens results lm_verses` compares such a model with a Kneser-Ney 5-gram and an LSTM.
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1400)
steps = parser.parse_args().steps

# 1. Data: one chapter per row; seven whole books are held out. The vocabulary of 2,000 is trained on the training rows.
train, test = (wt.samples.open("verse_chapters", split=s) for s in ("train", "test"))
text = wt.TextTokenizer.train(
    train.texts("text"), vocab_size=2000, dim=256, context=128, start="<|startoftext|>"
)

# 2. Model: a causal Transformer; the output layer shares the weights of the embedding.
model = wt.LanguageModel(text, wt.Transformer(dim=256, depth=4, heads=4))

# 3. Training: chapters are split into windows of 128 tokens and packed; the loss is the mean over tokens.
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        steps=steps, batch_size=2, out="runs/language_model", overwrite=True, precision="auto"
    ),
    optim=wt.OptimSettings(lr=2e-3, weight_decay=0.1),
)

# 4. Evaluation on the held-out books.
figures = model.evaluate(list(test)[:8])
print(f"{figures['bits_per_byte']:.2f} bits per byte, perplexity per token {figures['perplexity']:.0f}")

# 5. Generation; prompts of different lengths are batched.
prompts = ["And it came to pass", "Then said Jesus unto them,", "The heavens"]
continuations = model.generate(prompts, 40, temperature=0.8, top_p=0.95, seed=0, stop=["\n"])
for prompt, continuation in zip(prompts, continuations, strict=True):
    print(f"{prompt}|{continuation}")

# 6. Streaming generation.
print("The LORD", end="")
for part in model.stream("The LORD", max_new_tokens=60):
    print(part, end="", flush=True)
print()
