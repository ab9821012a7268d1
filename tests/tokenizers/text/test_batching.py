"""Rows of ids: truncation, padding and lengths, by hand."""

import numpy as np
import pytest
import torch

import worldtokens as wt
from worldtokens.tokenizers.text.batching import check_ids, flatten, pad, padded_lengths, truncate


def test_lists_and_tensors_flatten_to_the_same_ids():
    rows = [[1, 2, 3], [], [4]]
    flat, lengths = flatten(rows)
    assert flat.tolist() == [1, 2, 3, 4] and lengths.tolist() == [3, 0, 1]
    same, _ = flatten([torch.tensor(r, dtype=torch.int64) for r in rows])
    assert same.tolist() == flat.tolist()


def test_truncated_rows_end_with_the_end_token():
    flat, lengths = np.array([1, 2, 3, 9, 4, 9]), np.array([4, 2])
    ids, n = truncate(flat.copy(), lengths, 3, 9)
    assert ids.tolist() == [1, 2, 9, 4, 9] and n.tolist() == [3, 2]
    assert truncate(flat.copy(), lengths, 3, None)[0].tolist() == [1, 2, 3, 4, 9]
    assert pad(ids, n, 4, 7).tolist() == [[1, 2, 9, 7], [4, 9, 7, 7]]


def test_lengths_run_to_the_first_end_token():
    assert padded_lengths(torch.tensor([[5, 9, 9], [5, 6, 9]]), 9) == (2, 3)
    with pytest.raises(wt.InputError, match=r"row 1 .* no end token"):
        padded_lengths(torch.tensor([[5, 9], [5, 6]]), 9)


def test_ids_outside_the_vocabulary_raise():
    check_ids(0, 9, 10)
    for low, high in ((-1, 3), (0, 10)):
        with pytest.raises(wt.InputError, match=f"from {low} to {high}, the vocabulary has 10"):
            check_ids(low, high, 10)
