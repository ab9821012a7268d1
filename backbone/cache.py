"""KV cache: stores keys and values of past tokens, so that each new token costs one step.

Beside each layer's keys and values, a cache stores what the rule of visibility needs of every token: validity, segment,
block, t. New tokens attend by that rule, whatever the rows hold: prompts of different length, packed samples,
bidirectional prefixes. The common step, one more token in rows without padding, needs no mask. Keys and values of a
context are computed once.

    cache = trunk.cache(batch=len(prompt))
    out = trunk(prompt, cache=cache)
    out = trunk(cache.offset(next_tokens), cache=cache)

Shapes: B rows, N new tokens, L cached tokens, H heads, E channels per head.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens.backbone.attention import AttentionPlan, plan_attention, plan_cross_attention
from worldtokens.layout import Layout
from worldtokens.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class OffsetLayout(Layout):
    """The layout of tokens that directly follow the first `start` tokens of a cache, as `offset` numbers them."""

    start: int = 0


class Buffer:
    """A tensor (B, L, ...) that grows along its second axis: `max_len` is allocated at once, or the size doubles."""

    def __init__(self, max_len: int | None) -> None:
        self.max_len, self.data, self.length = max_len, None, 0

    @property
    def value(self) -> Tensor:
        return self.data[:, : self.length]

    def append(self, new: Tensor) -> Tensor:
        """Append (B, N, ...); returns all of it."""
        end = self.length + new.shape[1]
        if torch.is_grad_enabled() and (new.requires_grad or (self.length and self.data.requires_grad)):
            # writing in place would overwrite what the backward pass needs
            self.data = torch.cat((self.value, new), 1) if self.length else new
        else:
            frozen = self.length and self.data.is_inference() and not torch.is_inference_mode_enabled()
            if self.data is None or end > self.data.shape[1] or frozen:
                size = self.max_len or max(end, 2 * self.length, 16)
                data = new.new_empty(new.shape[0], size, *new.shape[2:])
                if self.length:
                    data[:, : self.length] = self.value
                self.data = data
            self.data[:, self.length : end] = new
        self.length = end
        return self.value

    def select(self, rows: Tensor) -> None:
        if self.data is not None:
            selected = self.value.index_select(0, rows)
            self.data, self.length = None, 0
            self.append(selected)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def copy(self) -> Buffer:
        new = copy.copy(self)
        new.data = None if self.data is None else self.data.clone()
        return new


class LayerCache:
    """Keys and values of one layer, (B, L, Hkv, E), and those of its context."""

    def __init__(self, max_len: int | None) -> None:
        self.k, self.v = Buffer(max_len), Buffer(max_len)
        self.context: tuple[Tensor, Tensor] | None = None


def next_numbers(valid: Tensor, block: Tensor, t: Tensor, segment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, L) each -> each row's next block and next t, and the segment of its last valid token; 0 in rows with none."""
    none = ~valid.any(1)
    next_block = block.masked_fill(~valid, torch.iinfo(torch.int32).min).amax(1) + 1
    next_t = t.masked_fill(~valid, -torch.inf).amax(1).floor() + 1
    last = torch.arange(valid.shape[1], device=valid.device).masked_fill(~valid, 0).amax(1, keepdim=True)
    numbers = next_block, next_t, segment.gather(1, last)[:, 0]
    return tuple(x.masked_fill(none, 0) for x in numbers)


class BaseCache:
    """Length and numbering of what a cache holds, common to all trunks.

    Attributes:
        batch: rows B.
        max_len: maximum number of tokens per row, or None.
        length: tokens per row, padding included.
    """

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        if batch < 1 or (max_len is not None and max_len < 1):
            raise ValueError(f"batch={batch} and max_len={max_len}, expected 1 or more")
        self.batch, self.max_len, self.length = batch, max_len, 0

    def next_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's next block and next t, and the segment of its last token: (B,) each; 0 in rows with none."""
        raise NotImplementedError

    def offset(self, tokens: Tokens) -> Tokens:
        """Renumber tokens so that they follow the cached ones, as `Tokens.cat(..., sequential=True)` does.

        Args:
            tokens: (B, N, D) numbered from 0, as a front-end makes them: t and block continue in each row from its last
                valid token, whose segment they join.
        """
        self.check(tokens)
        if not self.length:
            return tokens
        block, t, segment = self.next_numbers()
        pos = tokens.pos.clone()
        pos[..., 0] += t[:, None]
        layout = tokens.layout
        if layout is not None:
            layout = OffsetLayout(layout.lengths, layout.order, layout.origin, start=self.length)
        return tokens.replace(
            pos=pos,
            block=tokens.block + block[:, None],
            segment=tokens.segment + segment[:, None],
            layout=layout,
        )

    def check(self, tokens: Tokens) -> None:
        """Check that these tokens fit.

        Raises:
            ValueError: another number of rows, or more tokens than `max_len`.
        """
        b, n, _ = tokens.shape
        if b != self.batch:
            raise ValueError(
                f"tokens have {b} rows and this cache {self.batch}: cache.select(rows) changes its rows"
            )
        if self.max_len is not None and self.length + n > self.max_len:
            raise ValueError(
                f"{n} more tokens after {self.length} are more than max_len={self.max_len}: make the cache with a "
                "larger max_len, or None to let it grow"
            )


class Cache(BaseCache):
    """Keys and values of all past tokens; made by `Transformer.cache`.

    `length` includes padding: the padding of a row is masked, its tokens are not moved.
    """

    def __init__(self, depth: int, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.layers = [LayerCache(max_len) for _ in range(depth)]
        self.valid, self.segment, self.block, self.t = (Buffer(max_len) for _ in range(4))
        self.dense = True  # every row is one sample without padding, in reading order
        self.context: Tokens | None = None  # without its embeddings
        self._context_in: Tokens | None = None  # the object passed in, to recognise it

    def next_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.dense:
            return self.block.value.amax(1) + 1, self.t.value.amax(1).floor() + 1, self.segment.value[:, -1]
        return next_numbers(self.valid.value, self.block.value, self.t.value, self.segment.value)

    def plan(
        self, tokens: Tokens, window: float | None = None, context: Tokens | None = None
    ) -> AttentionPlan:
        """How these tokens attend to the cached ones, themselves and a context; adds them to the cache.

        Raises:
            ValueError: as in `check`, or another context than the first one.
        """
        self.check(tokens)
        if context is not None:
            if self.context is not None and context is not self._context_in:
                raise ValueError(
                    "this cache already holds the keys and values of another context: pass no context after the first "
                    "call, or start with a new cache"
                )
            self._context_in = context
        keys = self.context if self.context is not None else context
        self.dense = self._stays_dense(tokens)
        if self.length or self.context is not None:
            self._append(tokens)
            cross = None if keys is None else plan_cross_attention(tokens, keys)
            plan = dataclasses.replace(self._plan_cached(tokens, window), cross=cross, cached=True)
        else:  # no past tokens: every mode works
            plan = plan_attention(tokens, window, context=context)
            self._append(tokens)
        if self.context is None and context is not None:
            self.context = context.replace(x=context.x[..., :0].detach())
        return plan

    def _append(self, tokens: Tokens) -> None:
        self.valid.append(tokens.valid)
        self.segment.append(tokens.segment)
        self.block.append(tokens.block)
        self.t.append(tokens.pos[..., 0])
        self.length += tokens.shape[1]

    def _stays_dense(self, tokens: Tokens) -> bool:
        layout, n = tokens.layout, tokens.shape[1]
        if not self.dense or layout is None or not layout.full(n):
            return False
        if not self.length:
            return True
        if isinstance(layout, OffsetLayout):
            return layout.start == self.length
        if tokens.device.type != "cpu":  # reading a tensor would wait for the device; `offset` avoids it
            return False
        block, _, segment = self.next_numbers()
        return bool(((tokens.segment[:, 0] == segment) & (tokens.block.amin(1) >= block)).all())

    def _plan_cached(self, tokens: Tokens, window: float | None) -> AttentionPlan:
        """How the tokens just appended attend to all cached ones."""
        n, total = tokens.shape[1], self.length
        if self.dense and window is None:
            if n == 1 or tokens.layout.order == "bidirectional":
                return AttentionPlan("full")
            if tokens.layout.order == "causal":  # aligned at the lower right: the last token attends to all
                mask = torch.ones(n, total, dtype=torch.bool, device=tokens.device).tril(total - n)
                return AttentionPlan("dense", mask=mask[None, None])
        mask = self.visible(tokens, window) | ~tokens.valid[:, :, None]
        return AttentionPlan("dense", mask=mask[:, None])

    def visible(self, tokens: Tokens, window: float | None = None) -> Tensor:
        """The rule of visibility from some tokens to all cached ones: (B, N, L) bool, True = attends."""
        mask = self.valid.value[:, None] & (tokens.segment[:, :, None] == self.segment.value[:, None])
        mask = mask & (self.block.value[:, None] <= tokens.block[:, :, None])
        if window is not None:
            mask = mask & (tokens.pos[:, :, None, 0] - self.t.value[:, None] < window)
        return mask

    def _buffers(self) -> list[Buffer]:
        keys_values = [s for layer in self.layers for s in (layer.k, layer.v)]
        return [self.valid, self.segment, self.block, self.t, *keys_values]

    def select(self, rows: Sequence[int] | Tensor) -> Cache:
        """Select rows in this order, with repetitions, as beam search does; in place.

        Args:
            rows: row numbers, (B',) int64.

        Returns:
            This cache. `copy()` first to keep the other rows too.
        """
        known = self.valid.data if self.length else self.context.x if self.context is not None else None
        rows = torch.as_tensor(rows, dtype=torch.long, device=None if known is None else known.device)
        for buffer in self._buffers():
            buffer.select(rows)
        for layer in self.layers:
            if layer.context is not None:
                layer.context = tuple(t.index_select(0, rows) for t in layer.context)
        if self.context is not None:
            layout = self.context.layout
            uniform = layout is not None and layout.full(self.context.shape[1])
            layout = Layout(layout.lengths[:1] * len(rows), layout.order) if uniform else None
            self.context = self.context[rows].replace(layout=layout)
        self.batch = len(rows)
        return self

    def crop(self, length: int) -> Cache:
        """Keep only the first `length` tokens of every row; in place, returns this cache."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop({length}): expected 0 to {self.length}, the cached tokens")
        for buffer in self._buffers():
            buffer.crop(length)
        self.length = length
        self.dense = self.dense or length == 0
        return self

    def copy(self) -> Cache:
        """An independent copy."""
        new = copy.copy(self)
        for name in ("valid", "segment", "block", "t"):
            setattr(new, name, getattr(self, name).copy())
        new.layers = []
        for layer in self.layers:
            twin = copy.copy(layer)
            twin.k, twin.v = layer.k.copy(), layer.v.copy()
            new.layers.append(twin)
        return new
