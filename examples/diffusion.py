"""Text-to-image generation of emoji: rectified flow with a small DiT and cross-attention to the caption.

    python examples/diffusion.py [--steps 2000]

Minutes on a CPU; writes the samples to samples.png.
"""

import argparse
import tempfile

from PIL import Image

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--out", default="samples.png")
args = parser.parse_args()

rows, held_out = (wt.open_rows("emoji", split=s) for s in ("train", "test"))
trained = wt.TextTokenizer.train(rows.texts("text"), vocab_size=2000, dim=128, end="<|endoftext|>")
with tempfile.TemporaryDirectory() as folder:
    vocabulary = trained.save_vocabulary(f"{folder}/text.json")
    text = wt.TextTokenizer(vocabulary, dim=128, context=64, causal=False, end="<|endoftext|>")
    model = wt.Diffusion(
        {"image": wt.ImageTokenizer(192, patch=8, size=32, mean=(0.5,) * 3, std=(0.5,) * 3), "text": text},
        trunk=wt.Transformer(192, 4, 3, adaln=True, cross=True, context_dim=128),
        encoder=wt.Transformer(128, 2, 2),
        prediction="data",
    )
    settings = wt.TrainSettings(
        out=f"{folder}/run", steps=args.steps, batch_size=64, precision="auto", cache_mb=128
    )
    wt.train(model, rows, train=settings, optim=wt.OptimSettings(lr=1e-3, weight_decay=0.01, ema=0.998))

subset = [held_out[i] for i in range(0, len(held_out), 8)]
for name, loss in model.evaluate(subset).items():
    print(f"{name} on {len(subset)} held-out images: {loss:.4f}")
captions = ["green heart", "red heart", "blue square", "red square", "grinning face", "flag: Austria", None]
sheet = Image.new("RGB", (32 * len(captions), 32))
for i, image in enumerate(model.sample(captions, steps=min(12, args.steps), guidance=3.0)):
    sheet.paste(image, (32 * i, 0))
sheet.resize((sheet.width * 4, sheet.height * 4)).save(args.out)
print(f"{', '.join(c or '(unconditional)' for c in captions)}: {args.out}")
