"""Longer and shorter contexts: learned positions are interpolated, or extended by new rows."""

from __future__ import annotations

import copy

import pytest
import torch

import worldtokens as wt
from worldtokens.testing import randomised


def test_positions_are_interpolated_or_extended(make_text, reload, tmp_path):
    front = randomised(make_text())
    table = front.pos_embed.detach().clone()
    interpolated = wt.resize_context(copy.deepcopy(front), 31)
    assert interpolated.pos_embed.shape == (31, 24)
    torch.testing.assert_close(interpolated.pos_embed[::2], table)  # 16 positions become every second of 31
    torch.testing.assert_close(interpolated.pos_embed[1], (table[0] + table[1]) / 2)
    long = wt.resize_context(copy.deepcopy(front), 40, keep=4)
    torch.testing.assert_close(long.pos_embed[:4], table[:4])
    torch.testing.assert_close(long.pos_embed[39], table[15])
    new = wt.resize_context(copy.deepcopy(front), 20, how="extend")
    torch.testing.assert_close(new.pos_embed[:16], table)
    assert wt.resize_context(copy.deepcopy(front), 5, how="extend").pos_embed.shape == (5, 24)
    model = wt.LanguageModel(front, wt.Transformer(24, 1, 4))
    wt.resize_context(model, 64)
    assert model.context == 64 and model.front is front
    text = " ".join(["cats"] * 60)
    assert len(front.read(text)) == 64
    assert reload(model, tmp_path).context == 64
    for wrong in ({"context": 0}, {"context": 8, "keep": 8}, {"context": 8, "how": "bend"}):
        with pytest.raises(wt.InputError):
            wt.resize_context(front, **wrong)


def test_unused_positions_of_a_bert_are_used_first(make_text):
    front = wt.PairTokenizer(
        make_text().backend, 24, context=8, max_positions=12, start="<s>", end="<|endoftext|>"
    )
    table = front.pos_embed.detach().clone()
    wt.resize_context(front, 10, how="extend")
    assert front.context == 10 and torch.equal(front.pos_embed, table)
    wt.resize_context(front, 15, how="extend")
    assert front.pos_embed.shape == (15, 24) and torch.equal(front.pos_embed[:12], table)
    front = wt.PairTokenizer(
        make_text().backend, 24, context=8, max_positions=12, start="<s>", end="<|endoftext|>"
    )
    table = front.pos_embed.detach().clone()
    wt.resize_context(front, 15)
    torch.testing.assert_close(front.pos_embed[::2], table[:8])
