"""Recurrent trunks with the Transformer's face: Tokens in, Tokens out, left to right, one state for each sample.

The tokens of all samples go through torch's own RNN, LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) as
one packed sequence: the first tokens of all, the second ones of all, and so on. No step of it is Python and no padding
is computed.

Shapes: B rows, N tokens, D width, S samples, T = all valid tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from worldtokens.backbone.cache import Memory, row_ends
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

KINDS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class State(Memory):
    """Where a recurrent trunk stands in each row: hidden states, and how far the row was read."""

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.hidden: tuple[Tensor, ...] = ()  # (layers, B, D) each: h, and c of an LSTM
        self.next: tuple[Tensor, ...] = ()  # (B,) each: next block, next t, segment
        self.some: Tensor | None = None  # (B,) bool: rows that have read anything

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

    Raises:
        ValueError: arguments don't fit together, the tokens have another width, or a bidirectional trunk is given tokens
            that mustn't read later ones.
    """

    def __init__(
        self, kind: str, dim: int, depth: int = 1, bidirectional: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}, expected one of {sorted(KINDS)}")
        if depth < 1 or not 0.0 <= dropout < 1.0:
            raise ValueError(f"depth={depth} and dropout={dropout}, expected 1 or more, and 0 <= dropout < 1")
        if bidirectional and dim % 2:
            raise ValueError(f"dim={dim} is odd, and a bidirectional trunk halves it")
        self.dim, self.bidirectional = dim, bidirectional
        width = dim // 2 if bidirectional else dim
        # torch warns about a dropout that has no second layer to act before
        between = dropout if depth > 1 else 0.0
        self.rnn = KINDS[kind](
            dim, width, depth, batch_first=True, dropout=between, bidirectional=bidirectional
        )
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

    def forward(self, tokens: Tokens, cache: State | None = None) -> Tokens:
        """Update every token by those before it in its sample, and by those after it where bidirectional.

        Args:
            tokens: (B, N, D). Without a layout the device is asked once where the samples are.
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
        if not n:
            return tokens
        known = tokens if tokens.layout is not None else tokens.measured()
        layout = known.layout
        if layout is not None and layout.full(n) and layout.order != "any":
            if self.bidirectional and layout.order != "together" and n > 1:
                raise ValueError(_LATER)
            start = None if cache is None else self._resume(cache, list(range(b)), tokens.segment[:, 0])
            x, end = self.rnn(tokens.x, start)
            rows = ends = list(range(b))
        else:
            x, end, rows, ends = self._ragged(known, cache)
        if cache is not None:
            self._keep(cache, end, rows, ends)
            cache.hold(tokens)
        return tokens.replace(x=x)

    def _ragged(self, tokens: Tokens, cache: State | None) -> tuple:
        """As one packed sequence; gives (B, N, D), the states, and of each row that has any its last sample."""
        b, n, d = tokens.shape
        device = tokens.device
        found = []
        for row, places in tokens._samples():
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
        index = place.flatten()[flat]  # (T,): the first tokens of all samples, the second ones of all, ...
        rows = [row for row, _ in found]
        start = None if cache is None else self._resume(cache, rows, tokens.segment.flatten()[place[0]])
        x = tokens.x.reshape(b * n, d)[index]
        out, end = self.rnn(PackedSequence(x, sizes), start)
        whole = out.data.new_zeros(b * n, d).index_copy(0, index, out.data).view(b, n, d)
        last = {}
        for s, (row, p) in enumerate(found):
            if row not in last or int(p[-1]) > last[row][0]:
                last[row] = (int(p[-1]), s)
        return whole, end, list(last), [s for _, s in last.values()]

    def _resume(self, state: State, rows: list[int], segment: Tensor):
        """The states (layers, S, D) that samples of these rows and segments start from."""
        if not state.length:
            return None
        row = torch.tensor(rows, device=segment.device)
        goes_on = state.some[row] & (state.next[2][row] == segment)
        start = tuple(h[:, row].masked_fill(~goes_on[:, None], 0) for h in state.hidden)
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


_LATER = (
    "these tokens mustn't read later ones and a bidirectional trunk would: use bidirectional=False, or read them together "
    "with tokens.together()"
)
