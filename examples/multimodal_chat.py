"""Train a small multimodal language model on questions about images: about three minutes on one core.

    python examples/multimodal_chat.py

The questions are about emoji: name, group, skin tone, which of two. The questions at the end are about held-out images.
`worldtokens train vlm_smollm2` trains the same on top of a published language model.
"""

import argparse
from pathlib import Path

import worldtokens as wt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

train, test = (wt.samples.open("emoji_questions", split=side) for side in ("train", "test"))
text = wt.TextTokenizer.train(train.texts(), vocab_size=1500, dim=128, context=96)
model = wt.MultimodalLM(
    wt.LanguageModel(text, wt.Transformer(dim=128, depth=3, heads=4, rope=1)),
    tokenizers={"image": wt.ImageTokenizer(dim=128, patch=16, size=64, preprocess={"draft": False})},
    encoders={"image": wt.Transformer(dim=128, depth=3, heads=4, rope=2)},
    projectors={"image": wt.Projector(dim=128)},
    chat_template="{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A:"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
)
wt.train(
    model,
    train,
    train=wt.TrainSettings(
        out="runs/multimodal_chat",
        steps=args.steps,
        batch_size=32,
        overwrite=True,
        cache_mb=256,
        precision="auto",
    ),
    optim=wt.OptimSettings(lr=1e-3, weight_decay=0.1, warmup=0.1),
)

model = wt.load("runs/multimodal_chat/last")  # e.g. in another program
for row in test[:: len(test) // 10]:
    question, answer = row["messages"]
    text = " ".join(part if isinstance(part, str) else "[image]" for part in question["content"])
    print(f"{text} {model.chat([question], 16).strip()!r}, reference {answer['content']!r}")

# images may be paths, too
file = Path("runs/multimodal_chat/image.png")
file.write_bytes(
    next(part["image"] for part in test[0]["messages"][0]["content"] if not isinstance(part, str))
)
print(
    "image from a path:",
    model.chat([{"role": "user", "content": [{"image": file}, "What is this?"]}], 16).strip(),
)
