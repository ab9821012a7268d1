"""The contract of a front-end: `read`, `collate` and `forward` turn raw data into `Tokens`.

A third party adds a modality by writing one subclass in its own package; `wt.testing.check_tokenizer` runs the
contract on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worldtokens.layout import Layout, modality_id
from worldtokens.parts import Part
from worldtokens.tokens import Tokens


class Batch(dict):
    """What `collate` returns and `forward` takes: tensors by name, and static values (ints, tuples) beside them."""

    def to(self, *args, **kwargs) -> Batch:
        """Move the tensors; integer tensors keep their types."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(v):
            if isinstance(v, Batch):
                return v.to(*args, **kwargs)
            if not isinstance(v, Tensor):
                return v
            to = dtype if v.is_floating_point() else None
            return v.to(device=device, dtype=to, non_blocking=non_blocking)

        return Batch({k: move(v) for k, v in self.items()})

    def pin_memory(self) -> Batch:
        return Batch({k: v.pin_memory() if isinstance(v, Tensor | Batch) else v for k, v in self.items()})


class Tokenizer(Part):
    """Base class of the front-ends: raw data -> Tokens.

    A subclass sets `modality` (a class attribute, its name in `Tokens.select`) and `dim` (width of its tokens) and
    implements `read`, `collate` and `forward`. Absolute positions belong here; relative ones (RoPE over `pos`) to the
    trunk.
    """

    modality: str = ""
    dim: int

    def read(self, source: Any) -> Tensor:
        """One sample from a path, bytes, file or object -> its canonical raw tensor (CPU).

        Raises:
            InputError: it cannot be read; the message names the file.
        """
        raise NotImplementedError

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw samples -> one batch: padding, patches, lengths. Runs on the CPU, in DataLoader workers."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tokens:
        """A batch on the model's device -> its tokens, (B, N, dim)."""
        raise NotImplementedError

    def tokens(self, sources: Sequence[Any]) -> Tokens:
        """Read, collate and embed: from files or objects straight to Tokens on the module's device."""
        batch = self.collate([self.read(s) for s in sources])
        param = next(self.parameters(), None)
        return self(batch.to(param.device) if param is not None else batch)

    def wrap(
        self,
        x: Tensor,
        lengths: Sequence[int] | Tensor | None,
        order: str = "bidirectional",
        **fields: Tensor,
    ) -> Tokens:
        """Embeddings of one sample per row, padded on the right -> Tokens, with `valid`, `block` and `modality` set.

        Args:
            x: (B, N, D).
            lengths: B ints on the CPU, the number of valid tokens of each row; None: all N. Only in a graph exported
                for any number of rows of any length: a tensor (B,).
            order: ``"bidirectional"`` or ``"causal"``.
            fields: `pos`, `ids`, ... as in `Tokens`.
        """
        b, n, _ = x.shape
        if torch.compiler.is_exporting():
            layout = Layout((), order, dynamic="full" if lengths is None else "padded")
        else:
            layout = Layout.simple((n,) * b if lengths is None else lengths, order)
        if layout.full(n):
            valid = torch.ones(b, n, dtype=torch.bool, device=x.device)
        else:
            assert lengths is not None  # without lengths every row is full
            counts = lengths if isinstance(lengths, Tensor) else torch.as_tensor(list(lengths))
            valid = torch.arange(n, device=x.device) < counts.to(x.device)[:, None]
        modality = torch.full((b, n), modality_id(self.modality), dtype=torch.int16, device=x.device)
        tokens = Tokens(x=x, valid=valid, modality=modality, layout=layout, **fields)
        return tokens.causal() if order == "causal" else tokens
