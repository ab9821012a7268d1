"""Train an image classifier on handwritten digits, or on a folder with one subfolder per class.

python examples/classify.py                     # digits: about four minutes on one core
python examples/classify.py my_images/          # my_images/cat/1.jpg, my_images/dog/2.jpg, ...
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "rows", nargs="?", default="digits", help="a folder, a table, or a named data set with classes"
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

model = wt.load("runs/classify/last")  # e.g. in another program
print({name: round(value, 3) for name, value in model.evaluate(test).items()})
examples = test[:: max(1, len(test) // 10)]
names, probabilities = model.predict([row["image"] for row in examples], top=2)
for row, (first, second), (p, q) in zip(examples, names, probabilities.tolist(), strict=True):
    print(f"{row['id']}: {first} ({p:.0%}), {second} ({q:.0%})")
