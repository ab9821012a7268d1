"""Multivariate time series -> Tokens: one token per patch of time steps, as in PatchTST (Nie et al. 2023).

Notable:

- missing values (NaN) do not count in mean and variance and enter the embedding as 0; a second linear layer embeds the
  mask of missing values and adds nothing if none is missing;
- a series may have any length: the last patch is padded with missing values, so no step is dropped;
- each channel of each sample is normalised to mean 0 and variance 1; `denormalize` inverts it for a forecast.

Shapes: B samples, C channels, T steps, P steps per patch, S stride, n patches per channel, N tokens, D width.
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

CHANNEL_MIXING = ("attention", "none", "patch")


class SeriesTokenizer(Tokenizer):
    """Time series -> Tokens. A series of T steps gives n = 1 + ceil(max(0, T - patch) / stride) patches per channel.

    `mix` sets how channels interact:

    - ``"attention"``: C * n tokens, one channel after another. Tokens of all channels attend to each other; a learned
      channel embedding is added.
    - ``"none"``: the same tokens without channel embedding, each channel in its own segment: PatchTST's channel
      independence. Channels share only weights. A channel is pooled, packed and unpacked like a sample.
    - ``"patch"``: n tokens, each of which embeds all channels of its time span.

    A token's `pos` is (patch index, channel, 0), with channel 0 for ``"patch"``.

    Args:
        dim: width D of the tokens.
        channels: number of channels C. None, with ``mix="none"`` only: any number.
        patch: steps P per patch.
        stride: steps S between the starts of patches, at most P. None: P / 2, as in PatchTST.
        mix: how channels interact, see above.
        empty: patches without observed values: ``"drop"`` drops them, ``"token"`` gives them a learned embedding.
        normalize: normalise each channel of each sample to mean 0 and variance 1 over its observed values. A constant
            channel becomes 0.
        positions: position embedding: ``"sincos"`` (any length), ``"learned"`` (up to `max_patches`) or ``"none"``.
        max_patches: number of learned positions.
        columns: names of the channels in a CSV file, in order. None: all but the time column.
        time: name of the time column of a CSV file, see `read.read_series`.

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
            raise InputError(
                f"stride {stride} is larger than patch {patch}: steps between patches would be lost"
            )
        for name, value, allowed in (
            ("mix", mix, CHANNEL_MIXING),
            ("empty", empty, ("drop", "token")),
            ("positions", positions, ("sincos", "learned", "none")),
        ):
            if value not in allowed:
                raise InputError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
        if channels is None and mix != "none":
            raise InputError(f"channels=None needs mix='none'; mix={mix!r} needs the number of channels")
        if channels is not None:
            (channels,) = sides(channels, 1, "channels")
        if columns is not None and (isinstance(columns, str) or channels not in (None, len(columns))):
            raise InputError(f"columns is {columns!r}, expected a list of {channels or ''} names")
        self.channels, self.mix, self.empty, self.normalize = channels, mix, empty, normalize
        self.positions, self.columns, self.time = positions, columns, time
        (self.max_patches,) = sides(max_patches, 1, "max_patches")

        width = self.patch * (channels if mix == "patch" else 1)
        self.proj = nn.Linear(width, dim)
        self.missing = nn.Linear(width, dim, bias=False)
        self.empty_token = nn.Parameter(torch.empty(dim)) if empty == "token" else None
        self.channel_embed = (
            nn.Embedding(channels, dim) if mix == "attention" and channels and channels > 1 else None
        )
        self.pos_embed = nn.Parameter(torch.empty(max_patches, dim)) if positions == "learned" else None
        if positions == "sincos":
            sincos_positions(torch.zeros(1, 1), dim)  # raises now if dim is too small
        self.init_weights()

    def init_weights(self) -> None:
        """`proj`: normal with variance 1 / fan_in, so that normalised values give tokens of about unit variance; bias 0.
        All other weights: normal with standard deviation 0.02."""
        nn.init.normal_(self.proj.weight, std=self.proj.in_features**-0.5)
        nn.init.zeros_(self.proj.bias)
        channel = None if self.channel_embed is None else self.channel_embed.weight
        for weight in (self.missing.weight, self.empty_token, self.pos_embed, channel):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    # ---- raw series ------------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One series -> (C, T) float64, NaN at missing values.

        Args:
            source: numpy array or tensor (C, T), or (T,) for one channel, with NaN (or a numpy mask) at missing values;
                or a CSV file with a header: path, bytes or binary file.

        Raises:
            InputError: it cannot be read, has another number of channels, or all values are missing.
        """
        if isinstance(source, np.ndarray | Tensor):
            values, name = _from_array(source)
            layout = "an array is (C, T), channels first"
        elif isinstance(source, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(
            source, "read"
        ):
            values, names = read_series(source, self.columns, self.time)
            name = str(source) if isinstance(source, str | os.PathLike) else "<CSV>"
            layout = f"found columns {', '.join(names[:12])}; choose with columns=[...] and time="
        else:
            raise InputError(
                f"cannot read a series from a {type(source).__name__}: pass a numpy array or tensor (C, T), or a CSV file as "
                "path, bytes or binary file"
            )
        if self.channels is not None and len(values) != self.channels:
            raise InputError(f"{name}: has {len(values)} channels, expected {self.channels}; {layout}")
        if not values.size:
            raise InputError(
                f"{name}: has {len(values)} channels and {values.shape[1]} steps, expected at least one of each"
            )
        if np.isnan(values).all():
            raise InputError(f"{name}: all values are missing")
        return torch.from_numpy(values)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw series of any lengths -> one batch, normalised and split into patches.

        Returns:
            `patches` (B, N, F) float32, 0 at missing values; `missing` (B, N, F) bool, True = missing, where F is P, or
            C * P with ``mix="patch"``; `coords` (B, N, 2), (patch, channel); `mean` and `std` (B, C) float32; `lengths`,
            per sample the number of tokens of each segment.

        Raises:
            InputError: a raw series is not (C, T), has no observed value, or is too long for learned positions.
        """
        if not len(raws):
            raise InputError("no series to collate: expected at least one")
        samples = [self._patchify(raw, f"series {i} of the batch") for i, raw in enumerate(raws)]
        patches, missing, coords, means, stds = map(list, zip(*samples, strict=True))
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

    def num_patches(self, steps: int) -> int:
        """Number of patches per channel of a series with `steps` steps."""
        return 1 + -(-max(0, steps - self.patch) // self.stride)

    def _patchify(self, raw: Tensor, name: str) -> tuple[Tensor, ...]:
        fits = isinstance(raw, Tensor) and raw.ndim == 2 and raw.is_floating_point() and raw.numel()
        if not fits or self.channels not in (None, len(raw)):
            found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
            raise InputError(f"{name} is {found}, expected float ({self.channels or 'C'}, T) from read()")
        c, steps = raw.shape
        n = self.num_patches(steps)
        if self.pos_embed is not None and n > self.max_patches:
            raise InputError(
                f"{name} has {steps} steps, {n} patches, more than max_patches={self.max_patches}: increase it, use "
                "positions='sincos', or split the series"
            )
        values = raw.double()
        observed = ~values.isnan()
        values = values.masked_fill(~observed, 0)
        mean, std = torch.zeros(c, dtype=torch.float64), torch.ones(c, dtype=torch.float64)
        if self.normalize:
            count = observed.sum(1).clamp(min=1)
            mean = values.sum(1) / count
            std = (((values - mean[:, None]) ** 2).masked_fill(~observed, 0).sum(1) / count).sqrt()
            # the std of a constant channel may be a rounding error
            std = torch.where(std > 1e-9 * mean.abs(), std, 1.0)
            values = ((values - mean[:, None]) / std[:, None]).masked_fill(~observed, 0)
        pad = (n - 1) * self.stride + self.patch - steps
        values = nn.functional.pad(values.float(), (0, pad)).unfold(1, self.patch, self.stride)  # (C, n, P)
        missing = nn.functional.pad(~observed, (0, pad), value=True).unfold(1, self.patch, self.stride)
        if self.mix == "patch":  # (1, n, C * P)
            values, missing = (v.transpose(0, 1).flatten(1)[None] for v in (values, missing))
        coords = torch.stack(
            torch.meshgrid(torch.arange(n), torch.arange(len(values)), indexing="xy"), -1
        )  # (C | 1, n, 2)
        values, missing, coords = values.flatten(0, 1), missing.flatten(0, 1), coords.flatten(0, 1)
        keep = ~missing.all(1)
        if not bool(keep.any()):
            raise InputError(f"{name}: all values are missing")
        if self.empty == "drop":
            values, missing, coords = values[keep], missing[keep], coords[keep]
        return values, missing, coords, mean.float(), std.float()

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate` on the model's device -> Tokens (B, N, D)."""
        dtype = self.proj.weight.dtype
        missing, coords, lengths = batch["missing"], batch["coords"], batch["lengths"]
        x = self.proj(batch["patches"].to(dtype)) + self.missing(missing.to(dtype))
        if self.empty_token is not None:
            x = torch.where(missing.all(-1, keepdim=True), self.empty_token, x)
        if self.channel_embed is not None:
            x = x + self.channel_embed(coords[..., 1])
        if self.pos_embed is not None:
            x = x + self.pos_embed[coords[..., 0]]
        elif self.positions == "sincos":
            x = x + sincos_positions(coords[..., :1], self.dim).to(dtype)
        pos = nn.functional.pad(coords.float(), (0, 1))  # (patch, channel, 0)
        tokens = self.wrap(x, [sum(row) for row in lengths], "bidirectional", pos=pos)
        if self.mix == "none":
            segment = coords[..., 1].masked_fill(~tokens.valid, 0)
            tokens = tokens.replace(segment=segment, layout=Layout(lengths, "bidirectional"))
        return tokens

    def denormalize(self, values: Tensor, batch: Batch) -> Tensor:
        """Normalised values, such as a forecast, to the units of the series: (B, C, T) -> (B, C, T)."""
        return values * batch["std"][..., None].to(values) + batch["mean"][..., None].to(values)


def _from_array(source: np.ndarray | Tensor) -> tuple[np.ndarray, str]:
    kind = "tensor" if isinstance(source, Tensor) else "numpy array"
    name = f"<{kind} {tuple(source.shape)} {source.dtype}>"
    if isinstance(source, Tensor):
        real = not source.is_complex() and not source.is_quantized
    else:
        real = source.dtype.kind in "fiub"
    if not real:
        raise InputError(f"{name}: expected real numbers; convert it, e.g. .astype('float64')")
    if isinstance(source, Tensor):
        values = source.detach().cpu().double().numpy()
    else:
        values = np.ma.filled(source.astype(np.float64), np.nan)
    if values.ndim not in (1, 2):
        raise InputError(f"{name}: expected (C, T), channels first, or (T,) for one channel")
    values = np.array(np.atleast_2d(values))  # a copy, independent of the caller's array
    with np.errstate(invalid="ignore"):
        bad = np.argwhere(~np.isnan(values) & ~(np.abs(values) < LIMIT))
    if len(bad):
        c, t = bad[0]
        raise InputError(
            f"{name}: has {values[c, t]} in channel {c} at step {t}, expected finite numbers below {LIMIT:g}, or NaN "
            "for a missing value"
        )
    return values, name
