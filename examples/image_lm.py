"""Text-to-image generation of emoji by a language model: an autoencoder learns discrete codes, the model predicts them.

    python examples/image_lm.py [--steps 1000]

Ten minutes on a CPU; writes the samples to samples_from_codes.png.
"""

import argparse
import tempfile

import torch
from PIL import Image

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out", default="samples_from_codes.png")
args = parser.parse_args()

rows, held_out = (wt.open_rows("emoji", split=s) for s in ("train", "test"))
subset = [held_out[i] for i in range(0, len(held_out), 8)]
common = {"steps": args.steps, "batch_size": 32, "precision": "auto", "cache_mb": 128}
with tempfile.TemporaryDirectory() as folder:
    codes = wt.DiscreteTokenizer(192, size=32, factor=4, width=96, quantizer=wt.FSQ((8, 8, 8)))
    model = wt.Autoencoder(codes)
    settings = wt.TrainSettings(out=f"{folder}/codes", **common)
    wt.train(model, rows, train=settings, optim=wt.OptimSettings(lr=2e-3, weight_decay=0.0))
    figures = model.evaluate(subset)
    print(f"{len(subset)} held-out images as {codes.count} codes, codebook of {codes.codebook_size}: mean squared error "
          f"{figures['mse']:.4f}, with the mean colour of each patch {figures['mse_colour']:.4f}")  # fmt: skip

    text = wt.TextTokenizer.train(rows.texts("text"), vocab_size=2000, dim=192, context=32)
    generator = wt.ImageLM(text, codes, wt.Transformer(192, 4, 3, rope=3))
    settings = wt.TrainSettings(out=f"{folder}/generator", **common)
    wt.train(generator, rows, train=settings, optim=wt.OptimSettings(lr=1e-3, ema=0.998))

for name, bits in generator.evaluate(subset).items():
    print(f"{name}: {bits:.3f} bits per code on {len(subset)} held-out images")
captions = ["green heart", "red heart", "blue square", "red square", "grinning face", "flag: Austria", None]
images = generator.sample(captions, guidance=3.0)  # (7, 3, 32, 32)
sheet = Image.fromarray(torch.cat(list(images), 2).permute(1, 2, 0).numpy())
sheet.resize((sheet.width * 4, sheet.height * 4)).save(args.out)
print(f"{', '.join(c or '(unconditional)' for c in captions)}: {args.out}")
