"""Conditional image generation: rectified flow with a DiT trunk (Liu et al. 2023; Peebles & Xie 2023).

An image x1 and noise x0 are interpolated linearly, x_t = (1 - t) x0 + t x1, and the trunk learns the velocity x1 - x0.
The timestep and the mean of the condition modulate every block (adaLN-zero); the condition's tokens are the context of
cross-attention. In training a row's condition is dropped at random and replaced by a learned null embedding, which
enables classifier-free guidance in sampling.

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
from worldtokens.tasks.base import Task, evaluating, zero_loss
from worldtokens.tasks.diffusion.conditioning import fill_nulls, null_tokens, read_conditions
from worldtokens.tasks.diffusion.samplers import Sampler, guide, heun, make_timesteps
from worldtokens.tasks.diffusion.spaces import make_space
from worldtokens.tasks.seq2seq.context import concat_tokens, scatter_rows
from worldtokens.tasks.seq2seq.model import get_context_dim
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import sincos_positions
from worldtokens.tokens import Tokens

TIME_CHANNELS = 256  # channels of the sinusoidal timestep embedding


class Diffusion(Task):
    """Generates one column conditioned on all the others.

        model = wt.Diffusion(
            {"image": wt.ImageTokenizer(256, patch=4, size=32), "text": wt.TextTokenizer(...)},
            trunk=wt.Transformer(256, 6, 4, adaln=True, cross=True, rope=2),
            encoder=wt.Transformer(256, 2, 4),
        )
        model.sample(["red heart"], guidance=3.0)[0].save("heart.png")

    Args:
        tokenizers: tokenizers by column name. With the target alone the model is unconditional.
        trunk: ``Transformer(adaln=True)`` of the target's width, with ``cross=True`` if there are other columns.
        encoder: trunk applied to the condition's tokens first, or None.
        target: column to generate: an `ImageTokenizer` of one size (flow over pixels) or a trained
            `DiscreteTokenizer` (flow over its codes).
        condition_dropout: probability that a row's whole condition is dropped in training, 0 to below 1.
        timestep_sampling: distribution of training timesteps: ``"logit_normal"``, denser in the middle (Esser et al.
            2024), or ``"uniform"``.
        timestep_mean: mean of log(t / (1 - t)) for ``"logit_normal"``; below 0 more timesteps lie near the noise.
        prediction: output of the model: ``"velocity"``, or the clean image, ``"data"``, from which the velocity follows
            (Li & He 2025): better for large patches. The loss is that of velocities in either case.

    Raises:
        ValueError: columns, widths or settings that do not match.
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
            raise ValueError(f"no target column {target!r}, got {sorted(tokenizers)}")
        if (
            timestep_sampling not in ("logit_normal", "uniform")
            or prediction not in ("velocity", "data")
            or not 0 <= condition_dropout < 1
        ):
            raise ValueError(
                f"timestep_sampling={timestep_sampling!r}, prediction={prediction!r}, "
                f"condition_dropout={condition_dropout}: expected 'logit_normal' or 'uniform', 'velocity' or 'data', "
                "and 0 to below 1"
            )
        self.tokenizers, self.trunk, self.encoder = nn.ModuleDict(tokenizers), trunk, encoder
        self.target, self.sources = target, [c for c in tokenizers if c != target]
        self.condition_dropout, self.prediction = condition_dropout, prediction
        self.timestep_sampling, self.timestep_mean = timestep_sampling, timestep_mean
        self._check_widths()
        dim = trunk.dim
        self.space = make_space(self.front)
        self.time_mlp = nn.Sequential(nn.Linear(TIME_CHANNELS, dim), nn.SiLU(), nn.Linear(dim, dim))
        for layer in self.time_mlp:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.out = nn.Linear(dim, self.space.values)
        nn.init.zeros_(self.out.weight)  # the initial prediction is zero, the mean
        nn.init.zeros_(self.out.bias)
        self.null: nn.Parameter | None = None
        self.context_proj: nn.Linear | None = None
        if self.sources:
            width = get_context_dim(trunk)
            self.null = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
            self.context_proj = nn.Linear(width, dim)
            nn.init.normal_(self.context_proj.weight, std=0.02)
            nn.init.zeros_(self.context_proj.bias)

    def _check_widths(self) -> None:
        cfg = getattr(self.trunk, "cfg", None)
        if cfg is None or not cfg.adaln or cfg.cross != bool(self.sources):
            raise ValueError(
                f"the source columns are {self.sources}, so the trunk has to be a Transformer with adaln=True and "
                f"cross={bool(self.sources)}"
            )
        if self.front.dim != self.trunk.dim:
            raise ValueError(
                f"the {self.target!r} tokenizer has dim={self.front.dim}, the trunk dim={self.trunk.dim}"
            )
        widths = {c: self.tokenizers[c].dim for c in self.sources}
        width = get_context_dim(self.trunk) if self.encoder is None else self.encoder.dim
        if set(widths.values()) - {width} or (
            self.encoder and self.encoder.dim != get_context_dim(self.trunk)
        ):
            raise ValueError(
                f"the condition's tokenizers have dim {widths}, the encoder "
                f"{self.encoder and self.encoder.dim}, the trunk's cross-attention {get_context_dim(self.trunk)}: "
                "expected one width"
            )

    @property
    def front(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.tokenizers[self.target]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates rows from `read` into one batch; its weight is the number of rows with an image."""
        batch = super().collate(rows)
        batch["rows"] = len(rows)
        batch["weight"] = sum(self.target in row for row in rows)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def condition(self, batch: Mapping[str, Any], dropped: Sequence[bool] | None = None) -> Tokens | None:
        """The trunk's context, (B, K, D): the null embedding where a row has no condition or it is dropped.

        Args:
            batch: from `collate`; its target is not used.
            dropped: for each row, whether its condition is dropped.
        """
        if self.null is None:  # no source columns
            return None
        rows, has = batch["rows"], batch["has"]
        parts = [
            scatter_rows(self.tokenizers[c](batch[c]), has.get(c), rows) for c in self.sources if c in batch
        ]
        if not parts:
            return null_tokens(self.null, [True] * rows)
        context = concat_tokens(parts)
        return fill_nulls(context if self.encoder is None else self.encoder(context), self.null, dropped)

    def velocity(self, x: Tensor, t: Tensor, context: Tokens | None = None) -> Tensor:
        """Predicts the velocity dx/dt at time t.

        Args:
            x: (B, ...), noisy values in the target's space.
            t: (B,) in [0, 1].
            context: from `condition`.

        Returns:
            Shaped as x, float32.
        """
        condition = self.time_mlp(
            sincos_positions(1000 * t.float()[:, None], TIME_CHANNELS).to(self.out.weight.dtype)
        )
        if context is not None:
            assert self.context_proj is not None, "a context needs source columns"
            condition = condition + self.context_proj(context.pool("mean"))
        tokens = self.space.embed(self.front, x.to(self.out.weight.dtype))
        # images have no padding, so self-attention needs no mask, whatever the lengths of the conditions
        mode = "full" if self.trunk.cfg.window is None else None
        out = self.out(self.trunk(tokens, context=context, condition=condition, mode=mode).x)
        out = self.space.unfold(self.front, out.float(), x)
        if self.prediction == "velocity":
            return out
        return (out - x) / self._time_left(t, x)

    def _time_left(self, t: Tensor, x: Tensor) -> Tensor:
        """1 - t, broadcast to x; at least 0.05 in training, because errors are divided by it."""
        return (1 - _broadcast(t, x)).clamp(min=0.05 if self.training else 1e-3)

    def errors(self, clean: Tensor, noise: Tensor, t: Tensor, context: Tokens | None) -> Tensor:
        """Mean squared error of each row's velocity, (B,), at the given noise and timesteps."""
        time = _broadcast(t, clean)
        predicted = self.velocity((1 - time) * noise + time * clean, t, context)
        target = clean - noise
        if self.prediction == "data":  # an equal divisor on both sides: the correct image has no error
            target = target * (1 - time) / self._time_left(t, clean)
        return (predicted - target).square().flatten(1).mean(1)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Mean squared error of the velocity at random timesteps; a zero with a graph if no row has an image."""
        if not batch["weight"]:
            return {"loss": zero_loss(self)}
        clean = self.space.clean(self.front, batch[self.target])
        b, has = len(clean), batch["has"].get(self.target)
        # drawn on the CPU: dropped rows determine lengths, which are needed without a device sync
        dropped = (torch.rand(batch["rows"]) < self.condition_dropout).tolist()
        logit_normal = self.timestep_sampling == "logit_normal"
        t = (torch.randn(b) + self.timestep_mean).sigmoid() if logit_normal else torch.rand(b)
        context = self.condition(batch, dropped)
        if has is not None and context is not None:
            context = context[list(has)]
        each = self.errors(clean, torch.randn_like(clean), t.to(clean.device), context)
        return {"loss": each.mean()}

    # ---- inference ---------------------------------------------------------------------------------------

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
        """Samples images.

        Args:
            texts: conditions that the source column's tokenizer reads, None for no condition; by column if there are
                several, ``{"text": [...], "audio": [...]}``; or a number of unconditional images.
            steps: number of sampler steps.
            guidance: classifier-free guidance scale: 1 samples the conditional model, above 1 strengthens the condition,
                0 ignores it.
            seed: seed of the noise: the i-th image uses seed + i, or a list gives one each. An image depends on its own
                seed and condition only, not on its batch.
            size: side in pixels, or (height, width); None: the training size.
            sampler: `heun`, `euler` or another `Sampler`.
            shift: see `samplers.make_timesteps`.
            batch_size: images per forward pass.

        Raises:
            InputError: a condition cannot be read, or a setting is out of its range.
        """
        rows = read_conditions(texts, {c: self.tokenizers[c] for c in self.sources})
        seeds = [seed + i for i in range(len(rows))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(rows):
            raise InputError(f"{len(seeds)} seeds for {len(rows)} images: give one each, or one number")
        shape, timesteps = self.space.shape(self.front, size), make_timesteps(steps, shift)
        out = []
        with evaluating(self):
            for i in range(0, len(rows), batch_size):
                noise = torch.stack([_noise(shape, s) for s in seeds[i : i + batch_size]]).to(self.device)
                batch = self.collate(rows[i : i + batch_size]).to(self.device)
                x = sampler(self._guided_velocity(batch, guidance), noise, timesteps)
                out += self.space.images(self.front, x)
        return out

    def _guided_velocity(self, batch: Batch, guidance: float) -> Any:
        """The velocity function for a sampler, with classifier-free guidance."""
        context = self.condition(batch)
        if context is None or self.null is None or guidance == 1:
            return lambda x, t: self.velocity(x, t, context)
        null = null_tokens(self.null, [True] * batch["rows"])
        if guidance == 0:
            return lambda x, t: self.velocity(x, t, null)
        both = Tokens.stack([context, null])

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with_text, without = self.velocity(x.repeat(2, *[1] * (x.ndim - 1)), t.repeat(2), both).chunk(2)
            return guide(with_text, without, guidance)

        return velocity

    @torch.no_grad()
    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64, timesteps: int = 4
    ) -> dict[str, float]:
        """Computes the loss on held-out rows at fixed timesteps and noise.

        Args:
            rows: those without an image are skipped.
            batch_size: rows per forward pass.
            timesteps: number of timesteps per row, uniform in (0, 1).

        Returns:
            ``loss``; with a condition also ``loss_null``, without the condition, and ``loss_shuffled``, with the next
            row's condition.

        Raises:
            InputError: no row has an image.
        """
        held_out = [r for r in (rows[i] for i in range(len(rows))) if r.get(self.target) is not None]
        if not held_out:
            raise InputError(f"no row to evaluate has the column {self.target!r}")
        sums: dict[str, float] = {}
        with evaluating(self):
            for i in range(0, len(held_out), batch_size):
                raws = [self.read(r) for r in held_out[i : i + batch_size]]
                shifted = [*raws[1:], self.read(held_out[(i + len(raws)) % len(held_out)])]
                batch = self.collate(raws).to(self.device)
                contexts = {"loss": self.condition(batch)}
                if self.null is not None:
                    contexts["loss_null"] = null_tokens(self.null, [True] * len(raws))
                    contexts["loss_shuffled"] = self.condition(self.collate(shifted).to(self.device))
                clean = self.space.clean(self.front, batch[self.target])
                for k in range(timesteps):
                    drawn = [_noise(clean.shape[1:], (i + j) * timesteps + k) for j in range(len(raws))]
                    noise = torch.stack(drawn).to(self.device)
                    t = torch.full((len(raws),), (k + 0.5) / timesteps, device=self.device)
                    for name, context in contexts.items():
                        error = self.errors(clean, noise, t, context).sum()
                        sums[name] = sums.get(name, 0.0) + float(error) / timesteps / len(held_out)
        return sums


def _broadcast(t: Tensor, x: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), with as many axes as x."""
    return t.view(-1, *[1] * (x.ndim - 1))


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    """Normal noise that depends on its seed only, not on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
