"""Concatenation of the tokens of several columns."""

import torch

import worldtokens as wt
from worldtokens.tasks.seq2seq.context import concat_tokens, scatter_rows


def test_concat_tokens_removes_padding_between_columns():
    """Three columns: the tokens of each row are contiguous and keep their order."""
    a = wt.Tokens.stack([wt.Tokens(torch.randn(1, n, 4)).infer_layout() for n in (2, 3)])
    b = scatter_rows(wt.Tokens(torch.randn(1, 2, 4)).infer_layout(), (1,), 2)
    c = wt.Tokens(torch.randn(2, 1, 4)).infer_layout()
    joined = concat_tokens([a, b, c])
    assert joined.valid.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
    assert torch.equal(joined.x[0, :3], torch.cat([a.x[0, :2], c.x[0]]))
    assert torch.equal(joined.x[1], torch.cat([a.x[1], b.x[1], c.x[1]]))
    assert joined.layout.lengths == ((3,), (6,)) and joined.layout.order == "bidirectional"
