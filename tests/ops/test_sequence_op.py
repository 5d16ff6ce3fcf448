"""Moves of rows and columns between ranks, and an embedding over a sharded vocabulary, have the right values, gradients
and collectives. Uneven rows are refused, and ids that nobody checks give NaN."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import check, join, make, plain
from testing import assert_identical, on_every_rank

from tpformer import ops

TOKENS, N, ROWS = 12, 7, 22
# ids of an embedding: repeated ones, the first and last row, and both sides of every slice border
IDS = [0, 21, 7, 8, 7, 10, 11, 15, 16, 5, 6, 0]
# name -> the places of x and y, and the collectives of forward and backward
MOVES = {
    "reduce": (0, 0, ["reduce_scatter"], ["all_gather"]),
    "reduce_all": (0, "equal", ["all_reduce"], []),
    "scatter": ("equal", 0, [], ["all_gather"]),
    "gather": (0, "equal", ["all_gather"], []),
    "gather_columns": (1, "equal", ["all_gather"], []),
    "take_columns": ("equal", 1, [], ["all_reduce"]),
    "embedding": (0, 0, ["reduce_scatter"], ["all_gather"]),
    "embedding_all": (0, "equal", ["all_reduce"], []),
}


@dataclass(frozen=True)
class Move:
    """A case of shards.py. x of a reduction is every rank's rows, one behind the other; of an embedding the table."""

    t: int
    name: str

    def inputs(self):
        rows = {"reduce": self.t * TOKENS, "embedding": ROWS}.get(self.name.removesuffix("_all"), TOKENS)
        return {"x": ((rows, N), MOVES[self.name][0])}

    def outputs(self):
        return {"y": ((TOKENS, 2 * self.t if self.name == "take_columns" else N), MOVES[self.name][1])}

    def plain(self, x):
        if self.name.startswith("embedding"):
            return {"y": F.embedding(torch.tensor(IDS), x)}
        if self.name == "take_columns":  # neighbours' columns overlap
            return {"y": torch.cat([x[:, rank : rank + 2] for rank in range(self.t)], 1)}
        return {"y": sum(x.chunk(self.t)) if self.name.startswith("reduce") else x.clone()}

    def ours(self, group, x):
        rank = dist.get_rank()
        whole = {"sequence_parallel": not self.name.endswith("_all")}
        if self.name.startswith("embedding"):
            vocab = ops.VocabSlice(rank * -(-ROWS // self.t), -(-ROWS // self.t), ROWS)
            return {"y": ops.vocab_parallel_embedding(torch.tensor(IDS), x, vocab, group=group, **whole)}
        if self.name.startswith("reduce"):
            return {"y": ops.reduce_rows(x, group, **whole)}
        calls = {
            "scatter": lambda: ops.scatter_rows(x, group),
            "gather": lambda: ops.gather_rows(x, group),
            "gather_columns": lambda: ops.gather_columns(x, N, group),
            "take_columns": lambda: ops.take_columns(x, slice(rank, rank + 2), group),
        }
        return {"y": calls[self.name]()}

    def calls(self, itemsize):
        columns = -(-N // self.t) * self.t if self.name == "gather_columns" else N  # padded to equal numbers
        forward, backward = ([(call, TOKENS * columns * itemsize) for call in calls] for calls in MOVES[self.name][2:])
        return forward, backward


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_values_gradients_and_communication(ranks, t):
    """What is no sum of several numbers is exact."""
    cases = [Move(t, name) for name in MOVES]
    for case, found in zip(cases, check(ranks(t).run, cases, torch.float64), strict=True):
        rounded = {"reduce": "y", "embedding": "dx"}.get(case.name.removesuffix("_all"))
        for name, expected in plain(case, torch.float64).items():
            if name != rounded:
                assert_identical(found[name], expected, f"{case} {name}")


@on_every_rank(3)
def test_without_a_group_they_are_the_identity_and_indivisible_tokens_are_refused() -> None:
    x = make(0, torch.float64, x=(TOKENS, N))["x"]
    assert all(operation(x, None) is x for operation in (ops.reduce_rows, ops.scatter_rows, ops.gather_rows))
    assert ops.gather_columns(x, N, None) is x and torch.equal(ops.take_columns(x, slice(1, 3), None), x[:, 1:3])
    with pytest.raises(ValueError, match="7 tokens cannot be split over 3 .*ranks: pad .* to a multiple of 3"):
        ops.scatter_rows(torch.randn(7, 2), dist.group.WORLD)


def outside(device: str) -> torch.Tensor:
    """Return the gradient of the sum of the rows that are not NaN."""
    group, entries = dist.group.WORLD if dist.is_initialized() else None, ROWS - 1
    t, rank = (1, 0) if group is None else (group.size(), group.rank())
    # the row `entries` is padding, and so is that of IDS[1], the last one
    ids = torch.tensor([*IDS[:2], -1 if t > 1 else entries, *IDS[3:5], entries, *IDS[6:]])
    per_rank = -(-ROWS // t)
    local = make(0, torch.float64, x=(ROWS, N))["x"][rank * per_rank :][:per_rank].to(device).requires_grad_()
    vocab = ops.VocabSlice(rank * per_rank, per_rank, entries)
    with mock.patch("tpformer.ops.embedding.check_ids"):  # nobody waits to check a GPU's ids
        y = ops.vocab_parallel_embedding(ids.to(device), local, vocab, group=group, sequence_parallel=False)
    y.nan_to_num().sum().backward()
    assert torch.equal(y.isnan().any(1), y.isnan().all(1)) and y.isnan().any(1).nonzero()[:, 0].tolist() == [1, 2, 5]
    return local.grad.cpu()


@pytest.mark.parametrize("t", [2, 3, pytest.param(None, marks=pytest.mark.gpu)])
def test_ids_outside_the_vocabulary_are_nan_where_nobody_looks(ranks, t):
    gradients = [outside("cuda")] if t is None else ranks(t).run(outside, "cpu")
    inside = IDS[:1] + IDS[3:5] + IDS[6:]
    counts = torch.tensor([inside.count(row) for row in range(ROWS)])
    assert torch.equal(join(gradients, 0), counts[:, None].expand(-1, N).double())
