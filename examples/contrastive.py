"""Images, captions and speech in one embedding space: retrieval between all of them on held-out stamps.

python examples/contrastive.py                    # seven minutes on one core; downloads Tux Paint's stamps (161 MB) once
python examples/contrastive.py --columns image text    # any two columns, or all three
"""

import argparse

import rich

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--columns", nargs="+", default=["image", "text", "audio"])
parser.add_argument("--steps", type=int, default=700)
args = parser.parse_args()

# a row of `spoken` is an image, its caption in one of ten languages, and a recording of this caption
train = wt.samples.open("spoken", split="train")
test = wt.samples.open("stamps", split="test", languages=("en", "fr", "es", "ru"))

dim = 192
front_ends = {  # one line per modality; in training a random share `keep` of its tokens is kept (FLIP)
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
    # one shared Transformer, or one per modality: {"image": ..., "text": ..., "audio": ...}
    trunk=wt.Transformer(dim, depth=4, heads=3, drop_path=0.1),
    dim=256,
    same=["text", "stamp"],  # rows with the same caption or stamp are not used as negatives of each other
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

model = wt.load("runs/contrastive/last")  # e.g. in another program
rich.print(wt.retrieval_table(model.evaluate(test), f"{len(test)} held-out stamps"))

source, target = args.columns[-1], args.columns[0]
rows = [row for row in test if row.get(source) and row.get(target)]
queries = [row[source][0] if isinstance(row[source], list) else row[source] for row in rows]
candidates = [row[target] if target != "text" else row[target][0] for row in rows]
found = model.rank(queries, candidates, source, target)
for i in range(0, len(rows), max(1, len(rows) // 8)):
    rank = found.order[i].tolist().index(i) + 1
    best = [rows[j]["captions"]["en"] for j in found.order[i, :3].tolist()]
    print(
        f"{source}-to-{target}, {rows[i]['captions']['en']!r}: rank {rank} of {len(rows)}; top 3 {', '.join(best)}"
    )
