"""Semantic search of emoji with published weights: python examples/sentence_search.py "keeps rain off"."""

import argparse

import worldtokens as wt
from worldtokens.data import samples

QUERIES = [
    "a place where sick people are treated",
    "something sweet to eat",
    "I am so angry",
    "it keeps rain off",
]
parser = argparse.ArgumentParser()
parser.add_argument("query", nargs="*", default=QUERIES)
parser.add_argument("--steps", type=int, help="number of queries; nothing is trained")
args = parser.parse_args()

model = wt.from_hf(wt.weights("minilm"))  # all-MiniLM-L6-v2, downloaded once
rows = samples.open("emoji", skin_tones=False)
names = model.embed([row["text"][0] for row in rows])
queries = args.query[: args.steps]
for query, order in zip(queries, model.rank(queries, names).order.tolist(), strict=True):
    print(f"{query}: " + ", ".join(f"{rows[i]['char']} {rows[i]['text'][0]}" for i in order[:4]))
