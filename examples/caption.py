"""Image captioning and speech recognition: one class, with an image or an audio front-end.

python examples/caption.py                  # captions of emoji: about two minutes on one core
python examples/caption.py --speech         # sentences spoken by espeak-ng: about four minutes
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--speech", action="store_true", help="transcribe speech instead")
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
    captions="first",  # an emoji has several captions, the first is its name
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

model = wt.load("runs/caption/last")  # e.g. in another program
rows = test[:: len(test) // 8]
for row, greedy, beam in zip(rows, model.caption(rows), model.caption(rows, beams=4), strict=True):
    reference = row["text"][0] if isinstance(row["text"], list) else row["text"]
    print(f"{reference}: greedy {greedy!r}, beam search {beam!r}")
figure = wt.attention_figure(model, [row[column] for row in rows[:4]], "runs/caption/attention.png")
print("attention maps:", figure)
