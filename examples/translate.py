"""English to Spanish by a Transformer, by a GRU with additive attention, or by a GRU with a fixed-length vector.

python examples/translate.py                        # Transformer: about five minutes on one core
python examples/translate.py --trunks additive      # as Bahdanau et al. 2015; or fixed, as Cho et al. 2014
"""

import argparse

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--trunks", choices=["transformer", "additive", "fixed"], default="transformer")
parser.add_argument("--steps", type=int, default=700)
args = parser.parse_args()

train, test = (wt.samples.open("verse_books", split=side) for side in ("train", "test"))
settings = {"vocab_size": 3000, "dim": 192, "context": 80, "positions": "none"}
fronts = {
    # attention is bidirectional in the source, causal in the target
    "text": wt.TextTokenizer.train(train.texts("text"), causal=False, **settings),
    "target": wt.TextTokenizer.train(train.texts("target"), **settings),
}
if args.trunks == "transformer":
    encoder = wt.Transformer(dim=192, depth=3, heads=3, rope=1)
    decoder = wt.Transformer(dim=192, depth=3, heads=3, rope=1, cross=True)
else:
    encoder = wt.Recurrent("gru", 192, bidirectional=True, first_norm=True)
    if args.trunks == "additive":
        decoder = wt.AdditiveDecoder(192, attention_dim=128, first_norm=True)
    else:
        decoder = wt.Recurrent("gru", 192, cross=True, first_norm=True)

model = wt.Translator(
    fronts, encoder=encoder, decoder=decoder, label_smoothing=0.1, max_new_tokens=80, score="bleu"
)
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        out="runs/translate", steps=args.steps, batch_size=32, overwrite=True, precision="auto"
    ),
    optim=wt.OptimSettings(lr=2e-3, weight_decay=0.05),
)

model = wt.load("runs/translate/last")  # e.g. in another program
rows = sorted((test[i] for i in range(len(test))), key=lambda row: len(row["text"]))[:64:8]
print({name: round(value, 2) for name, value in model.evaluate(rows).items()})
for row, translation in zip(rows, model.translate([r["text"] for r in rows], beams=4), strict=True):
    print(f"{row['text']}\n  {translation}\n  reference: {row['target']}")
if args.trunks != "fixed":
    print("alignment:", wt.alignment_figure(model, [rows[0]["text"]], "runs/translate/alignment.png"))
