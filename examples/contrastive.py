"""Images, words and speech in one space: find any of them by any other, among stamps that training never saw.

python examples/contrastive.py                    # seven minutes on one core; fetches Tux Paint's stamps (161 MB) once
python examples/contrastive.py --columns image text    # any two of them, or all
"""

import argparse

import rich

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--columns", nargs="+", default=["image", "text", "audio"])
parser.add_argument("--steps", type=int, default=700)
args = parser.parse_args()

# a row of `spoken` is an image, its caption in one of ten languages, and a recording of these very words
train = wt.samples.open("spoken", split="train")
test = wt.samples.open("stamps", split="test", languages=("en", "fr", "es", "ru"))

dim = 192
front_ends = {  # a line for each modality; in training a part of its tokens is left out at random
    "image": wt.TokenReducer(
        wt.ImageTokenizer(dim, patch=16, size=64, preprocess={"resize": "pad"}), keep=0.6
    ),
    "text": wt.TokenReducer(
        wt.TextTokenizer.train(train.texts(), 800, dim, context=96, causal=False), keep=0.85
    ),
    "audio": wt.TokenReducer(
        wt.AudioTokenizer(dim, sample_rate=8000, n_mels=40, stem="patches", patch=(6, 40), seconds=3.0),
        keep=0.7,
    ),
}
model = wt.CLIP(
    tokenizers={name: front_ends[name] for name in args.columns},
    trunk=wt.Transformer(
        dim, depth=4, heads=3, drop_path=0.1
    ),  # or one each: {"image": ..., "text": ..., "audio": ...}
    dim=256,
    same=["text", "stamp"],  # rows that share a caption or a stamp are not each other's negatives
)
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        out="runs/contrastive",
        steps=args.steps,
        batch_size=128,
        overwrite=True,
        cache_mb=512,
        precision="auto",
    ),
    optim=wt.OptimSettings(lr=1e-3, weight_decay=0.2, warmup=0.1),
)

model = wt.load("runs/contrastive/last")  # as any later program would
rich.print(wt.retrieval_table(model.evaluate(test), f"{len(test)} stamps that training never saw"))

given, wanted = args.columns[-1], args.columns[0]
rows = [row for row in test if row.get(given) and row.get(wanted)]
first = [row[given][0] if isinstance(row[given], list) else row[given] for row in rows]
found = model.rank(
    first, [row[wanted] if wanted != "text" else row[wanted][0] for row in rows], given, wanted
)
for i in range(0, len(rows), max(1, len(rows) // 8)):
    place = found.order[i].tolist().index(i) + 1
    best = [rows[j]["captions"]["en"] for j in found.order[i, :3].tolist()]
    print(
        f"{wanted} by {given} of {rows[i]['captions']['en']!r}: place {place} of {len(rows)}; first {', '.join(best)}"
    )
