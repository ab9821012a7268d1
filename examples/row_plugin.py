"""Table rows -> Tokens, one per number, embedded as in FT-Transformer (Gorishniy et al. 2021)."""

import torch
from torch import nn

import worldtokens as wt


class RowTokenizer(wt.Tokenizer):
    """Rows ``{"age": 31, "fare": None}`` -> one token per number; the position is the column index."""

    modality = "row"

    def __init__(self, dim: int, columns: dict[str, tuple[float, float]]) -> None:
        super().__init__()
        self.dim, self.columns = dim, columns  # columns: name -> (mean, standard deviation)
        self.weight = nn.Parameter(torch.randn(len(columns), dim))
        self.bias = nn.Parameter(torch.randn(len(columns), dim))

    def read(self, source: dict) -> torch.Tensor:
        """One row -> (n, 2) float32: column index, standardised value."""
        try:
            row = {name: float(v) for name, v in source.items() if v is not None}
            index = {name: i for i, name in enumerate(self.columns)}
            cells = [[index[k], (v - self.columns[k][0]) / self.columns[k][1]] for k, v in row.items()]
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as e:
            raise wt.InputError(f"{source!r}: expected numbers by {list(self.columns)}: {e!r}") from e
        if not cells or not torch.tensor(cells).isfinite().all():
            raise wt.InputError(f"{source!r}: expected at least one number, and None for missing ones")
        return torch.tensor(sorted(cells))

    def collate(self, raws: list[torch.Tensor]) -> wt.Batch:
        cells = nn.utils.rnn.pad_sequence(list(raws), batch_first=True)  # (B, N, 2)
        return wt.Batch(column=cells[..., 0].long(), value=cells[..., 1:], lengths=tuple(map(len, raws)))

    def forward(self, batch: wt.Batch) -> wt.Tokens:
        x = self.bias[batch["column"]] + self.weight[batch["column"]] * batch["value"].to(self.weight.dtype)
        pos = nn.functional.pad(batch["column"][..., None].float(), (0, 2))  # (column, 0, 0)
        return self.wrap(x, batch["lengths"], pos=pos)
