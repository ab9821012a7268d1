"""Autoregressive text-to-image generation: caption tokens, then an image's codes in raster order.

As in DALL-E (Ramesh et al. 2021): no cross-attention and no noise, one sequence "caption, start, codes" with causal
attention. Notable:

- Text and codes have separate embeddings and separate heads, so text never contains a code, and sampling chooses among
  codes only.
- A row without a caption, or with a dropped one, begins with a learned null embedding. This enables classifier-free
  guidance (Ho & Salimans 2022) on the logits of the next code.

Shapes: B rows, K tokens of a caption, N codes of an image, D width, C codes in the codebook.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.prepacked import prepacked, prepacked_linear
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating, zero_loss
from worldtokens.tasks.diffusion.conditioning import read_conditions
from worldtokens.tasks.diffusion.samplers import guide
from worldtokens.tasks.language.decoding import Sampling, decode
from worldtokens.tasks.language.loss import IGNORE, token_loss
from worldtokens.tasks.seq2seq.context import concat_tokens
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokens import Tokens


class ImageLM(Task):
    """Predicts an image's codes one by one from the caption and the previous codes.

        codes = wt.from_autoencoder("runs/autoencoder_emoji/last", dim=256)
        model = wt.ImageLM(wt.TextTokenizer(..., dim=256), codes, wt.Transformer(256, 6, 4))
        model.sample(["red heart"], guidance=3.0)    # (1, 3, H, W) uint8

    Args:
        text: tokenizer of the column ``"text"``. With ``causal=False`` attention within a caption is bidirectional.
        image: tokenizer of the column ``"image"``: a trained `DiscreteTokenizer` with ``causal=True``. It is frozen.
        trunk: a Transformer or Recurrent of the tokenizers' width.
        condition_dropout: probability that a row's caption is dropped in training, 0 to below 1.
        text_weight: weight of the captions' cross-entropy in the loss; above 0 the model also learns a language model
            of captions, and needs a causal text tokenizer.

    Raises:
        ValueError: widths or settings that do not match.
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
                f"text has dim={text.dim}, image dim={image.dim}, the trunk dim={trunk.dim}: expected one width"
            )
        if not image.causal or text.pad_to_context or (text_weight and not text.causal):
            raise ValueError(
                "codes are causal: the image tokenizer needs causal=True, the text tokenizer pad_to_context=False, "
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
        """Collates the rows with an image into one batch; its weight is their number.

        ``batch["captioned"]`` is a tuple: for each row, whether it has a caption with at least one token.
        """
        with_image = [row for row in rows if "image" in row]
        batch = self._collate_captions(with_image)
        if with_image:
            batch["image"] = self.image.collate([row["image"] for row in with_image])
        return batch

    def _collate_captions(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates captions only; a missing caption becomes one padding id, which is not used."""
        batch = Batch(weight=len(rows), has={}, captioned=tuple(len(row.get("text", ())) > 0 for row in rows))
        padding = torch.full((1,), self.text.pad_id)
        if rows:
            ids = [r["text"] if c else padding for r, c in zip(rows, batch["captioned"], strict=True)]
            batch["text"] = self.text.collate(ids)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def prefix(self, batch: Mapping[str, Any], dropped: Sequence[bool] | None = None) -> Tokens:
        """Tokens before the image, (B, K, D): the caption, or the null embedding if it is missing or dropped.

        Args:
            batch: from `collate`; its images are not used.
            dropped: for each row, whether its caption is dropped.
        """
        tokens = self.text(batch["text"])
        dropped = dropped or [False] * len(tokens)
        missing = [d or not c for d, c in zip(dropped, batch["captioned"], strict=True)]
        if not any(missing):
            return tokens
        lengths = [1 if m else n for m, (n,) in zip(missing, tokens.layout.lengths, strict=True)]
        mask = torch.tensor(missing, device=tokens.device)
        x = torch.where(mask[:, None, None], self.null.to(tokens.x.dtype), tokens.x)
        ids = tokens.ids.masked_fill(mask[:, None], -1)
        return self.text.wrap(x, lengths, tokens.layout.order, ids=ids)

    def hidden(self, prefix: Tokens, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states before the heads.

        Args:
            prefix: from `prefix`.
            ids: (B, N) codes.

        Returns:
            (B, K, D) at the prefix, with its padding, and (B, N, D), from which each code is predicted.
        """
        x = self.trunk(concat_tokens([prefix, self.image.embed_ids(ids)], sequential=True)).x
        lengths = torch.tensor([n for (n,) in prefix.layout.lengths], device=x.device)
        indices = lengths[:, None] + torch.arange(ids.shape[1], device=x.device)
        return x[:, : prefix.shape[1]], x.gather(1, indices[..., None].expand(-1, -1, x.shape[2]))

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, N, C) of each code, given the caption and the codes before it."""
        ids = self.image.encode(batch["image"]).flatten(1)
        return self.head(self.hidden(self.prefix(batch), ids)[1])

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy in nats per code; a zero with a graph if no row has an image.

        With `text_weight`, ``loss`` includes the captions' weighted cross-entropy, also divided by the number of codes;
        ``code_loss`` and ``text_loss`` are the separate means.
        """
        if not batch["weight"]:
            return {"loss": zero_loss(self)}
        # drawn on the CPU: dropped rows determine lengths, which are needed without a device sync
        dropped = (torch.rand(batch["weight"]) < self.condition_dropout).tolist()
        prefix = self.prefix(batch, dropped)
        ids = self.image.encode(batch["image"]).flatten(1)
        text, codes = self.hidden(prefix, ids)
        total, count = token_loss(codes, self.head.weight, ids, self.head.bias)
        if not self.text_weight:
            return {"loss": total / count}
        # the caption's last token is followed by the image, and a null embedding predicts nothing
        assert prefix.ids is not None
        labels = F.pad(prefix.ids[:, 1:].masked_fill(~prefix.valid[:, 1:], IGNORE), (0, 1), value=IGNORE)
        text_total, text_count = token_loss(text, self.text.embedding.weight, labels)
        return {
            "loss": (total + self.text_weight * text_total) / count,
            "code_loss": (total / count).detach(),
            "text_loss": (text_total / text_count.clamp(min=1)).detach(),
        }

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Cross-entropy of held-out images' codes in bits per code.

        Args:
            rows: those without an image are skipped.
            batch_size: rows per forward pass.

        Returns:
            ``bits_per_code``; ``bits_null``, without the caption; ``bits_shuffled``, with the next row's caption.

        Raises:
            InputError: no row has an image.
        """
        held_out = [r for r in (rows[i] for i in range(len(rows))) if r.get("image") is not None]
        if not held_out:
            raise InputError("no row to evaluate has the column 'image'")
        sums = dict.fromkeys(("bits_per_code", "bits_null", "bits_shuffled"), 0.0)
        with evaluating(self):
            for i in range(0, len(held_out), batch_size):
                raws = [self.read(r) for r in held_out[i : i + batch_size]]
                shifted = [*raws[1:], self.read(held_out[(i + len(raws)) % len(held_out)])]
                batch = self.collate(raws).to(self.device)
                ids = self.image.encode(batch["image"]).flatten(1)
                prefixes = (
                    self.prefix(batch),
                    self.prefix(batch, [True] * len(raws)),
                    self.prefix(self._collate_captions(shifted).to(self.device)),
                )
                for name, prefix in zip(sums, prefixes, strict=True):
                    codes = self.hidden(prefix, ids)[1]
                    sums[name] += float(token_loss(codes, self.head.weight, ids, self.head.bias)[0])
        count = len(held_out) * self.image.count * math.log(2)
        return {name: total / count for name, total in sums.items()}

    # ---- inference ---------------------------------------------------------------------------------------

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
        """Samples images.

        Args:
            texts: captions, None for no caption; or a number of unconditional images.
            temperature, top_k, top_p: see `Sampling`; temperature 0 is greedy.
            guidance: classifier-free guidance scale: 1 samples the conditional model, above 1 strengthens the caption,
                0 ignores it.
            seed: seed of the sampling: the i-th image uses seed + i, or a list gives one each. An image depends on its
                own seed and caption only, not on its batch.
            batch_size: images per forward pass.

        Returns:
            (B, 3, H, W) uint8.

        Raises:
            InputError: a caption is not text, or a setting is out of its range.
        """
        rows = read_conditions(texts, {"text": self.text})
        seeds = [seed + i for i in range(len(rows))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(rows):
            raise InputError(f"{len(seeds)} seeds for {len(rows)} images: give one each, or one number")
        codes = [torch.zeros(0, self.image.count, dtype=torch.int64)]
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                sampling = Sampling(
                    temperature=temperature, top_k=top_k, top_p=top_p, seed=seeds[i : i + batch_size]
                )
                codes.append(self._sample_codes(rows[i : i + batch_size], sampling, guidance))
            ids = torch.cat(codes)
            parts = [self.image.decode(part, torch.uint8) for part in ids.split(batch_size)]
        return torch.cat(parts).cpu()

    @torch.inference_mode()
    def _sample_codes(self, rows: Sequence[Mapping[str, Any]], sampling: Sampling, guidance: float) -> Tensor:
        """Samples codes (B, N) for rows of captions."""
        front, b = self.image, len(rows)
        # for every row, whether its caption is dropped; guidance runs each row with and without it
        dropped = [guidance == 0] * b
        both = guidance not in (0, 1) and any(len(row.get("text", ())) for row in rows)
        if both:
            rows, dropped = [*rows, *rows], [False] * b + [True] * b
        prefix = self.prefix(self._collate_captions(rows).to(self.device), dropped)
        total, steps = len(rows), front.count
        cache = self.trunk.cache(total, prefix.shape[1] + 1 + steps)
        trunk = prepacked(self.trunk, total, steps)
        head = prepacked_linear(self.head.weight, self.head.bias, total, steps)
        pos = front.embed_ids(torch.zeros(1, steps, dtype=torch.int64, device=self.device)).pos[0]
        pos = pos * pos.new_tensor([0, 1, 1])  # the cache continues t
        index = 0

        def next_logits(x: Tensor) -> Tensor:
            logits = head(x).float()
            if not both:
                return logits
            with_text, without = logits.chunk(2)
            return guide(with_text, without, guidance)

        def token(ids: Tensor) -> Tokens:
            nonlocal index
            x, position = front.embed(ids[:, None], index), pos[index].expand(len(ids), 1, -1)
            index += 1
            return front.wrap(x, (1,) * len(ids), "causal", ids=ids[:, None], pos=position)

        def step(ids: Tensor) -> Tensor:
            tokens = token(ids.repeat(2) if both else ids)
            return next_logits(trunk(cache.offset(tokens), cache=cache).x[:, 0])

        start = token(torch.full((total,), cast(int, front.start_id), device=self.device))
        x = self.trunk(concat_tokens([prefix, start], sequential=True), cache=cache).x
        last = torch.tensor([n for (n,) in prefix.layout.lengths], device=x.device)
        logits = next_logits(x[torch.arange(total, device=x.device), last])
        return torch.tensor([c.ids for c in decode(step, logits, steps, sampling)])
