"""A TransformerBlock with dropout has the plain block's gradients, whatever it recomputes. test_block_layer.py counts
the collectives of a mode, tests/planner/test_rank_memory.py what it keeps."""

from itertools import product

import pytest
import theirs
import torch
from steps import Results, each_case, own, step, with_keys_in_one
from test_block_layer import BATCH, HEADS, HIDDEN, KINDS, SEQ, inputs, key, make_block, masks
from testing import assert_identical, assert_kernel_close
from torch import nn

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.layers import Positions
from tpformer.planner.storages import Saved

P = 0.1
DTYPES = (torch.float32, torch.bfloat16)
DROPPED = ["gelu-layernorm", "qk-norm-head-dim-scaling"]


def of_seeds(block: nn.Module, dtype: torch.dtype, dim: int | None = None, **options) -> Results:
    """Results of several inputs, which float32 holds: the largest error in one block is luck, in eight far less so."""
    found = []
    for seed in range(8):
        block.zero_grad()
        x, dy = (own(z.float().to(dtype), dim) for z in inputs(seed))
        found.append(with_keys_in_one(step(block, x, dy, **options)))
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def by_plain(kind: str, dtype: torch.dtype) -> Results:
    block = theirs.Block(HIDDEN, HEADS, **KINDS[kind]).float().to(dtype)
    return of_seeds(block, dtype, masks=[each.to(dtype) for each in masks(P)])


def on_rank(mesh, kind: str, dtype: torch.dtype) -> Results:
    block = make_block(kind, mesh, dropout=P, dtype=torch.float32).to(dtype)
    return of_seeds(block, dtype, 1, dropout_key=key(block))


@pytest.mark.parametrize("t", [1, 2])
def test_gradients_are_the_plain_blocks(ranks, t):
    """Without recomputation; test_bits_do_not_depend_on_the_mode says the same of the other modes."""
    for (kind, dtype), found in each_case(ranks, t, on_rank, product(DROPPED, DTYPES)):
        oracle, baseline = by_plain(kind, torch.float64), by_plain(kind, dtype)
        whole = found[0] | {name: torch.cat([each[name] for each in found], 2) for name in ("y", "dx")}
        for name, x in oracle.items():
            assert_kernel_close(whole[name], x, baseline[name], f"{kind} t={t} {dtype} {name}")


def in_mode(mesh, kind: str, dtype: torch.dtype, recompute: str) -> Results:
    block = make_block(kind, mesh, dropout=P, recompute=recompute, dtype=dtype)
    rows = (own(z.float().to(dtype).flatten(0, 1)) for z in inputs())
    return step(block, *rows, positions=Positions(BATCH, SEQ), dropout_key=key(block))


@pytest.mark.parametrize("t", [1, 2])
def test_bits_do_not_depend_on_the_mode(ranks, t):
    assert RECOMPUTE[0] == "none"
    expected: dict = {}
    for case, found in each_case(ranks, t, in_mode, product(DROPPED, DTYPES, RECOMPUTE)):
        assert_identical(found, expected.setdefault(case[:2], found), f"{case}")


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_without_gradients_nothing_is_kept_and_a_kept_graph_has_several_backwards(recompute):
    block, (x, dy) = make_block(DROPPED[0], recompute=recompute), inputs()
    with torch.no_grad(), Saved().recording() as saved:
        assert torch.equal(block(x), make_block(DROPPED[0])(x))
    assert saved.total() == 0
    y = block(x.requires_grad_())
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_regions_inside_regions():
    """A recomputed block computes its result where it is read: by the next block, or by a caller without gradients."""
    (x, dy), found, teacher = inputs(), [], make_block(DROPPED[1], recompute="mlp")
    teach = torch.no_grad()(lambda z: teacher(z))
    for outer in (lambda region, x: region(x), ops.recompute):
        first, second = (make_block(DROPPED[0], recompute="full") for _ in range(2))
        rows = x.clone().requires_grad_()
        outer(lambda z, a=first, b=second: b(a(z)) * teach(z), rows).backward(dy)
        found.append([rows.grad, *(p.grad for block in (first, second) for p in block.parameters())])
    assert_identical(*found)
