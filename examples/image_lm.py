"""Draw emoji from words with a language model: first learn what an image's codes are, then to say them after a caption.

    python examples/image_lm.py [--steps 1000]

Ten minutes on a CPU; the drawings are in drawn_by_codes.png.
"""

import argparse
import tempfile

import torch
from PIL import Image

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out", default="drawn_by_codes.png")
args = parser.parse_args()

rows, held_out = (wt.open_rows("emoji", split=s) for s in ("train", "test"))
few = [held_out[i] for i in range(0, len(held_out), 8)]
common = {"steps": args.steps, "batch_size": 32, "precision": "auto", "cache_mb": 128}
with tempfile.TemporaryDirectory() as folder:
    codes = wt.DiscreteTokenizer(192, size=32, factor=4, width=96, quantizer=wt.FSQ((8, 8, 8)))
    model = wt.Autoencoder(codes)
    settings = wt.TrainSettings(out=f"{folder}/codes", **common)
    wt.train(model, rows, train=settings, optim=wt.OptimSettings(lr=2e-3, weight_decay=0.0))
    figures = model.evaluate(few)
    print(f"{len(few)} held-out images as {codes.count} codes of {codes.codebook_size}: squared error "
          f"{figures['mse']:.4f}, of mean colours {figures['mse_colour']:.4f}")  # fmt: skip

    words = wt.TextTokenizer.train(rows.texts("text"), vocab_size=2000, dim=192, context=32)
    painter = wt.ImageLM(words, codes, wt.Transformer(192, 4, 3, rope=3))
    settings = wt.TrainSettings(out=f"{folder}/painter", **common)
    wt.train(painter, rows, train=settings, optim=wt.OptimSettings(lr=1e-3, ema=0.998))

for name, bits in painter.evaluate(few).items():
    print(f"{name}: {bits:.3f} bits per code on {len(few)} held-out images")
asked = ["green heart", "red heart", "blue square", "red square", "grinning face", "flag: Austria", None]
drawn = painter.sample(asked, guidance=3.0)  # (7, 3, 32, 32)
sheet = Image.fromarray(torch.cat(list(drawn), 2).permute(1, 2, 0).numpy())
sheet.resize((sheet.width * 4, sheet.height * 4)).save(args.out)
print(f"{', '.join(a or 'anything' for a in asked)}: see {args.out}")
