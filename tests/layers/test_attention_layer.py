"""SelfAttention with norms and key projections of other people sums the gradients of shared key-value heads, and
rotates by each token's position. test_block_layer.py has heads of every kind."""

from itertools import product

import pytest
import torch
from habits import fill
from steps import Results, assert_ranks_have, draw, each_case, own, step
from torch import Tensor

from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear, Positions, RMSNorm, SelfAttention, TensorParallel

BATCH, SEQ, D = 2, 5, 4


def normed(heads: int, kv_heads: int, tp=None) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(heads * D, heads, n_kv_heads=kv_heads, qk_norm=True, tp=tp, dtype=torch.float64)
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.constant_(norm.weight, 1.5)
    return layer


def inputs(heads: int) -> list[Tensor]:
    return draw(*[(BATCH, SEQ, heads * D)] * 2)


def foreign_children(mesh, heads: int, kv_heads: int, sequence_parallel: bool, keys: str = "") -> Results:
    """Gradients with norms of torch.nn, which every rank runs for all heads, and with a key projection that is called
    as a module, and may gather all heads; and what refuses a norm of rows."""
    tp, dim = TensorParallel(mesh, sequence_parallel), 0 if sequence_parallel else None
    layer = normed(heads, kv_heads, tp)
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, norm := torch.nn.RMSNorm(D, eps=1e-5, dtype=torch.float64))
        torch.nn.init.constant_(norm.weight, 1.5)
    if keys == "gathered":
        values = {name: full_tensor(p.detach()) for name, p in layer.k_proj.named_parameters()}
        layer.k_proj = ColumnParallelLinear(heads * D, kv_heads * D, gather_output=True, tp=tp, dtype=torch.float64)
        fill(layer.k_proj, values)
    if keys:
        layer.k_proj.register_forward_hook(lambda *_: None)
    x, dy = (own(z, dim) for z in inputs(heads))
    found = step(layer, x, dy, positions=Positions(BATCH, SEQ))
    layer.k_norm = RMSNorm(D, tp=tp, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"RMSNorm norms one rank's heads of {mesh.size()}: build it with of_heads=Tr"):
        layer(x, positions=Positions(BATCH, SEQ))
    return found


# every rank has its own key heads, or the one key head, or one rank has two that others have, too
CASES = {2: [(4, 2, True), *product([4], [1], (True, False), ("", "hooked", "gathered"))], 3: [(6, 2, False)]}


@pytest.mark.parametrize("t", CASES)
def test_norms_of_torch_see_every_head_once(ranks, t):
    for case, found in each_case(ranks, t, foreign_children, CASES[t]):
        wanted = step(normed(*case[:2]), *inputs(case[0]))
        assert_ranks_have(found, wanted, 0 if case[2] else None, f"{case}")
