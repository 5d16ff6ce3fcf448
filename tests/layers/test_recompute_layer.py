"""A TransformerBlock with dropout has the plain block's gradients, whatever it recomputes. What a mode costs is
counted: the elements that wait for the backward, which are those of docs/memory.md, and the collectives with their
bytes."""

from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch
from steps import Results, each_case, gradients, own, step, with_keys_in_one
from test_block_layer import BATCH, HIDDEN, SEQ, by_plain_block, inputs, key, make_block, masks
from testing import assert_identical, assert_kernel_close
from torch import Tensor

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.distributed import record_collectives
from tpformer.layers import Positions, TensorParallel, TransformerBlock
from tpformer.ops import attention
from tpformer.planner.storages import Saved

P = 0.1
SEEDS = range(8)  # of inputs: the largest error in one block is luck, that in several far less so
DTYPES = (torch.float32, torch.bfloat16)
DROPPED = ["gelu-layernorm", "qk-norm-head-dim-scaling"]


def of_seeds(results: list[Results]) -> Results:
    return {name: torch.stack([each[name] for each in results]) for name in results[0]}


@cache
def by_plain(kind: str, dtype: torch.dtype) -> Results:
    """Outputs and gradients, one for each seed, of the plain block in one dtype, for values that float32 holds."""
    block, found = make_block(kind, dtype=torch.float32).to(dtype), []
    for seed in SEEDS:
        x, dy = (z.float().to(dtype) for z in inputs(seed))
        found.append(with_keys_in_one(by_plain_block(kind, block, x, dy, masks=masks(P, dtype))))
    return of_seeds(found)


def made(mesh, kind: str, dtype: torch.dtype, recompute: str) -> TransformerBlock:
    return make_block(kind, mesh, dropout=P, recompute=recompute, dtype=torch.float32).to(dtype)


def on_seeds(mesh, kind: str, dtype: torch.dtype) -> Results:
    """What the plain block gives, of ours without recomputation."""
    block, found = made(mesh, kind, dtype, "none"), []
    for seed in SEEDS:
        block.zero_grad()
        x, dy = (own(z.float().to(dtype), 1) for z in inputs(seed))
        found.append(with_keys_in_one(step(block, x, dy, dropout_key=key(block))))
    return of_seeds(found)


@pytest.mark.parametrize("t", [1, 2])
def test_gradients_are_the_plain_blocks(ranks, t):
    """Without recomputation; test_bits_do_not_depend_on_the_mode says the same of the other modes."""
    for (kind, dtype), found in each_case(ranks, t, on_seeds, product(DROPPED, DTYPES)):
        oracle, baseline = by_plain(kind, torch.float64), by_plain(kind, dtype)
        whole = found[0] | {name: torch.cat([each[name] for each in found], 2) for name in ("y", "dx")}
        for name, x in oracle.items():
            actual = whole[name].view(x.shape)
            assert_kernel_close(actual, x, baseline[name], f"{kind} t={t} {dtype} {name}")


def in_mode(mesh, kind: str, dtype: torch.dtype, recompute: str) -> tuple[Results, list, list]:
    """Results of rows, then the collectives of the forward and of the backward."""
    block = made(mesh, kind, dtype, recompute)
    x, dy = (own(z.float().to(dtype).flatten(0, 1)) for z in inputs())
    x.requires_grad_()
    with record_collectives() as forward:
        y = block(x, positions=Positions(BATCH, SEQ), dropout_key=key(block))
    with record_collectives() as backward:
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(block), list(forward), list(backward)


@pytest.mark.parametrize("t", [1, 2])
def test_bits_do_not_depend_on_the_mode(ranks, t):
    """On 2 ranks the forward has 2 gathers and 2 reductions; so has the backward, and 2 gathers for the weight
    gradients. A recomputation adds its gathers, and of the reductions the one whose result is read."""
    assert RECOMPUTE[0] == "none"
    expected: dict = {}
    for case, by_rank in each_case(ranks, t, in_mode, product(DROPPED, DTYPES, RECOMPUTE)):
        kind, dtype, recompute = case
        expected.setdefault((kind, dtype), [results for results, *_ in by_rank])
        assert_identical([results for results, *_ in by_rank], expected[kind, dtype], f"{case}")
        nbytes = BATCH * SEQ * HIDDEN * dtype.itemsize
        gathers, scatters = {"none": (4, 2), "mlp": (5, 2), "full": (6, 3)}[recompute]
        for _, forward, backward in by_rank if t > 1 else ():
            assert sorted(forward) == sorted([("all_gather", nbytes), ("reduce_scatter", nbytes)] * 2), case
            wanted = [("all_gather", nbytes)] * gathers + [("reduce_scatter", nbytes)] * scatters
            assert sorted(backward) == wanted, case


TOKENS, WIDTH, OF_WIDTH = 16, 32, 4  # 2 samples of 8 tokens, hidden units, heads
FAMILIES: dict[str, dict] = {
    "gpt": {"dropout": P},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "rope_base": 1e4, "n_kv_heads": 2, "ffn_hidden_size": 48},
    "qwen3": {"norm": "rmsnorm", "qk_norm": True, "head_dim": 12, "rope_base": 1e4, "n_kv_heads": 2},
}
KEPT = [*product(FAMILIES, ["none"], (True, False)), ("gpt", "mlp", True), ("gpt", "full", True)]


def kept(mesh, family: str, recompute: str, sequence_parallel: bool) -> tuple[list[int], bool]:
    """Return the elements of each saved storage, largest first, and whether SDPA's own output is one of them."""
    tp, options = TensorParallel(mesh, sequence_parallel), FAMILIES[family]
    block = TransformerBlock(WIDTH, OF_WIDTH, tp=tp, recompute=recompute, **options)
    x = torch.randn(TOKENS // (mesh.size() if sequence_parallel else 1), WIDTH, requires_grad=True)
    attended: list[torch.UntypedStorage] = []

    def recorded(*args):
        attended.append((y := attention(*args)).untyped_storage())
        return y

    with mock.patch.object(ops, "attention", recorded), Saved(*block.parameters()).recording() as saved:
        y = block(x, positions=Positions(2, TOKENS // 2), dropout_key=key(block))
    assert y.requires_grad
    sizes = saved.sizes()
    return sorted((nbytes // 4 for nbytes in sizes.values()), reverse=True), attended[0] in sizes


def listed(t: int, family: str, recompute: str, sequence_parallel: bool) -> list[int]:
    """What docs/memory.md lists."""
    options = FAMILIES[family]
    rows = TOKENS // t if sequence_parallel else TOKENS
    if recompute == "full":
        return [rows * WIDTH]
    queries, keys = (TOKENS * heads // t for heads in (OF_WIDTH, options.get("n_kv_heads", OF_WIDTH)))
    head_dim, kept_mlps = options.get("head_dim", WIDTH // OF_WIDTH), recompute == "none"
    items = [rows * WIDTH] * 2  # the two residual inputs
    items += [queries * head_dim] * 2 + [keys * head_dim] * 2  # q, k, v; attention output, once for SDPA and o_proj
    items += [queries * head_dim, keys * head_dim, queries, keys] * ("qk_norm" in options)  # before norms, their rstd
    pre_activations = 2 if options.get("activation") == "swiglu" else 1
    items += [TOKENS * options.get("ffn_hidden_size", 4 * WIDTH) // t] * pre_activations * kept_mlps
    items += [rows] * (1 + kept_mlps) * (1 if "norm" in options else 2)  # mean and rstd, or rstd, of each norm
    items += [queries]  # log-sum-exp of the scores
    return sorted(items, reverse=True)


@pytest.mark.parametrize("t", [1, 2])
def test_a_block_keeps_exactly_the_list(ranks, t):
    """In 16 bits a GPT block keeps 20 bytes for each token and hidden unit, which are 10 elements, and statistics."""
    for case, by_rank in each_case(ranks, t, kept, KEPT):
        for items, shared in by_rank:
            assert items == listed(t, *case) and shared == (case[1] != "full"), case
            if case == ("gpt", "none", True):
                assert sum(items) * t == TOKENS * (10 * WIDTH + 4 + OF_WIDTH)


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
    assert_identical(*found)
