"""Change a trained model: other image sizes, a new look by LoRA, and a file that runs without Python.

    python examples/surgery.py [--steps 800]

A classifier learns handwritten digits; then it reads them at twice the size without learning again, learns negatives
through a twentieth of its weights, and answers from ONNX.
"""

import argparse
import copy
import json
import tempfile

import onnxruntime
import peft
import torch

import worldtokens as wt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
args = parser.parse_args()

train, test = (wt.open_rows("digits", split=s) for s in ("train", "test"))
grey = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
model = wt.Classifier(
    wt.ImageTokenizer(dim=96, patch=4, size=20, class_token=True, **grey),
    wt.Transformer(dim=96, depth=4, heads=3),
    classes=[str(n) for n in range(10)],
    label="class",
)


def learn(model, rows, steps, lr):
    with tempfile.TemporaryDirectory() as out:
        settings = wt.TrainSettings(out=out, steps=steps, precision="auto", cache_mb=64, tensorboard=False)
        wt.train(model, rows, train=settings, optim=wt.OptimSettings(lr=lr))


learn(model, train, args.steps, 2e-3)
print(f"digits of 20 pixels: {model.evaluate(test)['top1']:.1%} right")

# Twice the side, twice the patch: kernel and positions are resized, nothing is trained.
large = wt.resize_images(copy.deepcopy(model), size=40, patch=8)
print(f"the same digits enlarged to 40, patches of 8: {large.evaluate(test)['top1']:.1%} right")

# Negatives: white on black. LoRA learns them beside frozen weights.
read = model.tokenizers["image"].read
negative = [[{**row, "image": 255 - read(row["image"])} for row in rows] for rows in (train, test)]
print(f"negatives, before: {model.evaluate(negative[1])['top1']:.1%} right")
adapter = peft.LoraConfig(r=4, target_modules=r"tokenizers\.image\.proj|trunk\..*\.(qkv|proj|fc1|fc2)")
peft.inject_adapter_in_model(adapter, model)
share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(
    p.numel() for p in model.parameters()
)
learn(model, negative[0], args.steps // 2, 5e-3)
wt.merge_lora(model)
print(f"negatives, after LoRA of {share:.1%} of the weights: {model.evaluate(negative[1])['top1']:.1%} right")

# One file for any number of images, and how to prepare them, for a program without Python.
with tempfile.TemporaryDirectory() as folder:
    path = wt.export_onnx(model, f"{folder}/digits.onnx")
    facts = json.loads(path.with_suffix(".json").read_text())
    session = onnxruntime.InferenceSession(str(path))
few = negative[1][:: max(1, len(test) // 10)]
pixels = torch.stack([row["image"] for row in few]).float() * facts["prepare"]["scale"]
pixels = (pixels - torch.tensor(facts["prepare"]["mean"]).view(3, 1, 1)) / torch.tensor(
    facts["prepare"]["std"]
).view(3, 1, 1)
(logits,) = session.run(None, {"pixels": pixels.numpy()})
for row, best in zip(few, logits.argmax(-1), strict=True):
    print(f"{row['id']}: {facts['output']['classes'][best]} by ONNX, {row['class']} in truth")
