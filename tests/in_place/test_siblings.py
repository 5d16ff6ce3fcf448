"""Column linears that get one tensor communicate once for all, and compute what they compute alone."""

import copy
from contextlib import nullcontext

import pytest
import torch
from testing import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpformer.distributed import build_mesh
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.linears import make_column
from tpformer.in_place.siblings import share_inputs
from tpformer.layers import TensorParallel

HIDDEN, WIDE = 6, 10


class Block(nn.Module):
    """What becomes of x between the linears is the case that a test is about."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, WIDE, dtype=torch.float64) for _ in range(3))
        self.case = "same"

    def forward(self, x):
        q = self.q(x)
        if self.case == "another":
            x = x * 2
        elif self.case == "written":
            x.mul_(2)
        k = self.k(x)
        if self.case == "skipped":
            return q * k
        with torch.no_grad() if self.case == "no_grad" else nullcontext():
            v = self.v(x)
        return q * k + v


def run(block, cases, compute=None):
    """Results, gradients and collectives of one forward and backward for each case."""
    found, counts = {}, []
    for index, case in enumerate(cases):
        block.case = case
        x = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        x.requires_grad_()
        with record_collectives() as calls, torch.set_grad_enabled(case != "written"):
            y = (block if compute is None else compute)(x * 1)
            if case != "written":  # a linear has saved x
                y.sum().backward()
        gradients = {
            name: None if p.grad is None else full_tensor(p.grad).clone() for name, p in block.named_parameters()
        }
        found |= {f"{name} {index}": value for name, value in {"y": y.detach(), "x": x.grad, **gradients}.items()}
        counts.append(len(calls))
        block.zero_grad()
    return found, counts


def rechecked(block):
    return lambda x: checkpoint(block, x, use_reentrant=False)


def sharded(t, copies=False):
    """A block in place whose outputs are gathered by the caller: its columns are compared by this rank's part."""
    block, tp = Block(), TensorParallel(build_mesh("cpu", tensor_parallel=t)["tp"])
    for linear in (block.q, block.k, block.v):
        make_column(linear, tp)
    share_inputs(block)
    return (copy.deepcopy(block) if copies else block), tp


TWICE = ["same", "same"]
CASES = [*TWICE, "another", *TWICE, "written", "same", "skipped", *TWICE, "no_grad", *TWICE]


def part(y, tp):
    return y.chunk(tp.size, -1)[tp.rank]


def on_rank(kind):
    block, tp = sharded(2, kind == "copied")
    compute = None
    if kind == "compiled":
        compute = torch.compile(block, backend="aot_eager")
    if kind == "recomputed":
        with torch.no_grad():
            block(torch.ones(2, 4, HIDDEN, dtype=torch.float64))
        compute = rechecked(block)
    if kind == "recomputed from the first":
        compute = rechecked(block)
    found, counts = run(block, CASES, compute)
    wanted = {name: part(y, tp) if name.startswith("y") else y for name, y in run(Block(), CASES)[0].items()}
    return found, wanted, counts


@pytest.mark.parametrize("kind", ["called", "copied", "compiled", "recomputed", "recomputed from the first"])
def test_siblings(ranks, kind):
    for found, wanted, counts in ranks(2).run(on_rank, kind):
        assert_same(found, wanted)
        assert counts[:2] == {"recomputed": [1, 1], "recomputed from the first": [3, 3]}.get(kind, [3, 1])
        assert counts[-1] == (3 if "first" in kind else 1)
