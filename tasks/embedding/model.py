"""Encoder of one modality: one vector per sample. Published encoders load as this class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.pooling import POOLS, AttentionPool, default_pool, pool_tokens
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import evaluating
from worldtokens.tasks.contrastive.model import Ranking
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens


class Encoder(Part):
    """A tokenizer, a trunk and pooling: tokens with `forward`, one vector per sample with `embed`.

    Args:
        tokenizer: the tokenizer.
        trunk: a Transformer or Recurrent of the tokenizer's width.
        pool: ``"mean" | "first" | "last" | "patches"`` (mean without class token and registers) or an
            `AttentionPool`. Default: the last token for causal attention, else the class token if there is one, else
            the mean.
        dim: width of a linear head behind pooling. None: no head.
        bias: whether the head has a bias.
        activation: activation behind the head: ``"tanh"``, as in BERT's pooler, or None.
        normalize: normalise vectors to unit length.

    Raises:
        ValueError: widths that do not match, or a setting out of its range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        trunk: Part,
        pool: str | AttentionPool | None = None,
        dim: int | None = None,
        bias: bool = True,
        activation: Literal["tanh"] | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        if tokenizer.dim != trunk.dim:
            raise ValueError(f"the tokenizer has dim={tokenizer.dim}, the trunk dim={trunk.dim}")
        if activation not in ("tanh", None) or (activation and dim is None):
            raise ValueError(f"activation={activation!r}, expected 'tanh' with a head (dim=), or None")
        self.tokenizer, self.trunk, self.normalize = tokenizer, trunk, normalize
        self.pool = default_pool(tokenizer) if pool is None else pool
        if not isinstance(self.pool, AttentionPool) and self.pool not in POOLS:
            raise ValueError(f"pool={pool!r}, expected one of {POOLS} or an AttentionPool")
        self.dim, self.activation = trunk.dim if dim is None else dim, activation
        self.head: nn.Linear | nn.Identity = nn.Identity()
        if dim is not None:
            self.head = nn.Linear(trunk.dim, dim, bias=bias)
            nn.init.normal_(self.head.weight, std=trunk.dim**-0.5)
            if bias:
                nn.init.zeros_(self.head.bias)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        # `pool` and `normalize` may change after construction: the current values are saved
        return super().config_args(folder) | {"pool": self.pool, "normalize": self.normalize}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, batch: Batch | Tensor | Mapping[str, Batch | Tensor]) -> Tokens:
        """Tokens of a batch after the trunk, (B, N, width of the trunk).

        Args:
            batch: the tokenizer's batch, a preprocessed tensor, or either by the tokenizer's column:
                ``{"text": ...}``.
        """
        if not isinstance(batch, Tensor) and self.tokenizer.modality in batch:
            batch = batch[self.tokenizer.modality]
        return self.trunk(self.tokenizer(batch))

    def features(self, batch: Batch | Tensor | Mapping[str, Batch | Tensor]) -> Tensor:
        """One vector per sample, (B, dim), with a graph; `batch` as in `forward`."""
        x = pool_tokens(self(batch), self.pool, getattr(self.tokenizer, "prefix", 0))
        x = self.head(x)
        x = x.tanh() if self.activation == "tanh" else x
        return F.normalize(x.float(), dim=-1) if self.normalize else x

    @torch.no_grad()
    def embed(self, sources: Any, batch_size: int = 64) -> Tensor:
        """Embeds texts, files or objects.

        Args:
            sources: a list of what the tokenizer's `read` accepts; one string; or a batch or preprocessed tensor.
            batch_size: sources per forward pass.

        Returns:
            (B, dim) float32 on the model's device, in eval mode.

        Raises:
            InputError: a source cannot be read.
        """
        with evaluating(self):
            if isinstance(sources, Tensor | Batch):
                return self.features(sources.to(self.device)).float()
            sources = [sources] if isinstance(sources, str | bytes | Path) else list(sources)
            out = torch.zeros(len(sources), self.dim, device=self.device)
            # texts of similar length share a batch, to save padding; other sources keep their order
            order = sorted(
                range(len(sources)), key=lambda i: len(s) if isinstance(s := sources[i], str) else 0
            )
            for i in range(0, len(order), batch_size):
                indices = order[i : i + batch_size]
                batch = self.tokenizer.collate([self.tokenizer.read(sources[j]) for j in indices])
                out[indices] = self.features(batch.to(self.device)).float()
            return out

    def rank(self, queries: Any, candidates: Any, batch_size: int = 64) -> Ranking:
        """Ranks the candidates of every query by cosine, best first.

        Args:
            queries, candidates: as in `embed`, or precomputed (n, dim) float vectors.
            batch_size: sources per forward pass.

        Returns:
            `Ranking(order, scores)`, both (Q, C).
        """
        q, c = (F.normalize(self._vectors(sources, batch_size), dim=-1) for sources in (queries, candidates))
        scores, order = (q @ c.T).sort(dim=-1, descending=True, stable=True)
        return Ranking(order, scores)

    def _vectors(self, sources: Any, batch_size: int) -> Tensor:
        if isinstance(sources, Tensor) and sources.ndim == 2 and sources.is_floating_point():
            if sources.shape[1] != self.dim:
                raise InputError(f"vectors have width {sources.shape[1]}, this encoder's have {self.dim}")
            return sources.to(self.device).float()
        return self.embed(sources, batch_size)
