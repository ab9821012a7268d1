"""Change a trained model: another image size, fine-tuning with LoRA, and export to ONNX.

    python examples/surgery.py [--steps 800]

A classifier is trained on handwritten digits. It is resized to twice the image size without training, fine-tuned on
negatives with LoRA of a twentieth of the weights, and run by onnxruntime.
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


def fit(model, rows, steps, lr):
    with tempfile.TemporaryDirectory() as out:
        settings = wt.TrainSettings(out=out, steps=steps, precision="auto", cache_mb=64, tensorboard=False)
        wt.train(model, rows, train=settings, optim=wt.OptimSettings(lr=lr))


fit(model, train, args.steps, 2e-3)
print(f"digits of 20 pixels: {model.evaluate(test)['top1']:.1%} top-1")

# Twice the image size and patch size: patch kernel and positions are resized, nothing is trained.
large = wt.resize_images(copy.deepcopy(model), size=40, patch=8)
print(f"the same digits enlarged to 40, patches of 8: {large.evaluate(test)['top1']:.1%} top-1")

# Negatives: white on black. LoRA trains adapters, all other weights are frozen.
read = model.tokenizers["image"].read
negative = [[{**row, "image": 255 - read(row["image"])} for row in rows] for rows in (train, test)]
print(f"negatives, before: {model.evaluate(negative[1])['top1']:.1%} top-1")
adapter = peft.LoraConfig(r=4, target_modules=r"tokenizers\.image\.proj|trunk\..*\.(qkv|proj|fc1|fc2)")
peft.inject_adapter_in_model(adapter, model)
share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(
    p.numel() for p in model.parameters()
)
fit(model, negative[0], args.steps // 2, 5e-3)
wt.merge_lora(model)
print(f"negatives, after LoRA of {share:.1%} of the weights: {model.evaluate(negative[1])['top1']:.1%} top-1")

# A graph for any batch size, with its preprocessing settings as JSON.
with tempfile.TemporaryDirectory() as folder:
    path = wt.export_onnx(model, f"{folder}/digits.onnx")
    info = json.loads(path.with_suffix(".json").read_text())
    session = onnxruntime.InferenceSession(str(path))
few = negative[1][:: max(1, len(test) // 10)]
scale, mean, std = (torch.tensor(info["preprocess"][k]).view(-1, 1, 1) for k in ("scale", "mean", "std"))
pixels = (torch.stack([row["image"] for row in few]).float() * scale - mean) / std
(logits,) = session.run(None, {"pixels": pixels.numpy()})
for row, best in zip(few, logits.argmax(-1), strict=True):
    print(f"{row['id']}: ONNX {info['output']['classes'][best]}, label {row['class']}")
