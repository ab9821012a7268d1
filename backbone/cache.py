"""What a trunk remembers of the tokens that it has read, so that the next ones cost one step each.

A cache keeps, for every layer, the keys and values of all tokens so far, and for every token what the one rule of
visibility asks for: validity, segment, block, t. New tokens then read by that rule, whatever their rows hold: prompts
of different length, packed samples, a prefix read together. The common step, one more token in rows that are whole,
needs no mask. Keys and values of a context are computed once.

    cache = trunk.cache(batch=len(prompt))
    out = trunk(prompt, cache=cache)
    out = trunk(cache.follow(next_tokens), cache=cache)

Shapes: B rows, N new tokens, L tokens held, H heads, E = D / H.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens.backbone.attention import Reading, plan, plan_cross
from worldtokens.layout import Layout
from worldtokens.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Following(Layout):
    """The layout of tokens that come straight after the first `start` held by a cache, as `follow` makes them."""

    start: int = 0


class Strip:
    """A tensor (B, L, ...) that grows along its second axis: room for `most`, or doubled when it is short."""

    def __init__(self, most: int | None) -> None:
        self.most, self.room, self.length = most, None, 0

    @property
    def value(self) -> Tensor:
        return self.room[:, : self.length]

    def append(self, new: Tensor) -> Tensor:
        """Hold (B, N, ...) more; gives all that is held."""
        end = self.length + new.shape[1]
        if torch.is_grad_enabled() and (new.requires_grad or (self.length and self.room.requires_grad)):
            # written in place, a gradient's history would be overwritten
            self.room = torch.cat((self.value, new), 1) if self.length else new
        else:
            frozen = self.length and self.room.is_inference() and not torch.is_inference_mode_enabled()
            if self.room is None or end > self.room.shape[1] or frozen:
                room = new.new_empty(new.shape[0], self.most or max(end, 2 * self.length, 16), *new.shape[2:])
                if self.length:
                    room[:, : self.length] = self.value
                self.room = room
            self.room[:, self.length : end] = new
        self.length = end
        return self.value

    def select(self, rows: Tensor) -> None:
        if self.room is not None:
            held = self.value.index_select(0, rows)
            self.room, self.length = None, 0
            self.append(held)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def copy(self) -> Strip:
        new = copy.copy(self)
        new.room = None if self.room is None else self.room.clone()
        return new


class LayerCache:
    """One layer's keys and values, (B, L, Hkv, E), and those of its context."""

    def __init__(self, most: int | None) -> None:
        self.k, self.v = Strip(most), Strip(most)
        self.context: tuple[Tensor, Tensor] | None = None


def row_ends(valid: Tensor, block: Tensor, t: Tensor, segment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, L) each -> each row's next block and next t, and the segment of its last valid token; 0 in rows with none."""
    none = ~valid.any(1)
    next_block = block.masked_fill(~valid, torch.iinfo(torch.int32).min).amax(1) + 1
    next_t = t.masked_fill(~valid, -torch.inf).amax(1).floor() + 1
    last = torch.arange(valid.shape[1], device=valid.device).masked_fill(~valid, 0).amax(1, keepdim=True)
    ends = next_block, next_t, segment.gather(1, last)[:, 0]
    return tuple(e.masked_fill(none, 0) for e in ends)


class Memory:
    """How far each row has been read: what the caches of all trunks share.

    Attributes:
        batch: rows B.
        max_len: tokens that a row may hold, or None.
        length: tokens held in every row, padding counted.
    """

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        if batch < 1 or (max_len is not None and max_len < 1):
            raise ValueError(f"batch={batch} and max_len={max_len}, expected 1 or more")
        self.batch, self.max_len, self.length = batch, max_len, 0

    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's next block and next t, and the segment of its last token: (B,) each; 0 in rows with none."""
        raise NotImplementedError

    def follow(self, tokens: Tokens) -> Tokens:
        """These tokens made to come after what is held, as `Tokens.cat(..., follow=True)` does.

        Args:
            tokens: (B, N, D) numbered from 0, as a front-end gives them: t and block count on in each row from its last
                valid token, whose segment they go on with.
        """
        self.check(tokens)
        if not self.length:
            return tokens
        block, t, segment = self.ends()
        pos = tokens.pos.clone()
        pos[..., 0] += t[:, None]
        layout = tokens.layout
        if layout is not None:
            layout = Following(layout.lengths, layout.order, layout.origin, start=self.length)
        return tokens.replace(
            pos=pos,
            block=tokens.block + block[:, None],
            segment=tokens.segment + segment[:, None],
            layout=layout,
        )

    def check(self, tokens: Tokens) -> None:
        """Do these tokens fit?

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


class Cache(Memory):
    """Keys and values of all tokens so far; made by `Transformer.cache`.

    `length` counts the places in a row, padding too, since a place that one row leaves out is masked and not moved.
    """

    def __init__(self, depth: int, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.layers = [LayerCache(max_len) for _ in range(depth)]
        self.valid, self.segment, self.block, self.t = (Strip(max_len) for _ in range(4))
        self.whole = True  # every place of every row is one sample's, in reading order
        self.context: Tokens | None = None  # without its embeddings
        self._given: Tokens | None = None

    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.whole:
            return self.block.value.amax(1) + 1, self.t.value.amax(1).floor() + 1, self.segment.value[:, -1]
        return row_ends(self.valid.value, self.block.value, self.t.value, self.segment.value)

    def plan(self, tokens: Tokens, window: float | None = None, context: Tokens | None = None) -> Reading:
        """How these tokens read what is held, themselves and a context; they are held from now on.

        Raises:
            ValueError: as in `check`, or another context than the first one.
        """
        self.check(tokens)
        if context is not None:
            if self.context is not None and context is not self._given:
                raise ValueError(
                    "this cache already holds the keys and values of another context: leave context out after the first "
                    "call, or start with a new cache"
                )
            self._given = context
        held = self.context if self.context is not None else context
        self.whole = self._stays_whole(tokens)
        if self.length or self.context is not None:
            self._hold(tokens)
            cross = None if held is None else plan_cross(tokens, held)
            reading = dataclasses.replace(self._back(tokens, window), cross=cross, past=True)
        else:  # nothing to look back at: every way of reading will do
            reading = plan(tokens, window, context=context)
            self._hold(tokens)
        if self.context is None and context is not None:
            self.context = context.replace(x=context.x[..., :0].detach())
        return reading

    def _hold(self, tokens: Tokens) -> None:
        self.valid.append(tokens.valid)
        self.segment.append(tokens.segment)
        self.block.append(tokens.block)
        self.t.append(tokens.pos[..., 0])
        self.length += tokens.shape[1]

    def _stays_whole(self, tokens: Tokens) -> bool:
        layout, n = tokens.layout, tokens.shape[1]
        if not self.whole or layout is None or not layout.full(n):
            return False
        if not self.length:
            return True
        if isinstance(layout, Following):
            return layout.start == self.length
        if tokens.device.type != "cpu":  # a look would wait for the device; `follow` tells without one
            return False
        block, _, segment = self.ends()
        return bool(((tokens.segment[:, 0] == segment) & (tokens.block.amin(1) >= block)).all())

    def _back(self, tokens: Tokens, window: float | None) -> Reading:
        """How the tokens just held read all that is held."""
        n, held = tokens.shape[1], self.length
        if self.whole and window is None:
            if n == 1 or tokens.layout.order == "bidirectional":
                return Reading("full")
            if tokens.layout.order == "causal":  # aligned at the lower right: the last token reads all
                mask = torch.ones(n, held, dtype=torch.bool, device=tokens.device).tril(held - n)
                return Reading("dense", mask=mask[None, None])
        return Reading("dense", mask=(self.visible(tokens, window) | ~tokens.valid[:, :, None])[:, None])

    def visible(self, tokens: Tokens, window: float | None = None) -> Tensor:
        """The rule of visibility between some tokens and all that are held: (B, N, L) bool, True = reads."""
        mask = self.valid.value[:, None] & (tokens.segment[:, :, None] == self.segment.value[:, None])
        mask = mask & (self.block.value[:, None] <= tokens.block[:, :, None])
        if window is not None:
            mask = mask & (tokens.pos[:, :, None, 0] - self.t.value[:, None] < window)
        return mask

    def _strips(self) -> list[Strip]:
        own = [s for layer in self.layers for s in (layer.k, layer.v)]
        return [self.valid, self.segment, self.block, self.t, *own]

    def select(self, rows: Sequence[int] | Tensor) -> Cache:
        """Keep these rows, in this order and as often as named, as beam search does; changes this cache.

        Args:
            rows: row numbers, (B',) int64.

        Returns:
            This cache. `copy()` first to keep the other rows too.
        """
        known = self.valid.room if self.length else self.context.x if self.context is not None else None
        rows = torch.as_tensor(rows, dtype=torch.long, device=None if known is None else known.device)
        for strip in self._strips():
            strip.select(rows)
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
        """Forget all but the first `length` places of every row; changes this cache and returns it."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop({length}): expected 0 to {self.length}, the places held")
        for strip in self._strips():
            strip.crop(length)
        self.length = length
        self.whole = self.whole or length == 0
        return self

    def copy(self) -> Cache:
        """A cache that holds the same and goes its own way from here."""
        new = copy.copy(self)
        for name in ("valid", "segment", "block", "t"):
            setattr(new, name, getattr(self, name).copy())
        new.layers = []
        for layer in self.layers:
            twin = copy.copy(layer)
            twin.k, twin.v = layer.k.copy(), layer.v.copy()
            new.layers.append(twin)
        return new
