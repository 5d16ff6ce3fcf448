"""What both losses take and refuse: targets that do not fit."""

import pytest
import torch

from tpformer import ops


@pytest.mark.parametrize(
    "targets, words",
    [
        (torch.arange(3), r"targets are \(3,\) torch.int64 for a \(4, 2\) input of 4 tokens: flatten both"),
        (torch.arange(1), r"targets are \(1,\) torch.int64 for a \(4, 2\) input of 4 tokens"),
        (torch.arange(4)[:, None], r"targets are \(4, 1\) torch.int64 for"),
        (torch.rand(4), r"targets are \(4,\) torch.float32 for a \(4, 2\) input of 4 tokens: .* one int64 id"),
        (torch.tensor([0, 1, -1, -100]), r"targets span \[-1, 1\], outside the vocabulary \[0, 1\]"),
        (torch.tensor([0, 1, 2, -100]), r"targets span \[0, 2\], outside the vocabulary \[0, 1\]"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, words):
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match=words):
        ops.vocab_parallel_cross_entropy(x, targets, ops.VocabSlice(0, 2, 2))
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(x, torch.randn(2, 2), targets, ops.VocabSlice(0, 2, 2))


def test_a_slice_without_all_of_its_entries_is_refused():
    words = "3 logits a token, but .* has 4 entries here"
    with pytest.raises(ValueError, match=words):
        ops.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.arange(2), ops.VocabSlice(0, 4, 4))
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(torch.randn(2, 5), torch.randn(3, 5), torch.arange(2), ops.VocabSlice(0, 4, 4))
