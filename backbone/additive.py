"""A recurrent decoder that looks at its whole context anew for every token (Bahdanau, Cho and Bengio 2015).

Before each step the state asks every token of the context how much it matters, by a small network ("additive
attention": the scores are sums, not products), and the step reads their weighted mean. Attention before Transformers;
the fixed vector that it replaced is `Recurrent(cross=True)`.

Since what is read depends on the state before, steps follow one another in Python: slower than torch's own GRU, and
honest to the paper.

Shapes: B rows, N tokens, K context tokens, D width, A width of the scoring network.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from worldtokens.backbone.cache import Memory, row_ends
from worldtokens.backbone.recurrent import check_context
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class AdditiveState(Memory):
    """Where a decoder stands in each row, and the context that it looks at."""

    def __init__(self, batch: int, max_len: int | None = None) -> None:
        super().__init__(batch, max_len)
        self.hidden: Tensor | None = None  # (B, D)
        self.next: tuple[Tensor, ...] = ()  # (B,) each: next block, next t, segment
        self.context: tuple[
            Tensor, ...
        ] = ()  # tokens (B, K, Dc), their part of the scores (B, K, A), valid (B, K)

    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.next

    def hold(self, tokens: Tokens, hidden: Tensor) -> None:
        ends = row_ends(tokens.valid, tokens.block, tokens.pos[..., 0], tokens.segment)
        if self.length:
            some = tokens.valid.any(1)
            ends = tuple(torch.where(some, new, old) for new, old in zip(ends, self.next, strict=True))
        self.hidden, self.next = hidden, ends
        self.length += tokens.shape[1]

    def select(self, rows: Sequence[int] | Tensor) -> AdditiveState:
        """Keep these rows, in this order and as often as named; changes this state and returns it."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.hidden.device if self.length else None)
        self.hidden = self.hidden.index_select(0, rows) if self.length else None
        self.next = tuple(e.index_select(0, rows) for e in self.next)
        self.context = tuple(c.index_select(0, rows) for c in self.context)
        self.batch = len(rows)
        return self

    def copy(self) -> AdditiveState:
        """A state that holds the same and goes its own way from here."""
        return copy.copy(self)


class AdditiveDecoder(Part):
    """One layer of GRU with additive attention to a context, left to right.

    Args:
        dim: width D of tokens in and out.
        context_dim: width of the context's tokens. None: `dim`.
        scoring: width A of the network that scores the context. None: `dim`.
        first_norm: a norm of the tokens at the door, for front-ends whose tokens start small.

    Raises:
        ValueError: the tokens or the context have another width, or a row holds several samples.
    """

    cross = True

    def __init__(
        self, dim: int, context_dim: int | None = None, scoring: int | None = None, first_norm: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.context_dim = dim, context_dim or dim
        scoring = scoring or dim
        self.first_norm = nn.LayerNorm(dim) if first_norm else nn.Identity()
        self.begin = nn.Linear(2 * self.context_dim, dim)
        self.ask = nn.Linear(dim, scoring, bias=False)
        self.offer = nn.Linear(self.context_dim, scoring)
        self.score = nn.Linear(scoring, 1, bias=False)
        self.given = nn.Linear(dim, 3 * dim)  # reset, update and new, as in torch's GRU
        self.read = nn.Linear(self.context_dim, 3 * dim, bias=False)
        self.again = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(2 * dim + self.context_dim, 2 * dim)
        self.init_weights()
        self._seen: list[Tensor] | None = None

    def init_weights(self) -> None:
        """Glorot, orthogonal for each gate's map of the state, biases 0."""
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            for part in layer.weight.split(self.dim) if layer in (self.given, self.read) else [layer.weight]:
                nn.init.xavier_uniform_(part)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        with torch.no_grad():
            for gate in self.again.weight.split(self.dim):
                nn.init.orthogonal_(gate)

    def cache(self, batch: int, max_len: int | None = None) -> AdditiveState:
        """An empty state for stepwise decoding.

        Args:
            batch: rows B.
            max_len: the longest row allowed, or None.
        """
        return AdditiveState(batch, max_len)

    def forward(
        self, tokens: Tokens, context: Tokens | None = None, cache: AdditiveState | None = None
    ) -> Tokens:
        """Update every token by those before it in its row and by the context.

        Args:
            tokens: (B, N, D), one sample a row.
            context: (B, K, context_dim), one sample a row. With a cache it is needed once.
            cache: the state after the tokens before.

        Returns:
            The same tokens with new `x`; zeros at padding. A row with no context reads zeros in its place.
        """
        n, d = tokens.shape[1:]
        if d != self.dim:
            raise ValueError(
                f"tokens are {d} wide and this decoder {self.dim}: give the front-end dim={self.dim}"
            )
        if cache is not None:
            cache.check(tokens)
        if cache is not None and cache.context:
            held, state = cache.context, cache.hidden
        else:
            check_context(self, tokens, context)
            held = self._offered(context)
            state = self.begin(torch.cat([context.pool("first"), context.pool("last")], -1)).tanh()
            if cache is not None:
                cache.context = held
        if not n:
            return tokens
        y = self.first_norm(tokens.x)
        # unbound at once: the gradient of N slices would fill and add the whole N times
        given, real = self.given(y).unbind(1), tokens.valid.unbind(1)
        whole = tokens.layout is not None and tokens.layout.full(n)
        states, reads, maps = [], [], []
        for i in range(n):
            weights, read = self._look(state, *held)
            new = self._step(given[i], read, state)
            state = new if whole else torch.where(real[i][:, None], new, state)
            states.append(state)
            reads.append(read)
            maps.append(weights)
        if self._seen is not None:
            self._seen[:] = [torch.stack(maps, 1)[:, None].detach()]  # (B, 1, N, K)
        if cache is not None:
            cache.hold(tokens, state)
        # the paper's deep output: state, context and the token itself, the larger of each two channels
        out = self.out(torch.cat([torch.stack(states, 1), torch.stack(reads, 1), y], -1))
        x = out.unflatten(-1, (d, 2)).amax(-1)
        return tokens.replace(x=x if whole else x.masked_fill(~tokens.valid[..., None], 0))

    def _offered(self, context: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        x = context.x.masked_fill(~context.valid[..., None], 0)
        offered = self.offer(x)
        return (
            x.to(offered.dtype),
            offered,
            context.valid,
        )  # one type, else autocast would cast all of x at each step

    def _look(self, state: Tensor, x: Tensor, offered: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D), (B, K, Dc), (B, K, A), (B, K) -> weights (B, K) and what is read (B, Dc)."""
        if not x.shape[1]:
            return state.new_zeros(len(state), 0), x.new_zeros(len(x), x.shape[-1])
        scores = self.score((self.ask(state)[:, None] + offered).tanh())[..., 0].float()
        low = torch.finfo(scores.dtype).min  # not -inf: a row with no context would give NaN
        weights = scores.masked_fill(~valid, low).softmax(-1).masked_fill(~valid, 0)
        return weights, (weights[:, None].to(x.dtype) @ x)[:, 0]

    def _step(self, given: Tensor, read: Tensor, state: Tensor) -> Tensor:
        """One GRU step (Cho et al. 2014), its gates in torch's order."""
        r, z, new = (given + self.read(read)).chunk(3, -1)
        rh, zh, nh = self.again(state).chunk(3, -1)
        reset, keep = (r + rh).sigmoid(), (z + zh).sigmoid()
        return torch.lerp((new + reset * nh).tanh(), state.to(new.dtype), keep)

    @contextlib.contextmanager
    def seen(self) -> Iterator[list[Tensor]]:
        """Within, the list holds the latest pass's weights, (B, 1, N, K) of each layer, as `attention_maps` gives them."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None
