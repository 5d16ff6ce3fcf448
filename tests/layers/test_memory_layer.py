"""A TransformerBlock keeps what docs/memory.md lists and nothing else: elements are counted over unique storages."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import Positions, TensorParallel, TransformerBlock
from tpformer.ops import attention
from tpformer.planner.storages import Saved

BATCH, SEQ, HIDDEN, HEADS, ITEM = 2, 8, 32, 4, 4
TOKENS = BATCH * SEQ


def saved_by_block(options: dict, sequence_parallel: bool) -> tuple[list[int], bool]:
    """Return the elements of each saved storage, largest first, and whether o_proj keeps SDPA's own output."""
    t = dist.get_world_size()
    mesh = build_mesh("cpu", tensor_parallel=t)["tp"]
    block = TransformerBlock(HIDDEN, HEADS, tp=TensorParallel(mesh, sequence_parallel), **options)
    x = torch.randn(TOKENS // t if sequence_parallel else TOKENS, HIDDEN, requires_grad=True)
    attended: list[torch.UntypedStorage] = []

    def recorded(*args):
        attended.append((y := attention(*args)).untyped_storage())
        return y

    positions = Positions(BATCH, SEQ)
    with mock.patch.object(ops, "attention", recorded), Saved(*block.parameters()).recording() as saved:
        y = block(x, positions=positions)
    assert y.requires_grad
    sizes = saved.sizes()
    return sorted((nbytes // ITEM for nbytes in sizes.values()), reverse=True), attended[0] in sizes


def expected(
    t: int, sequence_parallel: bool, ffn: int, pre_activations: int, kv_heads: int, statistics: int,
    head_dim: int = HIDDEN // HEADS, qk_norm: bool = False,
):  # fmt: skip
    rows = TOKENS // t if sequence_parallel else TOKENS
    queries, keys = TOKENS * HEADS // t, TOKENS * kv_heads // t
    items = [rows * HIDDEN] * 2  # the two residual inputs
    items += [queries * head_dim] * 2 + [keys * head_dim] * 2  # q, k, v; attention output, once for SDPA and o_proj
    items += [queries * head_dim, keys * head_dim, queries, keys] * qk_norm  # before the norms, and their rstd
    items += [TOKENS * ffn // t] * pre_activations
    items += [rows] * 2 * statistics  # mean and rstd of two norms
    items += [TOKENS * HEADS // t]  # log-sum-exp of the scores
    return sorted(items, reverse=True)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "options, shape",
    [
        ({}, {"ffn": 4 * HIDDEN, "pre_activations": 1, "kv_heads": HEADS, "statistics": 2}),
        (
            {"norm": "rmsnorm", "activation": "swiglu", "rope_base": 1e4, "n_kv_heads": 2, "ffn_hidden_size": 48},
            {"ffn": 48, "pre_activations": 2, "kv_heads": 2, "statistics": 1},
        ),
        (
            {"norm": "rmsnorm", "qk_norm": True, "head_dim": 12, "rope_base": 1e4, "n_kv_heads": 2},
            {"ffn": 4 * HIDDEN, "pre_activations": 1, "kv_heads": 2, "statistics": 1, "head_dim": 12, "qk_norm": True},
        ),
    ],
    ids=["gpt", "llama", "qwen3"],
)
def test_block_keeps_exactly_the_list(ranks, t, sequence_parallel, options, shape):
    for items, shared in ranks(t).run(saved_by_block, options, sequence_parallel):
        assert shared
        assert items == expected(t, sequence_parallel, **shape)
        if not options and sequence_parallel:
            # in 16 bits 20 bytes for each token and hidden unit, which are 10 elements, and the statistics
            assert sum(items) * t == TOKENS * (10 * HIDDEN + 4 + HEADS)
