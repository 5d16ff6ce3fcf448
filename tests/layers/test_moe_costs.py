"""What MoE keeps and sends, counted; recomputation repeats no decision, sends no routing again and counts nothing
twice."""

from itertools import product

import pytest
import torch
from steps import each_case, gradients, own
from test_moe_layer import BATCH, EXPERTS, HIDDEN, KINDS, SEQ, TOKENS, WIDTH, inputs, make_moe
from testing import assert_identical, assert_same
from torch.utils.checkpoint import checkpoint

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.layers import Positions, TensorParallel, TransformerBlock, balance_losses
from tpformer.ops.route import record_routing
from tpformer.planner.storages import Saved

ITEM = 4


def saved_bytes(mesh, kind: str, sequence_parallel: bool) -> int:
    moe = make_moe(kind, mesh, sequence_parallel, dtype=torch.float32)
    x = torch.randn(TOKENS // (mesh.size() if sequence_parallel else 1), HIDDEN, requires_grad=True)
    with Saved(*moe.parameters()).recording() as saved:
        y = moe(x, Positions(BATCH, SEQ))
    assert y.requires_grad
    return sum(saved.sizes().values())


@pytest.mark.parametrize("t", [1, 2, 4])
def test_all_ranks_together_keep_exactly_this(ranks, t):
    cases = product(("softmax", "not-normalised", "sigmoid-bias-shared"), (True, False))
    for (kind, sequence_parallel), found in each_case(ranks, t, saved_bytes, cases):
        policy = KINDS[kind].get("policy", ops.Policy(2))
        k, shared = policy.k, KINDS[kind].get("shared_ffn_size", 0)
        tokens = TOKENS * (1 if sequence_parallel else t)  # whose rows a rank has, all ranks together
        parts = t if sequence_parallel else 1
        wanted = ITEM * (tokens * HIDDEN + 2 * TOKENS * (k * WIDTH + shared))  # rows before the norm; gate and up
        wanted += 8 * TOKENS * k + tokens * 4 * (k + EXPERTS)  # a dispatched row's slot and weight; experts and scores
        wanted += 4 * parts * EXPERTS  # the rows of each expert from each rank
        assert sum(found) == wanted, (kind, sequence_parallel)
        # in 16 bits the first line is 2 + 4 (K f + f_s) / h bytes for each token and hidden unit


def block(mesh, recompute: str) -> TransformerBlock:
    torch.manual_seed(0)
    moe = {"n_experts": EXPERTS, "ffn_hidden_size": WIDTH, "shared_ffn_size": 8, "router_bias": True, "balance": 0.1}
    options: dict = {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "dtype": torch.float64}
    return TransformerBlock(HIDDEN, 4, moe=moe, recompute=recompute, tp=TensorParallel(mesh, True), **options)


def step(mesh, recompute: str):
    layer = block(mesh, recompute)
    x, dy = (own(z.flatten(0, 1)) for z in inputs())
    x.requires_grad_()
    with record_collectives() as calls, record_routing() as decisions, balance_losses() as losses:
        y = layer(x, positions=Positions(BATCH, SEQ))
        ((y * dy).sum() + sum(losses)).backward()
    found = [x.grad, *(p.grad.to_local() for p in layer.parameters())]
    return calls, len(decisions), len(losses), layer.mlp.gate.load.tolist(), found


def test_recomputation_repeats_no_decision_and_counts_nothing_twice(ranks):
    (_, kept), *others = each_case(ranks, 2, step, [("none",), ("mlp",), ("full",)])
    routing, rows = ("all_gather", TOKENS * 2 * 2 * 8), ("all_gather", TOKENS * HIDDEN * 8)
    for (recompute,), again in others:
        for (calls, *_, load, wanted), (found, decisions, losses, count, same) in zip(kept, again, strict=True):
            assert decisions == losses == 1 and count == load and sum(count) == TOKENS * 2
            assert calls.count(routing) == found.count(routing) == 1
            assert found.count(rows) == calls.count(rows) + {"mlp": 1, "full": 2}[recompute]
            assert_identical(same, wanted, recompute)


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    layer = block(None, "full")
    x, dy = (z.flatten(0, 1) for z in inputs())
    with balance_losses() as losses:
        y = layer(x.requires_grad_(), positions=Positions(BATCH, SEQ))
    loss = (y * dy).sum() + sum(losses)
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(layer.parameters()))
    assert_identical(first, second)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_counts_nothing_twice(reentrant, recompute):
    x, dy = inputs()
    plain, other = block(None, "none"), block(None, recompute)
    for layer in (plain, other) if reentrant else ():
        layer.mlp.gate.balance = 0.0
    with balance_losses() as losses:
        ((plain(x) * dy).sum() + sum(losses)).backward()
    with balance_losses() as losses:
        y = checkpoint(other, x.requires_grad_(), use_reentrant=reentrant)
    ((y * dy).sum() + sum(losses)).backward()
    assert plain.mlp.gate.load.tolist() == other.mlp.gate.load.tolist()
    assert_identical(gradients(other), gradients(plain))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_balance_loss_that_a_reentrant_checkpoint_loses_is_refused(steps_before):
    """Fails if a loss that an earlier forward gave hides that this one's is lost."""
    lost = "is lost in torch.utils.checkpoint with use_reentrant=True, .*set use_reentrant=False, or the block's recomp"
    for layer in (make_moe("balance"), block(None, "none")):
        x = inputs()[0].requires_grad_()
        for _ in range(steps_before):
            with balance_losses():
                layer(x)
        with balance_losses() as losses:
            y = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(ValueError, match=lost):
            (y.sum() + sum(losses)).backward()
        with balance_losses() as losses:
            y = checkpoint(layer, x, use_reentrant=False)
        (y.sum() + sum(losses)).backward()
        assert len(losses) == 1


def test_padding_is_not_counted_and_not_balanced():
    x, _ = inputs()
    padding = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    padding[0, 4:] = True
    moe = make_moe("balance")
    with balance_losses() as losses:
        moe(x, Positions(BATCH, SEQ, key_padding_mask=padding))
    assert int(moe.gate.load.sum()) == (TOKENS - 2) * 2
    alone = make_moe("balance")
    with balance_losses() as parts:
        alone(x[:1, :4]), alone(x[1:])
    assert_same(losses[0], parts[0] + parts[1])


def test_a_balance_loss_that_nobody_takes_is_refused():
    with pytest.raises(ValueError, match="would be lost: run the forward in `with balance_losses"):
        make_moe("balance")(inputs()[0])
    with pytest.raises(ValueError, match="rows do not tell them"), balance_losses():
        make_moe("balance")(inputs()[0].flatten(0, 1))


def one_token(mesh, sequence_parallel: bool) -> None:
    dim = 0 if sequence_parallel else None
    moe, whole = make_moe("sigmoid-bias-shared", mesh, sequence_parallel), make_moe("sigmoid-bias-shared")
    x = inputs()[0].flatten(0, 1)[: mesh.size() if sequence_parallel else 1]
    y = moe(own(x, dim))
    assert_same(y, own(whole(x), dim))
    y.sum().backward()


def test_one_token_on_four_ranks(ranks):
    assert len(list(each_case(ranks, 4, one_token, [(True,), (False,)]))) == 2
