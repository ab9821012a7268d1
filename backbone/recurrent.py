"""Recurrent trunks with the Transformer's face: Tokens in, Tokens out, left to right, one state for each sample.

The tokens of all samples go through torch's own RNN, LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) as
one packed sequence: the first tokens of all, the second ones of all, and so on. No step of it is Python and no padding
is computed.

With ``cross=True`` it reads a context as the first sequence-to-sequence models did (Cho et al. 2014; Sutskever et al.
2014): through one vector of fixed size, however long the context is. `backbone/additive.py` looks at all of it instead.

Shapes: B rows, N tokens, D width, S samples, T = all valid tokens, K tokens of a context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from worldtokens.backbone.cache import Memory, row_ends
from worldtokens.packing import samples
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

KINDS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Told(NamedTuple):
    """What a context says to a recurrent trunk: something to add to every token, and the states to start from."""

    each: Tensor  # (B, 1, D)
    start: tuple[Tensor, ...]  # (layers, B, D) each


class State(Memory):
    """Where a recurrent trunk stands in each row: hidden states, and how far the row was read."""

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.hidden: tuple[Tensor, ...] = ()  # (layers, B, D) each: h, and c of an LSTM
        self.next: tuple[Tensor, ...] = ()  # (B,) each: next block, next t, segment
        self.some: Tensor | None = None  # (B,) bool: rows that have read anything
        self.told: Told | None = None  # what the context said

    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.next

    def hold(self, tokens: Tokens) -> None:
        some = tokens.valid.any(1)
        ends = row_ends(tokens.valid, tokens.block, tokens.pos[..., 0], tokens.segment)
        if self.length:
            ends = tuple(torch.where(some, new, old) for new, old in zip(ends, self.next, strict=True))
            some = some | self.some
        self.next, self.some = ends, some
        self.length += tokens.shape[1]

    def select(self, rows: Sequence[int] | Tensor) -> State:
        """Keep these rows, in this order and as often as named; changes this state and returns it."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.some.device if self.length else None)
        self.hidden = tuple(h.index_select(1, rows) for h in self.hidden)
        self.next = tuple(e.index_select(0, rows) for e in self.next)
        self.some = self.some.index_select(0, rows) if self.length else None
        if self.told is not None:
            self.told = Told(self.told.each[rows], tuple(h[:, rows] for h in self.told.start))
        self.batch = len(rows)
        return self

    def copy(self) -> State:
        """A state that holds the same and goes its own way from here."""
        return copy.copy(self)


class Recurrent(Part):
    """A stack of recurrent layers over `Tokens`.

    Each sample (segment) is read by itself, from its lowest block to its highest and from left to right inside a block,
    so that a token never reads what the one rule hides from it. Padding may hold anything and gives zeros.

    Args:
        kind: ``"rnn"`` (tanh), ``"lstm"`` or ``"gru"``.
        dim: width D of tokens in and out.
        depth: layers.
        bidirectional: each layer reads right to left too, each way D / 2 wide; for tokens that are read together.
        dropout: chance of zeroing what goes from one layer to the next in training, 0 to 1.
        cross: reads a context too: its first and last valid token, through one layer, become a vector that is added to
            every token, and the states to start from. Rows then hold one sample each.
        context_dim: width of the context's tokens. None: `dim`.
        first_norm: a norm before the first layer, for front-ends whose tokens start small.

    Raises:
        ValueError: arguments do not fit together, the tokens have another width, or a bidirectional trunk is given tokens
            that must not read later ones.
    """

    def __init__(
        self,
        kind: str,
        dim: int,
        depth: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        cross: bool = False,
        context_dim: int | None = None,
        first_norm: bool = False,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}, expected one of {sorted(KINDS)}")
        if depth < 1 or not 0.0 <= dropout < 1.0:
            raise ValueError(f"depth={depth} and dropout={dropout}, expected 1 or more, and 0 <= dropout < 1")
        if bidirectional and dim % 2:
            raise ValueError(f"dim={dim} is odd, and a bidirectional trunk halves it")
        if bidirectional and cross:
            raise ValueError("a trunk that reads a context writes from left to right: bidirectional=False")
        if context_dim is not None and not cross:
            raise ValueError(f"context_dim={context_dim} without a context: give cross=True too")
        self.dim, self.bidirectional, self.cross = dim, bidirectional, cross
        self.context_dim = context_dim or dim
        width = dim // 2 if bidirectional else dim
        self.first_norm = nn.LayerNorm(dim) if first_norm else nn.Identity()
        # torch warns about a dropout that has no second layer to act before
        between = dropout if depth > 1 else 0.0
        self.rnn = KINDS[kind](
            dim, width, depth, batch_first=True, dropout=between, bidirectional=bidirectional
        )
        if cross:
            states = 2 if kind == "lstm" else 1
            self.summary = nn.Linear(2 * self.context_dim, dim)
            self.tell = nn.Linear(dim, dim, bias=False)
            self.start = nn.Linear(dim, states * depth * dim)
        self.init_weights()

    def init_weights(self) -> None:
        """Input maps: Glorot; state maps: orthogonal for each gate; biases 0, but 1 for an LSTM's forget gate
        (Jozefowicz et al. 2015), so that it remembers from the start."""
        width = self.rnn.hidden_size
        with torch.no_grad():
            for name, p in self.rnn.named_parameters():
                if name.startswith("weight_ih"):
                    for gate in p.split(width):
                        nn.init.xavier_uniform_(gate)
                elif name.startswith("weight_hh"):
                    for gate in p.split(width):
                        nn.init.orthogonal_(gate)
                else:
                    p.zero_()
                    if isinstance(self.rnn, nn.LSTM) and name.startswith("bias_ih"):
                        p[width : 2 * width] = 1.0

    def cache(self, batch: int, max_len: int | None = None) -> State:
        """An empty state for stepwise decoding.

        Args:
            batch: rows B.
            max_len: the longest row allowed, or None; a state takes the same room however long the row.
        """
        return State(batch, max_len)

    def forward(self, tokens: Tokens, context: Tokens | None = None, cache: State | None = None) -> Tokens:
        """Update every token by those before it in its sample, and by those after it where bidirectional.

        Args:
            tokens: (B, N, D). Without a layout the device is asked once where the samples are.
            context: (B, K, context_dim), one sample a row, with ``cross=True``. With a cache it is needed once.
            cache: the state after the tokens before; a sample of the segment that a row ended with goes on from it.

        Returns:
            The same tokens with new `x`; zeros at padding.
        """
        b, n, d = tokens.shape
        if d != self.dim:
            raise ValueError(
                f"tokens are {d} wide and this trunk {self.dim}: give the front-end dim={self.dim}"
            )
        if cache is not None:
            if self.bidirectional:
                raise ValueError(
                    "a bidirectional trunk reads to the end before it answers: it has no stepwise state"
                )
            cache.check(tokens)
        told = self._told(tokens, context, cache)
        if not n:
            return tokens
        x = self.first_norm(tokens.x)
        tokens = tokens.replace(x=x if told is None else x + told.each)
        first = None if told is None else told.start
        known = tokens if tokens.layout is not None else tokens.infer_layout()
        layout = known.layout
        if layout is not None and layout.full(n) and layout.order != "any":
            if self.bidirectional and layout.order != "bidirectional" and n > 1:
                raise ValueError(_LATER)
            start = self._resume(cache, first, list(range(b)), tokens.segment[:, 0])
            x, end = self.rnn(tokens.x, start)
            rows = ends = list(range(b))
        else:
            x, end, rows, ends = self._ragged(known, cache, first)
        if cache is not None:
            self._keep(cache, end, rows, ends)
            cache.hold(tokens)
        return tokens.replace(x=x)

    def _told(self, tokens: Tokens, context: Tokens | None, cache: State | None) -> Told | None:
        if not self.cross:
            if context is not None:
                raise ValueError("this trunk reads no context: build it with cross=True")
            return None
        if cache is not None and cache.told is not None:
            return cache.told
        check_context(self, tokens, context)
        # the first token too: a bidirectional encoder has read the whole from right to left there
        ends = torch.cat([context.pool("first"), context.pool("last")], -1)  # (B, 2 Dc)
        summary = self.summary(ends).tanh()
        start = self.start(summary).tanh().unflatten(-1, (-1, self.rnn.num_layers, self.dim))
        start = start.permute(1, 2, 0, 3).contiguous()  # (h and c, layers, B, D)
        told = Told(self.tell(summary)[:, None], start.unbind(0))
        if cache is not None:
            cache.told = told
        return told

    def _ragged(self, tokens: Tokens, cache: State | None, first: tuple[Tensor, ...] | None) -> tuple:
        """As one packed sequence; gives (B, N, D), the states, and of each row that has any its last sample."""
        b, n, d = tokens.shape
        device = tokens.device
        found = []
        for row, places in samples(tokens.layout, tokens.valid, tokens.segment):
            places = places.cpu() if isinstance(places, Tensor) else torch.arange(places.start, places.stop)
            if len(places):
                found.append((row, places))
        found.sort(key=lambda sample: -len(sample[1]))
        if not found:
            return torch.zeros_like(tokens.x), None, [], []
        place = pad_sequence([row * n + p for row, p in found])  # (longest, S), on the CPU as what follows
        inside = torch.arange(len(place))[:, None] < torch.tensor([len(p) for _, p in found])
        flat = inside.flatten().nonzero()[:, 0].to(device)
        sizes, place, inside = inside.sum(1), place.to(device), inside.to(device)
        order = tokens.layout.order if tokens.layout is not None else "any"
        if order == "any":
            block = tokens.block.flatten()[place].masked_fill(~inside, torch.iinfo(torch.int32).max)
            if self.bidirectional and bool(((block != block[0]) & inside).any()):
                raise ValueError(_LATER)
            place = place.gather(0, block.argsort(dim=0, stable=True))
        elif self.bidirectional and order == "causal" and len(place) > 1:
            raise ValueError(_LATER)
        rows = [row for row, _ in found]
        start = self._resume(cache, first, rows, tokens.segment.flatten()[place[0]])
        x = tokens.x.reshape(b * n, d)
        if cache is None and not self.bidirectional and device.type == "cpu" and torch.is_grad_enabled():
            return self._side_by_side(x, place, inside, start).view(b, n, d), None, [], []
        index = place.flatten()[flat]  # (T,): the first tokens of all samples, the second ones of all, ...
        out, end = self.rnn(PackedSequence(x[index], sizes), start)
        whole = out.data.new_zeros(b * n, d).index_copy(0, index, out.data).view(b, n, d)
        last = {}
        for s, (row, p) in enumerate(found):
            if row not in last or int(p[-1]) > last[row][0]:
                last[row] = (int(p[-1]), s)
        return whole, end, list(last), [s for _, s in last.values()]

    def _side_by_side(self, x: Tensor, place: Tensor, inside: Tensor, start) -> Tensor:
        """Samples of like length as rows of one padded batch; x is (B N, D), and so is what comes out.

        `place` (longest, S) says where in x a sample's tokens are, the longest sample first, `inside` how far it goes.

        Going from left to right, nothing reads the padding at a row's end. On a CPU the backward pass of a packed
        sequence makes a gradient of the whole sequence's size at every step: six times slower at 128 steps.
        """
        place = torch.where(inside, place, place[0])  # padding repeats a valid token
        lengths = inside.sum(0).tolist()
        whole, i = None, 0
        while i < len(lengths):
            j = next((k for k in range(i, len(lengths)) if 2 * lengths[k] < lengths[i]), len(lengths))
            index, valid = (t[: lengths[i], i:j].T for t in (place, inside))
            part = start
            if start is not None:
                part = tuple(s[:, i:j] for s in start) if isinstance(start, tuple) else start[:, i:j]
            out, _ = self.rnn(x[index], part)
            whole = torch.zeros_like(x, dtype=out.dtype) if whole is None else whole
            whole, i = whole.index_copy(0, index[valid], out[valid]), j
        return whole

    def _resume(
        self, state: State | None, first: tuple[Tensor, ...] | None, rows: list[int], segment: Tensor
    ):
        """The states (layers, S, D) that samples of these rows and segments start from."""
        row = torch.tensor(rows, device=segment.device)
        start = None if first is None else tuple(h[:, row] for h in first)
        if state is not None and state.length:
            goes_on = (state.some[row] & (state.next[2][row] == segment))[:, None]
            other = start or (0.0,) * len(state.hidden)
            start = tuple(
                torch.where(goes_on, h[:, row], o) for h, o in zip(state.hidden, other, strict=True)
            )
        if start is None:
            return None
        return start if isinstance(self.rnn, nn.LSTM) else start[0]

    def _keep(self, state: State, end, rows: list[int], samples: list[int]) -> None:
        """Row `rows[i]` now stands where sample `samples[i]` ended."""
        if end is None:
            new = state.hidden or self._zeros(state)
        else:
            end = end if isinstance(end, tuple) else (end,)
            row, sample = (torch.tensor(i, device=end[0].device) for i in (rows, samples))
            held = state.hidden or tuple(h.new_zeros(h.shape[0], state.batch, h.shape[2]) for h in end)
            new = tuple(
                h.index_copy(1, row, e[:, sample].to(h.dtype)) for h, e in zip(held, end, strict=True)
            )
        state.hidden = new

    def _zeros(self, state: State) -> tuple[Tensor, ...]:
        weight = self.rnn.weight_hh_l0
        zero = weight.new_zeros(self.rnn.num_layers, state.batch, self.rnn.hidden_size)
        return (zero, zero) if isinstance(self.rnn, nn.LSTM) else (zero,)


def check_context(trunk: Part, tokens: Tokens, context: Tokens | None) -> None:
    """Can a recurrent `trunk` read this context for these tokens?

    Raises:
        ValueError: there is none, or rows, samples or widths do not fit.
    """
    if context is None:
        raise ValueError("this trunk reads a context and got none: trunk(tokens, context=...)")
    if context.dim != trunk.context_dim or len(context) != len(tokens):
        raise ValueError(
            f"the context is {len(context)} rows of {context.dim} channels, expected {len(tokens)} rows of "
            f"{trunk.context_dim}"
        )
    if any(t.layout is not None and not t.layout.single for t in (tokens, context)):
        raise ValueError("a recurrent trunk reads a context row by row: one sample a row, unpack the tokens")


_LATER = (
    "these tokens must not read later ones and a bidirectional trunk would: use bidirectional=False, or read them together "
    "with tokens.bidirectional()"
)
