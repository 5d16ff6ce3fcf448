"""A TransformerBlock with dropout has the plain block's gradients, whatever it recomputes. What a mode costs is
counted: the bytes that wait for the backward, and the collectives with their bytes."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from steps import Results, gradients, joined, with_keys_in_one
from test_block_layer import BATCH, HEADS, HIDDEN, SEQ, by_plain_block, inputs, make_block
from testing import assert_identical, assert_kernel_close
from torch import Tensor

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.distributed import build_mesh, record_collectives
from tpformer.kernels.dropout.reference import dropout_apply
from tpformer.kernels.philox.reference import philox_key
from tpformer.layers import DropoutKey, Positions, TensorParallel, TransformerBlock
from tpformer.planner.storages import Saved

P, SEED, STEP = 0.1, 3, 7
SAMPLES = torch.tensor([11, 4])
SEEDS = range(8)  # of inputs: the largest error in one block is luck, that in several far less so
DTYPES = (torch.float32, torch.bfloat16)
DROPPED = ["gelu-layernorm", "qk-norm-head-dim-scaling"]


def masks(dtype: torch.dtype) -> list[Tensor]:
    """The dropout of both branches as factors, drawn here from the definition."""
    start = (SAMPLES[:, None] * SEQ + torch.arange(SEQ)).flatten() * HIDDEN
    ones = torch.ones(BATCH * SEQ, HIDDEN, dtype=torch.float64)
    sites = [dropout_apply(ones, start, philox_key(SEED, STEP, SEQ, "", name), P) for name in ("attention", "mlp")]
    return [site.view(BATCH, SEQ, HIDDEN).to(dtype) for site in sites]


@cache
def by_plain(kind: str, dtype: torch.dtype) -> Results:
    """Outputs and gradients, one for each seed, of the plain block in one dtype, for values that float32 holds."""
    block, found = make_block(kind, dtype=torch.float32).to(dtype), []
    for seed in SEEDS:
        x, dy = (z.float().to(dtype) for z in inputs(seed))
        found.append(with_keys_in_one(by_plain_block(kind, block, x, dy, masks=masks(dtype))))
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def ours(
    kind: str, recompute: str, dtype: torch.dtype, seeds: Sequence[int] = (1,)
) -> list[tuple[Results, list, list]]:
    """The same of our block on this rank's sequence shard, then the collectives of the forward and of the backward."""
    mesh, found = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], []
    block = make_block(kind, mesh, dropout=P, recompute=recompute, dtype=torch.float32).to(dtype)
    for seed in seeds:
        block.zero_grad()
        x, dy = (z.float().to(dtype).flatten(0, 1).chunk(mesh.size())[mesh.get_local_rank()] for z in inputs(seed))
        x = x.clone().requires_grad_()
        with record_collectives() as forward:
            y = block(x, positions=Positions(BATCH, SEQ), dropout_key=DropoutKey(SEED, STEP, SAMPLES, block))
        with record_collectives() as backward:
            y.backward(dy)
        results = {"y": y.detach(), "dx": x.grad} | with_keys_in_one(gradients(block))
        found.append((results, list(forward), list(backward)))
    return found


def without_recomputation() -> dict[tuple[str, torch.dtype], list[Results]]:
    """One result for each seed."""
    return {case: [each for each, *_ in ours(case[0], "none", case[1], SEEDS)] for case in product(DROPPED, DTYPES)}


@pytest.mark.parametrize("t", [1, 2])
def test_gradients_are_the_plain_blocks(ranks, t):
    """Without recomputation; test_bits_do_not_depend_on_the_mode says the same of the other modes."""
    by_rank = ranks(t).run(without_recomputation)
    for kind, dtype in product(DROPPED, DTYPES):
        oracle, baseline = by_plain(kind, torch.float64), by_plain(kind, dtype)
        found = [joined(list(each), 0)[0] for each in zip(*(rank[kind, dtype] for rank in by_rank), strict=True)]
        for name, x in oracle.items():
            actual = torch.stack([each[name] for each in found]).view(x.shape)
            assert_kernel_close(actual, x, baseline[name], f"{kind} t={t} {dtype} {name}")


def in_every_mode() -> dict[tuple[str, torch.dtype, str], tuple[Results, list, list]]:
    cases = product(DROPPED, DTYPES, RECOMPUTE)
    return {(kind, dtype, mode): ours(kind, mode, dtype)[0] for kind, dtype, mode in cases}


@pytest.mark.parametrize("t", [1, 2])
def test_bits_do_not_depend_on_the_mode(ranks, t):
    for found in ranks(t).run(in_every_mode):
        for (kind, dtype, mode), (results, *_) in found.items():
            assert_identical(results, found[kind, dtype, "none"][0], f"{kind} {dtype} {mode}")


def test_collectives(ranks):
    """The forward has 2 gathers and 2 reductions; so has the backward, and 2 gathers for the weight gradients. A
    recomputation adds its gathers, and of the reductions the one whose result is read."""
    nbytes = BATCH * SEQ * HIDDEN * 4
    for found in ranks(2).run(in_every_mode):
        for recompute, (gathers, scatters) in {"none": (4, 2), "mlp": (5, 2), "full": (6, 3)}.items():
            _, forward, backward = found[DROPPED[0], torch.float32, recompute]
            assert sorted(forward) == sorted([("all_gather", nbytes), ("reduce_scatter", nbytes)] * 2)
            assert sorted(backward) == [("all_gather", nbytes)] * gathers + [("reduce_scatter", nbytes)] * scatters


def kept(recompute: str) -> int:
    """Return how many elements wait for the backward of a float32 GELU block."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    block = TransformerBlock(HIDDEN, HEADS, dropout=P, recompute=recompute, tp=TensorParallel(mesh, True))
    x = torch.randn(BATCH * SEQ // mesh.size(), HIDDEN, requires_grad=True)
    with Saved(*block.parameters()).recording() as saved:
        y = block(x, positions=Positions(BATCH, SEQ), dropout_key=DropoutKey(SEED, STEP, SAMPLES, block))
    assert y.requires_grad
    return saved.total() // 4


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("recompute, bytes_16_bit, statistics", [("mlp", 12, 2), ("full", 2, 0)])
def test_bytes_that_wait_for_the_backward(ranks, t, recompute, bytes_16_bit, statistics):
    unit, rows = BATCH * SEQ * HIDDEN // t, BATCH * SEQ // t
    log_sum_exp = 0 if recompute == "full" else BATCH * SEQ * HEADS // t
    for elements in ranks(t).run(kept, recompute):
        assert elements == unit * bytes_16_bit // 2 + rows * statistics + log_sum_exp


def test_without_gradients_no_mode_keeps_anything():
    x, _ = inputs()
    for recompute in RECOMPUTE:
        block = make_block(DROPPED[0], recompute=recompute)
        with torch.no_grad(), Saved().recording() as saved:
            assert torch.equal(block(x), make_block(DROPPED[0])(x))
        assert saved.total() == 0


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_kept_graph_has_several_backwards(recompute):
    x, dy = inputs()
    x.requires_grad_()
    y = make_block(DROPPED[0], recompute=recompute)(x)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_regions_inside_regions():
    """A recomputed block computes its result where something reads it: the next block, or a caller without
    gradients."""
    x, dy = inputs()
    found = []
    frozen = make_block(DROPPED[1], recompute="mlp")

    def teach(teacher: TransformerBlock, z: Tensor) -> Tensor:
        with torch.no_grad():
            return teacher(z)

    for outer in (lambda region, x: region(x), ops.recompute):
        first, second = (make_block(DROPPED[0], recompute="full") for _ in range(2))
        rows = x.clone().requires_grad_()
        outer(lambda z, a=first, b=second, c=frozen: b(a(z)) * teach(c, z), rows).backward(dy)
        found.append([rows.grad, *(p.grad for block in (first, second) for p in block.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="recompute='some': choose one of none, mlp, full"):
        TransformerBlock(8, 2, recompute="some")
