"""Images out of noise, told what to show: rectified flow with a DiT trunk (Liu et al. 2023; Peebles & Xie 2023).

An image x1 and noise x0 are joined by a straight line, x_t = (1 - t) x0 + t x1, and the trunk learns its direction,
x1 - x0. Time, and the mean of what is asked for, modulate every block (adaLN-zero); the words themselves are read by
cross-attention. With some chance a row's condition is taken away in training and a learned null stands in its place, so
that sampling may go beyond the condition (classifier-free guidance).

Shapes: B rows, N tokens of an image, K tokens of a condition, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.diffusion.conditioning import asked, nulls, with_nulls
from worldtokens.tasks.diffusion.samplers import Sampler, guided, heun, times
from worldtokens.tasks.diffusion.spaces import space_of
from worldtokens.tasks.seq2seq.model import beside, context_width, spread
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import sincos_positions
from worldtokens.tokens import Tokens

CLOCK = 256  # channels that time is told in


class Diffusion(Task):
    """Draws one column from all the others.

        model = wt.Diffusion(
            {"image": wt.ImageTokenizer(256, patch=4, size=32), "text": wt.TextTokenizer(...)},
            trunk=wt.Transformer(256, 6, 4, modulated=True, cross=True, rope=2),
            encoder=wt.Transformer(256, 2, 4),
        )
        model.sample(["red heart"], guidance=3.0)[0].save("heart.png")

    Args:
        tokenizers: front-ends by column. With the target alone the model has no condition.
        trunk: ``Transformer(modulated=True)`` of the target's width, with ``cross=True`` where other columns are read.
        encoder: what the condition's tokens go through first, or None.
        target: the column that is drawn: an `ImageTokenizer` of one size (flow over pixels) or a trained
            `DiscreteTokenizer` (flow over its codes).
        condition_dropout: chance that a row's whole condition is taken away in training.
        timestep_sampling: how times are drawn in training: ``"logit_normal"``, more from the middle (Esser et al. 2024), or
            ``"uniform"``.
        timestep_mean: of ``"logit_normal"``, the mean of log(t / (1 - t)): below 0 more of the times lie near the noise.
        prediction: what the trunk's last map says: the ``"velocity"``, or the image itself, ``"data"``, from which the
            velocity follows (Li & He 2025): better where patches are large. The loss is that of velocities in either case.

    Raises:
        ValueError: columns, widths or settings that do not fit together.
    """

    def __init__(
        self,
        tokenizers: dict[str, Tokenizer],
        trunk: Part,
        encoder: Part | None = None,
        target: str = "image",
        condition_dropout: float = 0.1,
        timestep_sampling: str = "logit_normal",
        timestep_mean: float = 0.0,
        prediction: str = "velocity",
    ) -> None:
        super().__init__()
        if target not in tokenizers:
            raise ValueError(f"no column {target!r} to draw, got {sorted(tokenizers)}")
        if (
            timestep_sampling not in ("logit_normal", "uniform")
            or prediction not in ("velocity", "data")
            or not 0 <= condition_dropout < 1
        ):
            raise ValueError(
                f"timestep_sampling={timestep_sampling!r}, prediction={prediction!r}, condition_dropout={condition_dropout}: expected 'logit_normal' or 'uniform', 'velocity' or "
                "'data', and 0 to below 1"
            )
        self.tokenizers, self.trunk, self.encoder = nn.ModuleDict(tokenizers), trunk, encoder
        self.target, self.sources = target, [c for c in tokenizers if c != target]
        self.condition_dropout, self.timestep_sampling, self.timestep_mean, self.prediction = (
            condition_dropout,
            timestep_sampling,
            timestep_mean,
            prediction,
        )
        self._check_widths()
        dim = trunk.dim
        self.space = space_of(self.front)
        self.clock = nn.Sequential(nn.Linear(CLOCK, dim), nn.SiLU(), nn.Linear(dim, dim))
        for layer in (self.clock[0], self.clock[2]):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.out = nn.Linear(dim, self.space.values)
        nn.init.zeros_(self.out.weight)  # what it says first is the mean: zero
        nn.init.zeros_(self.out.bias)
        self.null = self.summary = None
        if self.sources:
            width = context_width(trunk)
            self.null = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
            self.summary = nn.Linear(width, dim)
            nn.init.normal_(self.summary.weight, std=0.02)
            nn.init.zeros_(self.summary.bias)

    def _check_widths(self) -> None:
        cfg = getattr(self.trunk, "cfg", None)
        if cfg is None or not cfg.modulated or cfg.cross != bool(self.sources):
            raise ValueError(
                f"the columns {self.sources} are read, so the trunk has to be a Transformer with modulated=True and "
                f"cross={bool(self.sources)}"
            )
        if self.front.dim != self.trunk.dim:
            raise ValueError(
                f"the {self.target!r} tokens are {self.front.dim} wide, the trunk {self.trunk.dim}"
            )
        widths = {c: self.tokenizers[c].dim for c in self.sources}
        reader = context_width(self.trunk) if self.encoder is None else self.encoder.dim
        if set(widths.values()) - {reader} or (
            self.encoder and self.encoder.dim != context_width(self.trunk)
        ):
            raise ValueError(
                f"the condition's tokens are {widths} wide, the encoder "
                f"{self.encoder and self.encoder.dim}, and the trunk reads {context_width(self.trunk)}: give them one width"
            )

    @property
    def front(self) -> Tokenizer:
        """The target's front-end."""
        return self.tokenizers[self.target]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch, which counts for as many rows as have an image."""
        batch = super().collate(rows)
        batch["rows"] = len(rows)
        batch["weight"] = sum(self.target in row for row in rows)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def condition(self, batch: Mapping[str, Any], dropped: Sequence[bool] | None = None) -> Tokens | None:
        """What the trunk reads, (B, K, D): the null where a row has no condition, or is to lose it.

        Args:
            batch: from `collate`; its target, if any, is not looked at.
            dropped: for each row whether its condition is taken away.
        """
        if not self.sources:
            return None
        rows, has = batch["rows"], batch["has"]
        parts = [spread(self.tokenizers[c](batch[c]), has.get(c), rows) for c in self.sources if c in batch]
        if not parts:
            return nulls(self.null, [True] * rows)
        context = beside(parts)
        return with_nulls(context if self.encoder is None else self.encoder(context), self.null, dropped)

    def velocity(self, x: Tensor, t: Tensor, context: Tokens | None = None) -> Tensor:
        """Where x is going at time t.

        Args:
            x: (B, ...), an image in the target's space, from noise to clean.
            t: (B,) in [0, 1].
            context: from `condition`.

        Returns:
            Like x, float32.
        """
        told = self.clock(sincos_positions(1000 * t.float()[:, None], CLOCK).to(self.out.weight.dtype))
        if context is not None:
            told = told + self.summary(context.pool("mean"))
        tokens = self.space.embed(self.front, x.to(self.out.weight.dtype))
        # images fill their rows, so they read each other without a mask, whatever the condition's lengths are
        kind = "full" if self.trunk.cfg.window is None else None
        out = self.out(self.trunk(tokens, context=context, condition=told, kind=kind).x)
        out = self.space.unfold(self.front, out.float(), x)
        if self.prediction == "velocity":
            return out
        return (out - x) / self._left(t, x)

    def _left(self, t: Tensor, x: Tensor) -> Tensor:
        """The time that is left, shaped as x; held above 0.05 in training, since all errors are divided by it."""
        return (1 - _like(t, x)).clamp(min=0.05 if self.training else 1e-3)

    def errors(self, clean: Tensor, noise: Tensor, t: Tensor, context: Tokens | None) -> Tensor:
        """(B,) the mean squared error of each row's velocity, at the given noise and times."""
        along = _like(t, clean)
        made = self.velocity((1 - along) * noise + along * clean, t, context)
        wanted = clean - noise
        if self.prediction == "data":  # the same divisor on both sides, so that a right image has no error
            wanted = wanted * (1 - along) / self._left(t, clean)
        return (made - wanted).square().flatten(1).mean(1)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The mean squared error of the velocity at random times; without an image a zero that has a graph."""
        if not batch["weight"]:
            zero = sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0
            return {"loss": zero}
        clean = self.space.clean(self.front, batch[self.target])
        b, has = len(clean), batch["has"].get(self.target)
        # drawn on the CPU: what is dropped decides lengths, which the device is not asked for
        dropped = (torch.rand(batch["rows"]) < self.condition_dropout).tolist()
        t = (
            (torch.randn(b) + self.timestep_mean).sigmoid()
            if self.timestep_sampling == "logit_normal"
            else torch.rand(b)
        )
        context = self.condition(batch, dropped)
        if has is not None and context is not None:
            context = context[list(has)]
        each = self.errors(clean, torch.randn_like(clean), t.to(clean.device), context)
        return {"loss": each.mean()}

    # ---- what a person asks ------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        texts: Sequence[Any] | Mapping[str, Sequence[Any]] | int,
        steps: int = 25,
        guidance: float = 3.0,
        seed: int | Sequence[int] = 0,
        size: int | Sequence[int] | None = None,
        sampler: Sampler = heun,
        shift: float = 1.0,
        batch_size: int = 64,
    ) -> list[Image.Image]:
        """Images of what is asked for.

        Args:
            texts: what the condition's front-end reads, None among them for no condition; by column where there are
                several, ``{"text": [...], "audio": [...]}``; or a number of images without condition.
            steps: of the sampler.
            guidance: 1 follows the condition as learned, more exaggerates it, 0 ignores it.
            seed: of the noise: the i-th image has seed + i, or its own where a list is given. An image depends on its
                own seed and condition alone, not on its batch.
            size: side in pixels, or (height, width); None: that of training.
            sampler: `heun`, `euler` or another of their kind.
            shift: see `samplers.times`.
            batch_size: images drawn at a time.

        Raises:
            InputError: a condition cannot be read, or numbers that do not fit.
        """
        rows = asked(texts, {c: self.tokenizers[c] for c in self.sources})
        seeds = [seed + i for i in range(len(rows))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(rows):
            raise InputError(f"{len(seeds)} seeds for {len(rows)} images: give one each, or one number")
        shape, schedule = self.space.shape(self.front, size), times(steps, shift)
        out = []
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                noise = torch.stack([_noise(shape, s) for s in seeds[i : i + batch_size]]).to(self.device)
                batch = self.collate(rows[i : i + batch_size]).to(self.device)
                x = sampler(self._guided(batch, guidance), noise, schedule)
                out += self.space.pictures(self.front, x)
        return out

    def _guided(self, batch: Batch, guidance: float) -> Any:
        """The velocity that a sampler follows."""
        context = self.condition(batch)
        if context is None or guidance == 1:
            return lambda x, t: self.velocity(x, t, context)
        null = nulls(self.null, [True] * batch["rows"])
        if guidance == 0:
            return lambda x, t: self.velocity(x, t, null)
        both = Tokens.stack([context, null])

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return guided(
                *self.velocity(x.repeat(2, *[1] * (x.ndim - 1)), t.repeat(2), both).chunk(2), guidance
            )

        return velocity

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, looks: int = 4
    ) -> dict[str, float]:
        """The loss on held-out rows, always at the same times and noise.

        Args:
            rows: those without an image are left out.
            looks: times at which each row is looked at, spread evenly over (0, 1).

        Returns:
            ``loss``; and where there is a condition ``loss_null``, without it, and ``loss_shuffled``, with the next row's.

        Raises:
            InputError: no row has an image.
        """
        held = [r for r in (rows[i] for i in range(len(rows))) if r.get(self.target) is not None]
        if not held:
            raise InputError(f"no row to evaluate has the column {self.target!r}")
        sums = {}
        with evaluating(self):
            for i in range(0, len(held), batch_size):
                raws = [self.read(r) for r in held[i : i + batch_size]]
                after = [*raws[1:], self.read(held[(i + len(raws)) % len(held)])]
                batch = self.collate(raws).to(self.device)
                ways = {"loss": self.condition(batch)}
                if self.sources:
                    ways["loss_null"] = nulls(self.null, [True] * len(raws))
                    ways["loss_shuffled"] = self.condition(self.collate(after).to(self.device))
                clean = self.space.clean(self.front, batch[self.target])
                for look in range(looks):
                    noise = [_noise(clean.shape[1:], (i + j) * looks + look) for j in range(len(raws))]
                    noise = torch.stack(noise).to(self.device)
                    t = torch.full((len(raws),), (look + 0.5) / looks, device=self.device)
                    for name, context in ways.items():
                        error = self.errors(clean, noise, t, context).sum()
                        sums[name] = sums.get(name, 0.0) + float(error) / looks / len(held)
        return sums


def _like(t: Tensor, x: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...) as x has axes."""
    return t.view(-1, *[1] * (x.ndim - 1))


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    """Normal noise that depends on its seed alone, on whatever device it is used."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
