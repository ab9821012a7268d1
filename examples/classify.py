"""Train an image classifier and ask it: on handwritten digits, or on your own folder with one subfolder a class.

python examples/classify.py                     # digits: about four minutes on one core
python examples/classify.py my_pictures/        # my_pictures/cat/1.jpg, my_pictures/dog/2.jpg, ...
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "rows", nargs="?", default="digits", help="a folder, a table, or a named set with classes"
)
parser.add_argument("--steps", type=int, default=1200)
args = parser.parse_args()

rows = wt.open_rows(args.rows)
train, validation, test = (rows.split(side) for side in ("train", "validation", "test"))
classes = sorted(set(rows.column("class")))
size = 20 if args.rows == "digits" else 64

model = wt.Classifier(
    tokenizer=wt.ImageTokenizer(dim=96, patch=size // 5, size=size, class_token=True),
    trunk=wt.Transformer(dim=96, depth=4, heads=3, drop_path=0.1),
    classes=classes,
    label="class",
    label_smoothing=0.1,
)
wt.train(
    model,
    train,
    validation,
    train=wt.TrainSettings(
        out="runs/classify",
        steps=args.steps,
        batch_size=min(64, len(train)),
        overwrite=True,
        cache_mb=64,
        precision="auto",
    ),
    optim=wt.OptimSettings(lr=1.5e-3, weight_decay=0.1, ema=0.995),
)

model = wt.load("runs/classify/last")  # as any later program would
print({name: round(value, 3) for name, value in model.evaluate(test).items()})
some = test[:: max(1, len(test) // 10)]
names, probabilities = model.predict([row["image"] for row in some], top=2)
for row, (first, second), (p, q) in zip(some, names, probabilities.tolist(), strict=True):
    print(f"{row['id']}: {first} ({p:.0%}), else {second} ({q:.0%})")
