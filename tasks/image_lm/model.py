"""A language model that draws: words from left to right, then an image's codes from the upper left to the lower right.

The other way to join text and images (DALL-E, Ramesh et al. 2021): no cross-attention and no noise, one sequence
"caption, start, codes" read causally. Notable:

- Words and codes have an embedding each and a head each, so that no text, whatever it spells, is ever a code, and
  sampling chooses among codes alone.
- A row that has no caption, or loses it in training, begins with one learned null. So sampling may go beyond the
  caption (classifier-free guidance: Ho & Salimans 2022), which here moves the logits of the next code.

Shapes: B rows, K tokens of a caption, N codes of an image, D width, C codes in the book.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.packed import packed, packed_linear
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.diffusion.conditioning import asked
from worldtokens.tasks.diffusion.samplers import guided
from worldtokens.tasks.language.decoding import Sampling, decode
from worldtokens.tasks.language.loss import IGNORE, token_loss
from worldtokens.tasks.seq2seq.context import beside
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens


class ImageLM(Task):
    """Predicts an image's codes one by one, from a caption and the codes before.

        codes = wt.from_autoencoder("runs/autoencoder_emoji/last", dim=256)
        model = wt.ImageLM(wt.TextTokenizer(..., dim=256), codes, wt.Transformer(256, 6, 4))
        model.sample(["red heart"], guidance=3.0)    # (1, 3, H, W) uint8

    Args:
        text: reads the column ``"text"``. With ``causal=False`` a caption's words read each other.
        image: reads the column ``"image"``: a trained `DiscreteTokenizer` with ``causal=True``. It is frozen.
        trunk: a Transformer or Recurrent of the front-ends' width.
        condition_dropout: chance that a row's caption is taken away in training.
        text_weight: what a nat of the caption's own words counts for in the loss beside one of the codes; above 0 the
            model also learns to write captions, and needs a causal front-end for text.

    Raises:
        ValueError: widths or settings that do not fit together.
    """

    metric = ("bits_per_code", "min")

    def __init__(
        self,
        text: TextTokenizer,
        image: DiscreteTokenizer,
        trunk: Part,
        condition_dropout: float = 0.1,
        text_weight: float = 0.0,
    ) -> None:
        super().__init__()
        if len({text.dim, image.dim, trunk.dim}) > 1:
            raise ValueError(
                f"the words are {text.dim} wide, the codes {image.dim}, the trunk {trunk.dim}: give them one width"
            )
        if not image.causal or text.fill or (text_weight and not text.causal):
            raise ValueError(
                "codes are predicted from left to right: the image's front-end needs causal=True, the text's fill=False, "
                "and causal=True where text_weight is above 0"
            )
        if not 0 <= condition_dropout < 1 or text_weight < 0:
            raise ValueError(
                f"condition_dropout={condition_dropout}, text_weight={text_weight}: expected 0 to below 1, and 0 or more"
            )
        self.tokenizers, self.trunk = nn.ModuleDict({"text": text, "image": image.freeze()}), trunk
        self.condition_dropout, self.text_weight = condition_dropout, text_weight
        self.null = nn.Parameter(torch.empty(1, 1, text.dim).normal_(std=0.02))
        self.head = nn.Linear(image.dim, image.codebook_size)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"text": self.text, "image": self.image}

    @property
    def text(self) -> TextTokenizer:
        return self.tokenizers["text"]

    @property
    def image(self) -> DiscreteTokenizer:
        return self.tokenizers["image"]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch of those that have an image, the number of which is what it counts for.

        ``batch["captioned"]`` tells for each of them whether it has a caption with at least one token.
        """
        held = [row for row in rows if "image" in row]
        batch = self._captions(held)
        if held:
            batch["image"] = self.image.collate([row["image"] for row in held])
        return batch

    def _captions(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """The captions alone; where there is none, one id that is never read."""
        batch = Batch(weight=len(rows), has={}, captioned=tuple(len(row.get("text", ())) > 0 for row in rows))
        blank = torch.full((1,), self.text.pad_id)
        if rows:
            ids = [r["text"] if c else blank for r, c in zip(rows, batch["captioned"], strict=True)]
            batch["text"] = self.text.collate(ids)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def prefix(self, batch: Mapping[str, Any], dropped: Sequence[bool] | None = None) -> Tokens:
        """What stands before an image, (B, K, D): the caption, or the null where there is none or it is to be lost.

        Args:
            batch: from `collate`; its images are not looked at.
            dropped: for each row whether its caption is taken away.
        """
        words = self.text(batch["text"])
        dropped = dropped or [False] * len(words)
        gone = [d or not c for d, c in zip(dropped, batch["captioned"], strict=True)]
        if not any(gone):
            return words
        lengths = [1 if g else n for g, (n,) in zip(gone, words.layout.lengths, strict=True)]
        lost = torch.tensor(gone, device=words.device)
        x = torch.where(lost[:, None, None], self.null.to(words.x.dtype), words.x)
        ids = words.ids.masked_fill(lost[:, None], -1)
        return self.text.wrap(x, lengths, words.layout.order, ids=ids)

    def hidden(self, prefix: Tokens, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads read.

        Args:
            prefix: from `prefix`.
            ids: (B, N) codes.

        Returns:
            (B, K, D) at the prefix, padded as it is, and (B, N, D), from which each code is predicted.
        """
        x = self.trunk(beside([prefix, self.image.embedded(ids)], follow=True)).x
        lengths = torch.tensor([n for (n,) in prefix.layout.lengths], device=x.device)
        at = lengths[:, None] + torch.arange(ids.shape[1], device=x.device)
        return x[:, : prefix.shape[1]], x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))

    def forward(self, batch: Batch) -> Tensor:
        """A batch from `collate` -> logits (B, N, C) of each code, from the caption and the codes before it."""
        ids = self.image.encode(batch["image"]).flatten(1)
        return self.head(self.hidden(self.prefix(batch), ids)[1])

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Nats a code, the mean over all codes; without an image a zero that has a graph.

        With `text_weight` ``loss`` has the captions' nats too, weighted and divided by the number of codes as well, and
        ``codes`` and ``words`` are the means of either.
        """
        if not batch["weight"]:
            return {"loss": sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0}
        # drawn on the CPU: what is dropped decides lengths, which the device is not asked for
        dropped = (torch.rand(batch["weight"]) < self.condition_dropout).tolist()
        prefix = self.prefix(batch, dropped)
        ids = self.image.encode(batch["image"]).flatten(1)
        words, codes = self.hidden(prefix, ids)
        total, count = token_loss(codes, self.head.weight, ids, self.head.bias)
        if not self.text_weight:
            return {"loss": total / count}
        # the last word is followed by the image, and a null predicts nothing
        labels = F.pad(prefix.ids[:, 1:].masked_fill(~prefix.valid[:, 1:], IGNORE), (0, 1), value=IGNORE)
        said, heard = token_loss(words, self.text.embedding.weight, labels)
        both = (total + self.text_weight * said) / count
        return {
            "loss": both,
            "codes": (total / count).detach(),
            "words": (said / heard.clamp(min=1)).detach(),
        }

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """What held-out images' codes cost.

        Args:
            rows: those without an image are left out.
            batch_size: rows worked on at a time.

        Returns:
            ``bits_per_code``; ``bits_null``, the same without the caption; ``bits_shuffled``, with the next row's.

        Raises:
            InputError: no row has an image.
        """
        held = [r for r in (rows[i] for i in range(len(rows))) if r.get("image") is not None]
        if not held:
            raise InputError("no row to evaluate has the column 'image'")
        sums = dict.fromkeys(("bits_per_code", "bits_null", "bits_shuffled"), 0.0)
        with evaluating(self):
            for i in range(0, len(held), batch_size):
                raws = [self.read(r) for r in held[i : i + batch_size]]
                after = [*raws[1:], self.read(held[(i + len(raws)) % len(held)])]
                batch = self.collate(raws).to(self.device)
                ids = self.image.encode(batch["image"]).flatten(1)
                ways = self.prefix(batch), self.prefix(batch, [True] * len(raws))
                ways = *ways, self.prefix(self._captions(after).to(self.device))
                for name, prefix in zip(sums, ways, strict=True):
                    codes = self.hidden(prefix, ids)[1]
                    sums[name] += float(token_loss(codes, self.head.weight, ids, self.head.bias)[0])
        count = len(held) * self.image.count * math.log(2)
        return {name: total / count for name, total in sums.items()}

    # ---- what a person asks ------------------------------------------------------------------------------

    def sample(
        self,
        texts: Sequence[str | None] | str | int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance: float = 3.0,
        seed: int | Sequence[int] = 0,
        batch_size: int = 64,
    ) -> Tensor:
        """Images of what is asked for.

        Args:
            texts: captions, None among them for no caption; or a number of images without one.
            temperature, top_k, top_p: see `Sampling`; temperature 0 takes the likeliest code each time.
            guidance: 1 follows the caption as learned, more exaggerates it, 0 ignores it.
            seed: of the draws: the i-th image has seed + i, or its own where a list is given. An image depends on its
                own seed and caption alone, not on its batch.
            batch_size: images drawn at a time.

        Returns:
            (B, 3, H, W) uint8.

        Raises:
            InputError: a caption is not text, or numbers that do not fit.
        """
        rows = asked(texts, {"text": self.text})
        seeds = [seed + i for i in range(len(rows))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(rows):
            raise InputError(f"{len(seeds)} seeds for {len(rows)} images: give one each, or one number")
        drawn = [torch.zeros(0, self.image.count, dtype=torch.int64)]
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                how = Sampling(
                    temperature=temperature, top_k=top_k, top_p=top_p, seed=seeds[i : i + batch_size]
                )
                drawn.append(self._draw(rows[i : i + batch_size], how, guidance))
            ids = torch.cat(drawn)
            parts = [self.image.decode(part, torch.uint8) for part in ids.split(batch_size)]
        return torch.cat(parts).cpu()

    @torch.inference_mode()
    def _draw(self, rows: Sequence[Mapping[str, Any]], how: Sampling, guidance: float) -> Tensor:
        """Rows of captions -> the codes drawn for them, (B, N)."""
        front, b = self.image, len(rows)
        # for every row whether its caption is left out; with guidance each is read both ways
        dropped = [guidance == 0] * b
        both = guidance not in (0, 1) and any(len(row.get("text", ())) for row in rows)
        if both:
            rows, dropped = [*rows, *rows], [False] * b + [True] * b
        prefix = self.prefix(self._captions(rows).to(self.device), dropped)
        many, steps = len(rows), front.count
        cache = self.trunk.cache(many, prefix.shape[1] + 1 + steps)
        trunk = packed(self.trunk, many, steps)
        head = packed_linear(self.head.weight, self.head.bias, many, steps)
        pos = front.embedded(torch.zeros(1, steps, dtype=torch.int64, device=self.device)).pos[0]
        pos = pos * pos.new_tensor([0, 1, 1])  # the cache counts t on
        place = 0

        def next_logits(x: Tensor) -> Tensor:
            logits = head(x).float()
            return guided(*logits.chunk(2), guidance) if both else logits

        def token(ids: Tensor) -> Tokens:
            nonlocal place
            x, here = front.embed(ids[:, None], place), pos[place].expand(len(ids), 1, -1)
            place += 1
            return front.wrap(x, (1,) * len(ids), "causal", ids=ids[:, None], pos=here)

        def step(ids: Tensor) -> Tensor:
            tokens = token(ids.repeat(2) if both else ids)
            return next_logits(trunk(cache.follow(tokens), cache=cache).x[:, 0])

        start = token(torch.full((many,), front.start_id, device=self.device))
        x = self.trunk(beside([prefix, start], follow=True), cache=cache).x
        last = torch.tensor([n for (n,) in prefix.layout.lengths], device=x.device)
        logits = next_logits(x[torch.arange(many, device=x.device), last])
        return torch.tensor([c.ids for c in decode(step, logits, steps, how)])
