"""Multivariate time series -> Tokens: one token a patch of time, as in PatchTST (Nie et al. 2023).

Notable:

- a missing value (NaN) is never a number: it counts in no mean, enters the embedding as 0, and the embedding is told
  which of a patch's values are missing by a second linear map, which adds nothing where all are there;
- a series may have any length: the last patch is filled up with missing values, so nothing is dropped;
- each channel of each sample is brought to mean 0 and variance 1, and `restore` takes a forecast back.

Shapes: B samples, C channels, T steps, P steps of a patch, S steps between patches, n patches of a channel, N tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import sides, sincos_positions
from worldtokens.tokenizers.series.read import LIMIT, read_series
from worldtokens.tokens import Tokens

MIXES = ("attention", "none", "patch")


class SeriesTokenizer(Tokenizer):
    """Time series -> tokens. A series of T steps gives n = 1 + ceil(max(0, T - patch) / stride) patches.

    How channels meet is `mix`:

    - ``"attention"``: C * n tokens, channel after channel; all of a sample read each other, and a learned vector
      tells which channel a token is from.
    - ``"none"``: the same tokens without that vector, each channel a segment of its own, so that channels share weights and
      nothing else: PatchTST's channel independence. A channel then pools, packs and unpacks as a sample does.
    - ``"patch"``: n tokens, each holding all channels of its span.

    A token's `pos` is (number of the patch, channel, 0), with channel 0 for ``"patch"``.

    Args:
        dim: width D of the tokens.
        channels: number of channels C. May be None with ``mix="none"``: any number.
        patch: steps P of a patch.
        stride: steps S between the starts of patches, at most P. None: half of P, as PatchTST has it.
        mix: how channels meet, see above.
        empty: what a patch with nothing observed becomes: ``"drop"``, no token, or ``"token"``, one that carries a
            learned vector and its position.
        normalize: bring each channel of each sample to mean 0 and variance 1 over what was observed. A
            constant channel becomes 0.
        positions: ``"sincos"`` (any length), ``"learned"`` (up to `max_patches`) or ``"none"``.
        max_patches: rows of the learned table.
        columns: names of the channels in a CSV file, in order. None: all but the time column.
        time: name of the time column of a CSV file, see `series_file.read_series`.

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "series"

    def __init__(
        self,
        dim: int,
        channels: int | None = 1,
        patch: int = 16,
        stride: int | None = None,
        mix: str = "attention",
        empty: str = "drop",
        normalize: bool = True,
        positions: str = "sincos",
        max_patches: int = 512,
        columns: Sequence[str] | None = None,
        time: str | None = None,
    ) -> None:
        super().__init__()
        (self.dim,), (self.patch,) = sides(dim, 1, "dim"), sides(patch, 1, "patch")
        (self.stride,) = sides(stride if stride is not None else max(1, patch // 2), 1, "stride")
        if self.stride > self.patch:
            raise InputError(f"stride {stride} is larger than the patch {patch}: steps between would be lost")
        for name, value, allowed in (
            ("mix", mix, MIXES),
            ("empty", empty, ("drop", "token")),
            ("positions", positions, ("sincos", "learned", "none")),
        ):
            if value not in allowed:
                raise InputError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
        if channels is None and mix != "none":
            raise InputError(f"channels=None goes with mix='none' alone; mix={mix!r} needs their number")
        if channels is not None:
            (channels,) = sides(channels, 1, "channels")
        if columns is not None and (isinstance(columns, str) or channels not in (None, len(columns))):
            raise InputError(f"columns is {columns!r}, expected a list of {channels or ''} names")
        self.channels, self.mix, self.empty, self.normalize = channels, mix, empty, normalize
        self.positions, self.columns, self.time = positions, columns, time
        (self.max_patches,) = sides(max_patches, 1, "max_patches")

        width = self.patch * (channels if mix == "patch" else 1)
        self.value = nn.Linear(width, dim)
        self.gap = nn.Linear(width, dim, bias=False)
        self.absent = nn.Parameter(torch.empty(dim)) if empty == "token" else None
        self.channel = nn.Embedding(channels, dim) if mix == "attention" and channels > 1 else None
        self.position = nn.Parameter(torch.empty(max_patches, dim)) if positions == "learned" else None
        if positions == "sincos":
            sincos_positions(torch.zeros(1, 1), dim)  # says so now if dim is too small
        self.init_weights()

    def init_weights(self) -> None:
        """Values: normal with variance 1 / inputs, so that normalised ones give tokens of about unit variance. All
        the rest, learned vectors that are added, normal with deviation 0.02; bias 0."""
        nn.init.normal_(self.value.weight, std=self.value.in_features**-0.5)
        nn.init.zeros_(self.value.bias)
        extra = (self.gap.weight, self.absent, self.position, self.channel and self.channel.weight)
        for table in extra:
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- raw series ------------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One series -> (C, T) float64, NaN where a value is missing.

        Args:
            source: numpy array or tensor (C, T), or (T,) of one channel, with NaN (or a numpy mask) at missing
                values; or a CSV file with a header: path, bytes or binary file.

        Raises:
            InputError: it cannot be read, has another number of channels, or nothing was observed.
        """
        if isinstance(source, np.ndarray | Tensor):
            values, name = _from_array(source)
            layout = "an array is (C, T), channels first, and is not guessed at"
        elif isinstance(source, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(
            source, "read"
        ):
            values, names = read_series(source, self.columns, self.time)
            name = str(source) if isinstance(source, str | os.PathLike) else "<CSV>"
            layout = f"found columns {', '.join(names[:12])}; choose with columns=[...] and time="
        else:
            raise InputError(
                f"a series cannot be read from a {type(source).__name__}: pass a numpy array or tensor (C, T), or a CSV "
                "file as path, bytes or binary file"
            )
        if self.channels is not None and len(values) != self.channels:
            raise InputError(f"{name}: has {len(values)} channels, expected {self.channels}; {layout}")
        if not values.size:
            raise InputError(
                f"{name}: has {len(values)} channels and {values.shape[1]} steps, expected at least one"
            )
        if np.isnan(values).all():
            raise InputError(f"{name}: every value is missing")
        return torch.from_numpy(values)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw series of any lengths -> one batch, normalised and cut into patches.

        Returns:
            `patches` (B, N, F) float32, 0 at missing values; `missing` (B, N, F) bool, True = not observed, where F is
            P, or C * P with ``mix="patch"``; `coords` (B, N, 2) as (patch, channel); `mean` and `std` (B, C) float32;
            `lengths`, for each sample the tokens of its segments.

        Raises:
            InputError: a raw series is not (C, T) with something observed, or is too long for learned positions.
        """
        if not len(raws):
            raise InputError("no series to collate: expected at least one")
        parts = [self._cut(raw, f"series {i} of the batch") for i, raw in enumerate(raws)]
        patches, missing, coords, means, stds = zip(*parts, strict=True)
        lengths = []
        for c in coords:
            counts = torch.bincount(c[:, 1]).tolist() if self.mix == "none" else [len(c)]
            lengths.append(tuple(n for n in counts if n))
        return Batch(
            patches=pad_sequence(patches, batch_first=True),
            missing=pad_sequence(missing, batch_first=True),
            coords=pad_sequence(coords, batch_first=True),
            mean=pad_sequence(means, batch_first=True),
            std=pad_sequence(stds, batch_first=True, padding_value=1.0),
            lengths=tuple(lengths),
        )

    def patches_of(self, steps: int) -> int:
        """How many patches cover so many steps."""
        return 1 + -(-max(0, steps - self.patch) // self.stride)

    def _cut(self, raw: Tensor, name: str) -> tuple[Tensor, ...]:
        fits = isinstance(raw, Tensor) and raw.ndim == 2 and raw.is_floating_point() and raw.numel()
        if not fits or self.channels not in (None, len(raw)):
            found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
            raise InputError(f"{name} is {found}, expected float ({self.channels or 'C'}, T) as read() gives")
        c, steps = raw.shape
        n = self.patches_of(steps)
        if self.position is not None and n > self.max_patches:
            raise InputError(
                f"{name} has {steps} steps, {n} patches, more than max_patches={self.max_patches}: raise that, use "
                "positions='sincos', or cut the series"
            )
        values = raw.double()
        there = ~values.isnan()
        values = values.masked_fill(~there, 0)
        mean, std = torch.zeros(c, dtype=torch.float64), torch.ones(c, dtype=torch.float64)
        if self.normalize:
            count = there.sum(1).clamp(min=1)
            mean = values.sum(1) / count
            std = (((values - mean[:, None]) ** 2).masked_fill(~there, 0).sum(1) / count).sqrt()
            # what rounding leaves of a constant channel is no spread
            std = torch.where(std > 1e-9 * mean.abs(), std, 1.0)
            values = ((values - mean[:, None]) / std[:, None]).masked_fill(~there, 0)
        fill = (n - 1) * self.stride + self.patch - steps
        values = nn.functional.pad(values.float(), (0, fill)).unfold(1, self.patch, self.stride)  # (C, n, P)
        gone = nn.functional.pad(~there, (0, fill), value=True).unfold(1, self.patch, self.stride)
        if self.mix == "patch":  # (1, n, C * P)
            values, gone = (v.transpose(0, 1).flatten(1)[None] for v in (values, gone))
        where = torch.stack(
            torch.meshgrid(torch.arange(n), torch.arange(len(values)), indexing="xy"), -1
        )  # (C | 1, n, 2)
        values, gone, where = values.flatten(0, 1), gone.flatten(0, 1), where.flatten(0, 1)
        keep = ~gone.all(1)
        if not bool(keep.any()):
            raise InputError(f"{name}: every value is missing")
        if self.empty == "drop":
            values, gone, where = values[keep], gone[keep], where[keep]
        return values, gone, where, mean.float(), std.float()

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate` on the model's device -> its tokens, (B, N, dim)."""
        to = self.value.weight.dtype
        missing, coords, lengths = batch["missing"], batch["coords"], batch["lengths"]
        x = self.value(batch["patches"].to(to)) + self.gap(missing.to(to))
        if self.absent is not None:
            x = torch.where(missing.all(-1, keepdim=True), self.absent, x)
        if self.channel is not None:
            x = x + self.channel(coords[..., 1])
        if self.position is not None:
            x = x + self.position[coords[..., 0]]
        elif self.positions == "sincos":
            x = x + sincos_positions(coords[..., :1], self.dim).to(to)
        pos = nn.functional.pad(coords.float(), (0, 1))  # (patch, channel, 0)
        tokens = self.wrap(x, [sum(row) for row in lengths], "bidirectional", pos=pos)
        if self.mix == "none":
            segment = coords[..., 1].masked_fill(~tokens.valid, 0)
            tokens = tokens.replace(segment=segment, layout=Layout(lengths, "bidirectional"))
        return tokens

    def restore(self, values: Tensor, batch: Batch) -> Tensor:
        """Normalised values, such as a forecast, in the series' own units: (B, C, any) -> the same shape."""
        return values * batch["std"][..., None].to(values) + batch["mean"][..., None].to(values)


def _from_array(source: np.ndarray | Tensor) -> tuple[np.ndarray, str]:
    kind = "tensor" if isinstance(source, Tensor) else "numpy array"
    name = f"<{kind} {tuple(source.shape)} {source.dtype}>"
    if isinstance(source, Tensor):
        real = not source.is_complex() and not source.is_quantized
        values = source.detach().cpu().double().numpy() if real else None
    else:
        real = source.dtype.kind in "fiub"
        values = np.ma.filled(source.astype(np.float64), np.nan) if real else None
    if not real:
        raise InputError(f"{name}: expected real numbers; convert it, e.g. .astype('float64')")
    if values.ndim not in (1, 2):
        raise InputError(f"{name}: expected (C, T), channels first, or (T,) of one channel")
    values = np.array(np.atleast_2d(values))  # a copy: the caller may write to theirs
    with np.errstate(invalid="ignore"):
        bad = np.argwhere(~np.isnan(values) & ~(np.abs(values) < LIMIT))
    if len(bad):
        c, t = bad[0]
        raise InputError(
            f"{name}: holds {values[c, t]} in channel {c} at step {t}, expected finite numbers below {LIMIT:g}, NaN "
            "where a value is missing"
        )
    return values, name
