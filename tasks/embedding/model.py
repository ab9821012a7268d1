"""One vector for a sample of one modality: a sentence, an image. What published encoders become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.pooling import POOLS, AttentionPool, pool_tokens, usual_pool
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import evaluating
from worldtokens.tasks.contrastive.model import Ranking
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens


class Encoder(Part):
    """A front-end, a trunk and pooling: tokens with `forward`, one vector a sample with `embed`.

    Args:
        tokenizer: the front-end.
        trunk: a Transformer or Recurrent of its width.
        pool: ``"mean" | "first" | "last" | "patches"`` (the mean without class token and registers) or an
            `AttentionPool`. Default: the last token where reading is causal, the class token where there is one, else
            the mean.
        dim: a linear map from the pooled vector to this width. None: no map.
        bias: of that map.
        activation: behind that map: ``"tanh"``, as BERT's pooler has it, or None.
        normalize: vectors have unit length.

    Raises:
        ValueError: widths that do not fit, or a setting out of its range.
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
            raise ValueError(f"the front-end gives tokens {tokenizer.dim} wide, the trunk takes {trunk.dim}")
        if activation not in ("tanh", None) or (activation and dim is None):
            raise ValueError(f"activation={activation!r}, expected 'tanh' behind a map (dim=), or None")
        self.tokenizer, self.trunk, self.normalize = tokenizer, trunk, normalize
        self.pool = usual_pool(tokenizer) if pool is None else pool
        if not isinstance(self.pool, AttentionPool) and self.pool not in POOLS:
            raise ValueError(f"pool={pool!r}, expected one of {POOLS} or an AttentionPool")
        self.dim, self.activation = trunk.dim if dim is None else dim, activation
        self.head = nn.Identity()
        if dim is not None:
            self.head = nn.Linear(trunk.dim, dim, bias=bias)
            nn.init.normal_(self.head.weight, std=trunk.dim**-0.5)
            if bias:
                nn.init.zeros_(self.head.bias)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        # a plain way of pooling or `normalize` that was changed after construction is saved as it is now
        return super().config_args(folder) | {"pool": self.pool, "normalize": self.normalize}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, batch: Batch | Tensor | Mapping[str, Batch | Tensor]) -> Tokens:
        """The tokens of a batch behind the trunk, (B, N, width of the trunk).

        Args:
            batch: the front-end's batch, a preprocessed tensor, or either by the front-end's column:
                ``{"text": ...}``.
        """
        if not isinstance(batch, Tensor) and self.tokenizer.modality in batch:
            batch = batch[self.tokenizer.modality]
        return self.trunk(self.tokenizer(batch))

    def features(self, batch: Batch | Tensor | Mapping[str, Batch | Tensor]) -> Tensor:
        """One vector a sample, (B, dim), with a graph; `batch` as in `forward`."""
        x = pool_tokens(self(batch), self.pool, getattr(self.tokenizer, "prefix", 0))
        x = self.head(x)
        x = x.tanh() if self.activation == "tanh" else x
        return F.normalize(x.float(), dim=-1) if self.normalize else x

    @torch.no_grad()
    def embed(self, sources: Any, batch_size: int = 64) -> Tensor:
        """Texts, files or objects -> vectors.

        Args:
            sources: a list of what the front-end's `read` takes; one string; or a batch or preprocessed tensor.
            batch_size: sources worked on at a time.

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
            # texts of like length share a batch; other kinds of sources keep their order
            order = sorted(
                range(len(sources)), key=lambda i: len(s) if isinstance(s := sources[i], str) else 0
            )
            for i in range(0, len(order), batch_size):
                part = order[i : i + batch_size]
                batch = self.tokenizer.collate([self.tokenizer.read(sources[j]) for j in part])
                out[part] = self.features(batch.to(self.device)).float()
            return out

    def rank(self, queries: Any, candidates: Any, batch_size: int = 64) -> Ranking:
        """Order the candidates for every query by cosine, best first.

        Args:
            queries, candidates: as `embed` takes, or (n, dim) float vectors made before.

        Returns:
            `Ranking(order, scores)`, both (Q, C).
        """
        q, c = (F.normalize(self._vectors(given, batch_size), dim=-1) for given in (queries, candidates))
        scores, order = (q @ c.T).sort(dim=-1, descending=True, stable=True)
        return Ranking(order, scores)

    def _vectors(self, given: Any, batch_size: int) -> Tensor:
        if isinstance(given, Tensor) and given.ndim == 2 and given.is_floating_point():
            if given.shape[1] != self.dim:
                raise InputError(f"vectors are {given.shape[1]} wide, this encoder's are {self.dim}")
            return given.to(self.device).float()
        return self.embed(given, batch_size)
