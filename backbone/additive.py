"""Recurrent decoder with additive attention to a context at every step (Bahdanau, Cho and Bengio 2015).

Before each step a small network scores every context token against the state ("additive attention": the scores are sums,
not products), and the step takes their weighted mean as input. It replaced the fixed vector of `Recurrent(cross=True)`.

Attention at a step depends on the state before it, so steps run one after another in Python, as in the paper: slower than
torch's own GRU.

Shapes: B rows, N tokens, K context tokens, D width, A hidden width of the scores.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from einops import reduce
from torch import Tensor, nn

from worldtokens.backbone.cache import BaseCache, next_numbers
from worldtokens.backbone.recurrent import check_context
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class AdditiveState(BaseCache):
    """The hidden state after the past tokens of each row, and the context."""

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.hidden: Any = None  # (B, D)
        self.next: Any = ()  # (B,) each: next block, next t, segment
        self.context: Any = ()  # tokens (B, K, Dc), keys (B, K, A), valid (B, K)

    def next_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.next

    def append(self, tokens: Tokens, hidden: Tensor) -> None:
        numbers = next_numbers(tokens.valid, tokens.block, tokens.pos[..., 0], tokens.segment)
        if self.length:
            some = tokens.valid.any(1)
            a, b, c = (torch.where(some, a, b) for a, b in zip(numbers, self.next, strict=True))
            numbers = (a, b, c)
        self.hidden, self.next = hidden, numbers
        self.length += tokens.shape[1]

    def select(self, rows: Sequence[int] | Tensor) -> AdditiveState:
        """Select rows in this order, with repetitions; in place, returns this state."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.hidden.device if self.length else None)
        self.hidden = self.hidden.index_select(0, rows) if self.length else None
        self.next = tuple(x.index_select(0, rows) for x in self.next)
        self.context = tuple(c.index_select(0, rows) for c in self.context)
        self.batch = len(rows)
        return self

    def copy(self) -> AdditiveState:
        """An independent copy."""
        return copy.copy(self)


class AdditiveDecoder(Part):
    """One GRU layer with additive attention to a context, left to right.

    Args:
        dim: width D of tokens in and out.
        context_dim: width of the context's tokens. None: `dim`.
        attention_dim: hidden width A of the network that scores the context. None: `dim`.
        first_norm: LayerNorm on the input tokens, for front-ends whose tokens have small values at initialisation.

    Raises:
        ValueError: the tokens or the context have another width, or a row holds several samples.
    """

    cross = True

    def __init__(
        self,
        dim: int,
        context_dim: int | None = None,
        attention_dim: int | None = None,
        first_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.context_dim = dim, context_dim or dim
        attention_dim = attention_dim or dim
        self.first_norm = nn.LayerNorm(dim) if first_norm else nn.Identity()
        self.initial = nn.Linear(2 * self.context_dim, dim)
        self.query = nn.Linear(dim, attention_dim, bias=False)
        self.key = nn.Linear(self.context_dim, attention_dim)
        self.score = nn.Linear(attention_dim, 1, bias=False)
        self.input_gates = nn.Linear(dim, 3 * dim)  # reset, update and new, as in torch's GRU
        self.context_gates = nn.Linear(self.context_dim, 3 * dim, bias=False)
        self.hidden_gates = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(2 * dim + self.context_dim, 2 * dim)
        self.init_weights()
        self._recorded: list[Tensor] | None = None

    def init_weights(self) -> None:
        """Glorot, orthogonal per gate for the recurrent weights, biases 0."""
        gates = (self.input_gates, self.context_gates)
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            for weight in layer.weight.split(self.dim) if layer in gates else [layer.weight]:
                nn.init.xavier_uniform_(weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        with torch.no_grad():
            for weight in self.hidden_gates.weight.split(self.dim):
                nn.init.orthogonal_(weight)

    def cache(self, batch: int, max_len: int | None = None) -> AdditiveState:
        """An empty state for stepwise decoding.

        Args:
            batch: rows B.
            max_len: maximum number of tokens per row, or None.
        """
        return AdditiveState(batch, max_len)

    def forward(
        self, tokens: Tokens, context: Tokens | None = None, cache: AdditiveState | None = None
    ) -> Tokens:
        """Update every token from those before it in its row and from the context.

        Args:
            tokens: (B, N, D), one sample per row.
            context: (B, K, context_dim), one sample per row. With a cache it is needed once.
            cache: the state after the past tokens.

        Returns:
            The same tokens with new `x`; zeros at padding. In a row without context, attention gives zeros.
        """
        n, d = tokens.shape[1:]
        if d != self.dim:
            raise ValueError(
                f"tokens have dim {d} and this decoder {self.dim}: give the front-end dim={self.dim}"
            )
        if cache is not None:
            cache.check(tokens)
        if cache is not None and cache.context:
            keys, state = cache.context, cache.hidden
        else:
            check_context(self, tokens, context)
            assert context is not None
            keys = self._keys(context)
            state = self.initial(torch.cat([context.pool("first"), context.pool("last")], -1)).tanh()
            if cache is not None:
                cache.context = keys
        if not n:
            return tokens
        y = self.first_norm(tokens.x)
        # unbind, not slices: the backward pass of each of N slices would allocate and add a gradient of full size
        inputs, valid = self.input_gates(y).unbind(1), tokens.valid.unbind(1)
        full = tokens.layout is not None and tokens.layout.full(n)
        states, reads, maps = [], [], []
        for i in range(n):
            weights, read = self._attend(state, *keys)
            new = self._step(inputs[i], read, state)
            state = new if full else torch.where(valid[i][:, None], new, state)
            states.append(state)
            reads.append(read)
            maps.append(weights)
        if self._recorded is not None:
            self._recorded[:] = [torch.stack(maps, 1)[:, None].detach()]  # (B, 1, N, K)
        if cache is not None:
            cache.append(tokens, state)
        # the paper's deep output: state, context and the token itself, then maxout over pairs of channels
        out = self.out(torch.cat([torch.stack(states, 1), torch.stack(reads, 1), y], -1))
        x = reduce(out, "b n (d pair) -> b n d", "max", pair=2)
        return tokens.replace(x=x if full else x.masked_fill(~tokens.valid[..., None], 0))

    def _keys(self, context: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        x = context.x.masked_fill(~context.valid[..., None], 0)
        keys = self.key(x)
        return x.to(keys.dtype), keys, context.valid  # one dtype: autocast would cast all of x at each step

    def _attend(self, state: Tensor, x: Tensor, keys: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D), (B, K, Dc), (B, K, A), (B, K) -> weights (B, K) and the weighted mean (B, Dc)."""
        if not x.shape[1]:
            return state.new_zeros(len(state), 0), x.new_zeros(len(x), x.shape[-1])
        scores = self.score((self.query(state)[:, None] + keys).tanh())[..., 0].float()
        low = torch.finfo(scores.dtype).min  # not -inf: a row without context would give NaN
        weights = scores.masked_fill(~valid, low).softmax(-1).masked_fill(~valid, 0)
        return weights, (weights[:, None].to(x.dtype) @ x)[:, 0]

    def _step(self, inputs: Tensor, read: Tensor, state: Tensor) -> Tensor:
        """One GRU step (Cho et al. 2014), with torch's order of gates."""
        r, z, new = (inputs + self.context_gates(read)).chunk(3, -1)
        rh, zh, nh = self.hidden_gates(state).chunk(3, -1)
        reset, keep = (r + rh).sigmoid(), (z + zh).sigmoid()
        return torch.lerp((new + reset * nh).tanh(), state.to(new.dtype), keep)

    @contextlib.contextmanager
    def record_weights(self) -> Iterator[list[Tensor]]:
        """Within, the list holds the latest pass's attention weights, (B, 1, N, K) per layer, as in `attention_maps`."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None
