"""Recurrent trunks with the interface of `Transformer`: Tokens in, Tokens out, left to right, one state per sample.

The tokens of all samples go through torch's RNN, LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) as one
`PackedSequence`: the first tokens of all samples, then the second ones, and so on. No time step runs in Python and no
padding is computed.

With ``cross=True`` it uses a context as the first sequence-to-sequence models did (Cho et al. 2014; Sutskever et al.
2014): through one vector of fixed size, whatever the context's length. `backbone/additive.py` attends to it instead.

Shapes: B rows, N tokens, D width, S samples, T = all valid tokens, K tokens of a context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from worldtokens.backbone.cache import BaseCache, next_numbers
from worldtokens.packing import samples
from worldtokens.parts import Part
from worldtokens.tokens import Tokens

KINDS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class ContextState(NamedTuple):
    """What a recurrent trunk uses of a context: a bias for every token, and the initial states."""

    bias: Tensor  # (B, 1, D)
    initial: tuple[Tensor, ...]  # (layers, B, D) each


class RecurrentState(BaseCache):
    """The hidden states after the past tokens of each row, and their numbering."""

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.hidden: tuple[Tensor, ...] = ()  # (layers, B, D) each: h, and c of an LSTM
        self.next: Any = ()  # (B,) each: next block, next t, segment
        self.started: Tensor | None = None  # (B,) bool: rows with past tokens
        self.context: ContextState | None = None

    def next_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.next

    def append(self, tokens: Tokens) -> None:
        started = tokens.valid.any(1)
        numbers = next_numbers(tokens.valid, tokens.block, tokens.pos[..., 0], tokens.segment)
        if self.length:
            a, b, c = (torch.where(started, a, b) for a, b in zip(numbers, self.next, strict=True))
            numbers = (a, b, c)
            started = started | self.started
        self.next, self.started = numbers, started
        self.length += tokens.shape[1]

    def select(self, rows: Sequence[int] | Tensor) -> RecurrentState:
        """Select rows in this order, with repetitions; in place, returns this state."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.started.device if self.length else None)
        self.hidden = tuple(h.index_select(1, rows) for h in self.hidden)
        self.next = tuple(e.index_select(0, rows) for e in self.next)
        self.started = self.started.index_select(0, rows) if self.length else None
        if self.context is not None:
            bias, initial = self.context
            self.context = ContextState(bias[rows], tuple(h[:, rows] for h in initial))
        self.batch = len(rows)
        return self

    def copy(self) -> RecurrentState:
        """An independent copy."""
        return copy.copy(self)


class Recurrent(Part):
    """A stack of recurrent layers over `Tokens`.

    Each sample (segment) is processed separately, from its lowest block to its highest and from left to right inside a
    block, so that a token never depends on tokens that the rule of visibility hides from it. Padding may hold anything and
    gives zeros.

    Args:
        kind: ``"rnn"`` (tanh), ``"lstm"`` or ``"gru"``.
        dim: width D of tokens in and out.
        depth: layers.
        bidirectional: each layer also runs right to left, each direction with D / 2 channels; for bidirectional tokens.
        dropout: probability of zeroing a channel between layers in training, 0 to 1.
        cross: use a context: its first and last valid token give, through one layer, a vector that is added to every
            token, and the initial states. Rows then hold one sample each.
        context_dim: width of the context's tokens. None: `dim`.
        first_norm: LayerNorm before the first layer, for front-ends whose tokens have small values at initialisation.

    Raises:
        ValueError: arguments do not fit together, the tokens have another width, or a bidirectional trunk gets tokens
            of another reading order.
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
            raise ValueError(f"dim={dim} is odd, and a bidirectional trunk divides it by two")
        if bidirectional and cross:
            raise ValueError("cross=True needs a left-to-right trunk: bidirectional=False")
        if context_dim is not None and not cross:
            raise ValueError(f"context_dim={context_dim} without a context: set cross=True")
        self.dim, self.bidirectional, self.cross = dim, bidirectional, cross
        self.context_dim = context_dim or dim
        width = dim // 2 if bidirectional else dim
        self.first_norm = nn.LayerNorm(dim) if first_norm else nn.Identity()
        # torch warns about dropout without a second layer
        between = dropout if depth > 1 else 0.0
        self.rnn = KINDS[kind](
            dim, width, depth, batch_first=True, dropout=between, bidirectional=bidirectional
        )
        if cross:
            states = 2 if kind == "lstm" else 1
            self.summary = nn.Linear(2 * self.context_dim, dim)
            self.context_bias = nn.Linear(dim, dim, bias=False)
            self.initial = nn.Linear(dim, states * depth * dim)
        self.init_weights()

    def init_weights(self) -> None:
        """Input weights: Glorot; recurrent weights: orthogonal per gate; biases 0, but 1 for an LSTM's forget gate
        (Jozefowicz et al. 2015), so that early training keeps its state."""
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

    def cache(self, batch: int, max_len: int | None = None) -> RecurrentState:
        """An empty state for stepwise decoding.

        Args:
            batch: rows B.
            max_len: maximum number of tokens per row, or None; the size of a state does not depend on it.
        """
        return RecurrentState(batch, max_len)

    def forward(
        self, tokens: Tokens, context: Tokens | None = None, cache: RecurrentState | None = None
    ) -> Tokens:
        """Update every token from those before it in its sample, and those after it if bidirectional.

        Args:
            tokens: (B, N, D). Without a layout the samples are looked up on the device once.
            context: (B, K, context_dim), one sample per row, with ``cross=True``. With a cache it is needed once.
            cache: the state after the past tokens; a sample of the segment that a row ended with continues from it.

        Returns:
            The same tokens with new `x`; zeros at padding.
        """
        b, n, d = tokens.shape
        if d != self.dim:
            raise ValueError(
                f"tokens have dim {d} and this trunk {self.dim}: give the front-end dim={self.dim}"
            )
        if cache is not None:
            if self.bidirectional:
                raise ValueError("a bidirectional trunk needs the whole sequence: it has no stepwise state")
            cache.check(tokens)
        state = self._context_state(tokens, context, cache)
        if not n:
            return tokens
        x = self.first_norm(tokens.x)
        tokens = tokens.replace(x=x if state is None else x + state.bias)
        initial = None if state is None else state.initial
        known = tokens if tokens.layout is not None else tokens.infer_layout()
        layout = known.layout
        if layout is not None and layout.full(n) and layout.order != "any":
            if self.bidirectional and layout.order != "bidirectional" and n > 1:
                raise ValueError(_NOT_BIDIRECTIONAL)
            start = self._start(cache, initial, list(range(b)), tokens.segment[:, 0])
            x, end = self.rnn(tokens.x, start)
            rows = last = list(range(b))
        else:
            x, end, rows, last = self._run_ragged(known, cache, initial)
        if cache is not None:
            self._store(cache, end, rows, last)
            cache.append(tokens)
        return tokens.replace(x=x)

    def _context_state(
        self, tokens: Tokens, context: Tokens | None, cache: RecurrentState | None
    ) -> ContextState | None:
        if not self.cross:
            if context is not None:
                raise ValueError("this trunk takes no context: build it with cross=True")
            return None
        if cache is not None and cache.context is not None:
            return cache.context
        check_context(self, tokens, context)
        # the first token too: in a bidirectional encoder it ends the right-to-left pass
        ends = torch.cat([context.pool("first"), context.pool("last")], -1)  # (B, 2 Dc)
        summary = self.summary(ends).tanh()
        initial = self.initial(summary).tanh()  # h, and c of an LSTM, of every layer
        initial = rearrange(initial, "b (hc l d) -> hc l b d", l=self.rnn.num_layers, d=self.dim).contiguous()
        state = ContextState(self.context_bias(summary)[:, None], initial.unbind(0))
        if cache is not None:
            cache.context = state
        return state

    def _run_ragged(
        self, tokens: Tokens, cache: RecurrentState | None, initial: tuple[Tensor, ...] | None
    ) -> tuple:
        """Run all samples as one packed sequence.

        Returns:
            (B, N, D), the final states, the rows that have samples, and the last sample of each.
        """
        b, n, d = tokens.shape
        device = tokens.device
        found = []
        for row, index in samples(tokens.layout, tokens.valid, tokens.segment):
            index = index.cpu() if isinstance(index, Tensor) else torch.arange(index.start, index.stop)
            if len(index):
                found.append((row, index))
        found.sort(key=lambda sample: -len(sample[1]))
        if not found:
            return torch.zeros_like(tokens.x), None, [], []
        index = pad_sequence(
            [row * n + i for row, i in found]
        )  # (longest, S), on the CPU like the next lines
        valid = torch.arange(len(index))[:, None] < torch.tensor([len(i) for _, i in found])
        flat = valid.flatten().nonzero()[:, 0].to(device)
        sizes, index, valid = valid.sum(1), index.to(device), valid.to(device)
        order = tokens.layout.order if tokens.layout is not None else "any"
        if order == "any":
            block = tokens.block.flatten()[index].masked_fill(~valid, torch.iinfo(torch.int32).max)
            if self.bidirectional and bool(((block != block[0]) & valid).any()):
                raise ValueError(_NOT_BIDIRECTIONAL)
            index = index.gather(0, block.argsort(dim=0, stable=True))
        elif self.bidirectional and order == "causal" and len(index) > 1:
            raise ValueError(_NOT_BIDIRECTIONAL)
        rows = [row for row, _ in found]
        start = self._start(cache, initial, rows, tokens.segment.flatten()[index[0]])
        x = tokens.x.reshape(b * n, d)
        if cache is None and not self.bidirectional and device.type == "cpu" and torch.is_grad_enabled():
            return self._run_padded(x, index, valid, start).view(b, n, d), None, [], []
        packed = index.flatten()[flat]  # (T,): the first tokens of all samples, then the second ones, ...
        out, end = self.rnn(PackedSequence(x[packed], sizes), start)
        out = out.data.new_zeros(b * n, d).index_copy(0, packed, out.data).view(b, n, d)
        last: dict[int, tuple[int, int]] = {}
        for s, (row, i) in enumerate(found):
            if row not in last or int(i[-1]) > last[row][0]:
                last[row] = (int(i[-1]), s)
        return out, end, list(last), [s for _, s in last.values()]

    def _run_padded(self, x: Tensor, index: Tensor, valid: Tensor, start) -> Tensor:
        """Run samples of similar length as rows of one padded batch: (B N, D) -> the same.

        On a CPU the backward pass of a packed sequence allocates a gradient of the whole sequence's size at every step: six
        times slower at 128 steps. Left to right, no token depends on the padding at a row's end.

        Args:
            x: all tokens, flattened.
            index: (longest, S), the indices in x of each sample's tokens, the longest sample first.
            valid: (longest, S) bool, False after a sample's end.
            start: initial states.
        """
        index = torch.where(valid, index, index[0])  # padding repeats a valid token
        lengths = valid.sum(0).tolist()
        result: Any = None
        i = 0
        while i < len(lengths):
            j = next((k for k in range(i, len(lengths)) if 2 * lengths[k] < lengths[i]), len(lengths))
            rows, keep = (t[: lengths[i], i:j].T for t in (index, valid))
            state = start
            if start is not None:
                state = tuple(s[:, i:j] for s in start) if isinstance(start, tuple) else start[:, i:j]
            out, _ = self.rnn(x[rows], state)
            result = torch.zeros_like(x, dtype=out.dtype) if result is None else result
            result, i = result.index_copy(0, rows[keep], out[keep]), j
        return result

    def _start(
        self,
        cache: RecurrentState | None,
        initial: tuple[Tensor, ...] | None,
        rows: list[int],
        segment: Tensor,
    ):
        """The states (layers, S, D) at the start of samples of these rows and segments."""
        row = torch.tensor(rows, device=segment.device)
        start = None if initial is None else tuple(h[:, row] for h in initial)
        if cache is not None and cache.length:
            assert cache.started is not None
            continues = (cache.started[row] & (cache.next[2][row] == segment))[:, None]
            other: Any = start or (0.0,) * len(cache.hidden)
            start = tuple(
                torch.where(continues, h[:, row], o) for h, o in zip(cache.hidden, other, strict=True)
            )
        if start is None:
            return None
        return start if isinstance(self.rnn, nn.LSTM) else start[0]

    def _store(self, cache: RecurrentState, end, rows: list[int], samples: list[int]) -> None:
        """Store the final state of sample `samples[i]` as that of row `rows[i]`."""
        if end is None:
            new = cache.hidden or self._zeros(cache)
        else:
            end = end if isinstance(end, tuple) else (end,)
            row, sample = (torch.tensor(i, device=end[0].device) for i in (rows, samples))
            old = cache.hidden or tuple(h.new_zeros(h.shape[0], cache.batch, h.shape[2]) for h in end)
            new = tuple(h.index_copy(1, row, e[:, sample].to(h.dtype)) for h, e in zip(old, end, strict=True))
        cache.hidden = new

    def _zeros(self, cache: RecurrentState) -> tuple[Tensor, ...]:
        weight = self.rnn.weight_hh_l0
        zero = weight.new_zeros(self.rnn.num_layers, cache.batch, self.rnn.hidden_size)
        return (zero, zero) if isinstance(self.rnn, nn.LSTM) else (zero,)


def check_context(trunk: Part, tokens: Tokens, context: Tokens | None) -> None:
    """Check that a recurrent `trunk` can use this context for these tokens.

    Raises:
        ValueError: there is none, or rows, samples or widths do not fit.
    """
    if context is None:
        raise ValueError("this trunk needs a context and got none: trunk(tokens, context=...)")
    if context.dim != trunk.context_dim or len(context) != len(tokens):
        raise ValueError(
            f"the context has {len(context)} rows of dim {context.dim}, expected {len(tokens)} rows of dim "
            f"{trunk.context_dim}"
        )
    if any(t.layout is not None and not t.layout.single for t in (tokens, context)):
        raise ValueError("a recurrent trunk with a context needs one sample per row: tokens.unpack()")


_NOT_BIDIRECTIONAL = (
    "these tokens are not bidirectional and this trunk is: use bidirectional=False, or change the tokens with "
    "tokens.bidirectional()"
)
