"""Draw emoji from words: rectified flow with a small DiT that reads a caption by cross-attention.

    python examples/diffusion.py [--steps 2000]

Minutes on a CPU; the drawings are in drawn.png.
"""

import argparse
import tempfile

from PIL import Image

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--out", default="drawn.png")
args = parser.parse_args()

rows, held_out = (wt.open_rows("emoji", split=s) for s in ("train", "test"))
words = wt.TextTokenizer.train(rows.texts("text"), vocab_size=2000, dim=128, end="<|endoftext|>")
with tempfile.TemporaryDirectory() as folder:
    vocabulary = words.save_vocabulary(f"{folder}/text.json")
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

few = [held_out[i] for i in range(0, len(held_out), 8)]
for name, loss in model.evaluate(few).items():
    print(f"{name} on {len(few)} held-out images: {loss:.4f}")
asked = ["green heart", "red heart", "blue square", "red square", "grinning face", "flag: Austria", None]
sheet = Image.new("RGB", (32 * len(asked), 32))
for i, picture in enumerate(model.sample(asked, steps=min(12, args.steps), guidance=3.0)):
    sheet.paste(picture, (32 * i, 0))
sheet.resize((sheet.width * 4, sheet.height * 4)).save(args.out)
print(f"{', '.join(a or 'anything' for a in asked)}: see {args.out}")
