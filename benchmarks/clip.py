"""Training of the demo's CLIP and of an open_clip model of the same dim, depth and steps, on the same batches.

Both towers of open_clip's model have the dim and depth of our single shared Transformer; patches, vocabulary, optimizer,
schedule and precision are equal. open_clip's model has its own loss, ours has the additions of the recipe. Every batch is
used by both, interleaved, so that load of the machine affects both alike.

    python benchmarks/clip.py [--steps N] [--precision fp32|bf16|auto] [--peer mapped [--same-loss]]

`--peer mapped` trains open_clip's model through `wt.from_open_clip`, which computes the same
(tests/pretrained/open_clip/test_load.py) without padding, four times as fast: for its R@10, not for its speed. With
`--same-loss` it also has our recipe's standardisation and label smoothing, so that only the architectures differ.

Prints held-out R@10 of both, chance, and the ratio of training samples/s.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import time

import torch
from timing import record

from worldtokens.data import samples
from worldtokens.tasks.metrics.retrieval import rank_metrics, ranks
from worldtokens.training.data import Batches, BatchPlan
from worldtokens.training.optim import EMA, lr_at, make_optimizer, optimizer_step
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import autocast_type


def peer_of(model, context, vocabulary=None, end=None):
    """An open_clip CLIP with the same width, depth, heads, patch, image size and vocabulary."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    (image, text), cfg = front_ends(model), model.trunk.cfg
    vision = CLIPVisionCfg(
        layers=cfg.depth,
        width=cfg.dim,
        head_width=cfg.head_dim,
        patch_size=image.patch[0],
        image_size=image.size[0],
        mlp_ratio=cfg.mlp_dim / cfg.dim,
    )
    text_config = CLIPTextCfg(
        context_length=context,
        vocab_size=vocabulary or text.vocab_size,
        width=cfg.dim,
        heads=cfg.heads,
        layers=cfg.depth,
        mlp_ratio=cfg.mlp_dim / cfg.dim,
        pool_type="eos",
        eos_id=end or text.end_id,
        pad_id=end or text.end_id,
    )
    return CLIP(model.dim, vision, text_config)


def front_ends(model):
    """The image and text front-ends, without the `TokenReducer` around them."""
    return [getattr(t, "tokenizer", t) for t in (model.tokenizers["image"], model.tokenizers["text"])]


class Mapped(torch.nn.Module):
    """open_clip's model with its own initial weights, computed by our modules without padding."""

    def __init__(self, model, same_loss=False) -> None:
        super().__init__()
        import worldtokens as wt

        image, text = front_ends(model)
        self.front, self.image = [text], [image]
        # from_open_clip expects CLIP's vocabulary; the rows of our smaller one are its first
        clip = wt.TextTokenizer.clip(1)
        self.net = wt.from_open_clip(peer_of(model, text.context, clip.vocab_size, clip.end_id))
        if same_loss:
            self.net.label_smoothing, self.net.standardizers = (
                model.label_smoothing,
                copy.deepcopy(model.standardizers),
            )
        tokenizer = self.net.tokenizers["text"]
        tokenizer.embedding = torch.nn.Embedding.from_pretrained(
            tokenizer.embedding.weight[: text.vocab_size].detach().clone(), freeze=False
        )

    def batch(self, batch):
        pixels = Peer.pixels(self, batch["image"])
        return type(batch)(batch, image=pixels)

    def loss(self, batch):
        return self.net.loss(self.batch(batch))

    @torch.no_grad()
    def embed(self, column, sources):
        tokenizer = self.image[0] if column == "image" else self.front[0]
        batch = tokenizer.collate([tokenizer.read(s) for s in sources])
        return self.net.encode(column, Peer.pixels(self, batch) if column == "image" else batch)


class Peer(torch.nn.Module):
    """open_clip's model on our batches: normalised pixels, ids padded to the context, its own loss."""

    def __init__(self, model) -> None:
        super().__init__()
        from open_clip.loss import ClipLoss

        # in lists, so that they are not registered as submodules
        self.image, self.text = ([front] for front in front_ends(model))
        self.context = self.text[0].context
        self.net, self.criterion = peer_of(model, self.context), ClipLoss()

    def pixels(self, batch):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.image[0].mean, self.image[0].std))
        return (batch["pixels"].float() / 255 - mean) / std

    def ids(self, batch):
        ids, lengths = batch["ids"], torch.tensor(batch["lengths"])
        ids = torch.nn.functional.pad(ids, (0, self.context - ids.shape[1]))
        # padding must not be the end token, since its pooling takes the first one
        return ids.masked_fill(torch.arange(self.context) >= lengths[:, None], 1)

    def loss(self, batch):
        with torch.no_grad():
            self.net.logit_scale.clamp_(0, 4.6052)
        a, b, scale = self.net(self.pixels(batch["image"]), self.ids(batch["text"]))
        return {"loss": self.criterion(a.float(), b.float(), scale)}

    @torch.no_grad()
    def embed(self, column, sources):
        tokenizer = self.image[0] if column == "image" else self.text[0]
        batch = tokenizer.collate([tokenizer.read(s) for s in sources])
        if column == "image":
            return self.net.encode_image(self.pixels(batch), normalize=True)
        return self.net.encode_text(self.ids(batch), normalize=True)


def held_out(model, rows):
    """Retrieval metrics text-to-image and image-to-text over all captions, as in `CLIP.evaluate`."""
    images = torch.cat([model.embed("image", [r["image"] for r in part]) for part in chunks(rows)])
    captions = [(i, c) for i, r in enumerate(rows) for c in r["text"]]
    texts = torch.cat([model.embed("text", [c for _, c in part]) for part in chunks(captions)])
    owner, own = [i for i, _ in captions], list(range(len(rows)))
    text_to_image = rank_metrics(ranks(texts, images, owner, own), owner, own)
    image_to_text = rank_metrics(ranks(images, texts, own, owner), own, owner)
    return text_to_image, image_to_text


def chunks(items, size=64):
    it = iter(items)
    return iter(lambda: list(itertools.islice(it, size)), [])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipe", default="clip_emoji")
    p.add_argument("--steps", type=int)
    p.add_argument("--precision", default=None)
    p.add_argument("--peer", choices=["itself", "mapped"], default="itself")
    p.add_argument("--same-loss", action="store_true")
    args, changes = p.parse_known_args()
    if args.same_loss and args.peer != "mapped":
        p.error("--same-loss requires --peer mapped")
    recipe = Recipe.read(args.recipe, [*changes, "--train.out", '"unused"'])
    rows, _ = recipe.rows()
    task, augment = recipe.build(rows)
    torch.manual_seed(recipe.train.seed)
    models = {
        "worldtokens": task,
        "open_clip": Mapped(task, args.same_loss) if args.peer == "mapped" else Peer(task),
    }
    steps = args.steps or recipe.train.steps
    half = autocast_type(args.precision or recipe.train.precision, torch.device("cpu"))
    plan = BatchPlan(len(rows), recipe.train.batch_size, seed=recipe.train.seed)
    batches = iter(Batches(task, rows, plan, augment, recipe.train.cache_mb * 2**20))
    parts = {
        name: (m.train(), make_optimizer(m, recipe.optim), [q for q in m.parameters() if q.requires_grad])
        for name, m in models.items()
    }
    # EMA of the weights if the recipe has it: for both; open_clip's model is also evaluated without
    averages = {k: EMA(m, recipe.optim.ema) for k, m in models.items() if recipe.optim.ema is not None}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    seconds = {name: [] for name in models}
    for name, m in models.items():
        print(f"{name:12} {sum(q.numel() for q in m.parameters()) / 1e6:.2f} M parameters")
    for step in range(steps):
        batch = next(batches)[0]
        order = list(parts) if step % 2 == 0 else list(parts)[::-1]
        lr = lr_at(step, steps, recipe.optim)
        for name in order:
            model, optimizer, params = parts[name]
            start = time.perf_counter()
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                loss = model.loss(batch)["loss"]
            loss.backward()
            optimizer_step(optimizer, params, lr, recipe.optim.max_grad_norm, loss.detach(), scaler)
            if averages:
                averages[name].update(step)
            seconds[name].append(time.perf_counter() - start)
        if step % 50 == 0 or step == steps - 1:
            means = {k: sum(v[-50:]) / len(v[-50:]) for k, v in seconds.items()}
            print(
                f"step {step:5}  " + "  ".join(f"{k} {v * 1e3:.0f} ms" for k, v in means.items()), flush=True
            )
    test = samples.open("emoji", split="test")
    print(f"\n{str(len(test)) + ' held-out images':32}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'median':>8}")
    found = []
    for name, (model, *_rest) in parts.items():
        model.eval()
        if averages:
            if name == "open_clip":
                plain_tens = " / ".join(f"{100 * f['R@10']:.1f}" for f in held_out(model, test))
                print(f"open_clip without EMA, R@10: {plain_tens} %")
                found.append(f"open_clip without EMA {plain_tens} %")
            averages[name].copy_to_model()
        both = held_out(model, test)
        tens = " / ".join(f"{100 * figures['R@10']:.1f}" for figures in both)
        found.append(f"{name} {tens} %")
        for direction, figures in zip(("text-to-image", "image-to-text"), both, strict=True):
            cells = "".join(f"{100 * figures[f'R@{k}']:8.1f}" for k in (1, 5, 10))
            print(f"{name + ', ' + direction:32}{cells}{figures['median_rank']:8.0f}")
            if name == list(parts)[-1]:
                cells = "".join(f"{100 * figures[f'chance@{k}']:8.1f}" for k in (1, 5, 10))
                print(f"{'chance, ' + direction:32}{cells}")
    warm = slice(min(2, steps - 1), None)
    ratio = [b / a for a, b in zip(seconds["worldtokens"][warm], seconds["open_clip"][warm], strict=True)]
    ratio = torch.tensor(ratio).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    speed = {k: recipe.train.batch_size / torch.tensor(v).median().item() for k, v in seconds.items()}
    print(
        f"\ntraining step: {speed['worldtokens']:.0f} and {speed['open_clip']:.0f} samples/s, "
        f"ratio {ratio[1]:.2f} (10 to 90 %: {ratio[0]:.2f} to {ratio[2]:.2f})"
    )
    record(
        {
            "what": f"CLIP training, {steps} steps, bf16",
            "ours": f"{speed['worldtokens']:.0f} pairs/s",
            "peer": f"open_clip: {speed['open_clip']:.0f}",
            "ratio": f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})",
            "note": "R@10 text-to-image / image-to-text: " + ", ".join(found),
        }
    )


if __name__ == "__main__":
    main()
