"""Teach a model to put images, or speech, into words: the same class, another front-end.

python examples/caption.py                  # emoji and their names: about two minutes of one core
python examples/caption.py --speech         # sentences said by espeak-ng: about four
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--speech", action="store_true", help="write down speech instead")
parser.add_argument("--steps", type=int, default=600)
args = parser.parse_args()

name, column = ("spoken_sentences", "audio") if args.speech else ("emoji", "image")
train, test = (wt.samples.open(name, split=side) for side in ("train", "test"))
text = wt.TextTokenizer.train(
    train.texts(), vocab_size=400 if args.speech else 1200, dim=128, context=40, start="<|startoftext|>"
)
if args.speech:
    front = wt.AudioTokenizer(
        dim=128, sample_rate=11025, n_mels=40, stem="patches", patch=(6, 40), seconds=6.0
    )
else:
    front = wt.ImageTokenizer(dim=128, patch=16, size=64, preprocess={"draft": False})

model = wt.Captioner(
    {column: front, "text": text},
    encoder=wt.Transformer(dim=128, depth=4, heads=4, rope=1 if args.speech else 2),
    decoder=wt.Transformer(dim=128, depth=2, heads=4, rope=1, cross=True),
    captions="first",  # of an emoji's several captions its name
    max_new_tokens=24,
)
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        out="runs/caption",
        steps=args.steps,
        batch_size=32,
        overwrite=True,
        cache_mb=400,
        precision="auto",
    ),
    optim=wt.OptimSettings(lr=2e-3, weight_decay=0.05),
)

model = wt.load("runs/caption/last")  # as any later program would
some = test[:: len(test) // 8]
for row, greedy, searched in zip(some, model.caption(some), model.caption(some, beams=4), strict=True):
    right = row["text"][0] if isinstance(row["text"], list) else row["text"]
    print(f"{right}: {greedy!r}, with four beams {searched!r}")
print(
    "where it looked:",
    wt.attention_figure(model, [row[column] for row in some[:4]], "runs/caption/looked.png"),
)
