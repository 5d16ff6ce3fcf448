"""What MoE keeps and sends, counted; recomputation repeats no decision, sends no routing again and counts nothing
twice."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from test_moe_layer import BATCH, EXPERTS, HIDDEN, KINDS, SEQ, TOKENS, WIDTH, inputs, make_moe
from testing import assert_same
from torch.utils.checkpoint import checkpoint

from tpformer import ops
from tpformer.distributed import build_mesh, record_collectives
from tpformer.layers import Positions, TensorParallel, TransformerBlock, balance_losses
from tpformer.ops.route import record_routing
from tpformer.planner.storages import Saved

ITEM = 4


SAVED = list(product(("softmax", "not-normalised", "sigmoid-bias-shared"), (True, False)))


def saved_bytes() -> list[int]:
    mesh, found = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], []
    for kind, sequence_parallel in SAVED:
        moe = make_moe(kind, mesh, sequence_parallel, dtype=torch.float32)
        x = torch.randn(TOKENS // (mesh.size() if sequence_parallel else 1), HIDDEN, requires_grad=True)
        with Saved(*moe.parameters()).recording() as saved:
            y = moe(x, Positions(BATCH, SEQ))
        assert y.requires_grad
        found.append(sum(saved.sizes().values()))
    return found


@pytest.mark.parametrize("t", [1, 2, 4])
def test_all_ranks_together_keep_exactly_this(ranks, t):
    for (kind, sequence_parallel), *found in zip(SAVED, *ranks(t).run(saved_bytes), strict=True):
        policy = KINDS[kind].get("policy", ops.Policy(2))
        k, shared = policy.k, KINDS[kind].get("shared_ffn_size", 0)
        own = TOKENS * (1 if sequence_parallel else t)  # tokens whose rows a rank has, all ranks together
        parts = t if sequence_parallel else 1
        wanted = ITEM * (own * HIDDEN + 2 * TOKENS * (k * WIDTH + shared))  # rows before the norm; gate and up
        wanted += 8 * TOKENS * k + own * 4 * (k + EXPERTS)  # a dispatched row's slot and weight; own experts and scores
        wanted += 4 * parts * EXPERTS  # the rows of each expert from each rank
        assert sum(found) == wanted, (kind, sequence_parallel)
        # in 16 bits the first line is 2 + 4 (K f + f_s) / h bytes for each token and hidden unit


def block(mesh, recompute: str) -> TransformerBlock:
    torch.manual_seed(0)
    moe = {"n_experts": EXPERTS, "ffn_hidden_size": WIDTH, "shared_ffn_size": 8, "router_bias": True, "balance": 0.1}
    options: dict = {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "dtype": torch.float64}
    return TransformerBlock(HIDDEN, 4, moe=moe, recompute=recompute, tp=TensorParallel(mesh, True), **options)


def step(recompute: str):
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    layer = block(mesh, recompute)
    x, dy = (z.flatten(0, 1).chunk(mesh.size())[mesh.get_local_rank()].clone() for z in inputs())
    x.requires_grad_()
    with record_collectives() as calls, record_routing() as decisions, balance_losses() as losses:
        y = layer(x, positions=Positions(BATCH, SEQ))
        ((y * dy).sum() + sum(losses)).backward()
    gradients = [p.grad.to_local() for p in layer.parameters()]
    return calls, len(decisions), len(losses), layer.mlp.gate.load.tolist(), [x.grad, *gradients]


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_recomputation_repeats_no_decision_and_counts_nothing_twice(ranks, recompute):
    kept, again = ranks(2).run(step, "none"), ranks(2).run(step, recompute)
    routing = ("all_gather", TOKENS * 2 * 2 * 8)
    for (calls, *_, load, gradients), (found, decisions, losses, count, others) in zip(kept, again, strict=True):
        assert decisions == losses == 1 and count == load and sum(count) == TOKENS * 2
        assert calls.count(routing) == found.count(routing) == 1
        rows = ("all_gather", TOKENS * HIDDEN * 8)
        assert found.count(rows) == calls.count(rows) + {"mlp": 1, "full": 2}[recompute]
        assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    layer = block(None, "full")
    x, dy = (z.flatten(0, 1) for z in inputs())
    with balance_losses() as losses:
        y = layer(x.requires_grad_(), positions=Positions(BATCH, SEQ))
    loss = (y * dy).sum() + sum(losses)
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(layer.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


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
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, same.grad)


def test_a_balance_loss_in_a_reentrant_checkpoint_is_refused():
    layer, (x, dy) = block(None, "none"), inputs()
    with balance_losses():
        y = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(ValueError, match="set use_reentrant=False, or the block's recompute"):
        y.backward(dy)


def test_evaluation_counts_no_tokens():
    moe = make_moe("sigmoid-bias-shared")
    before = moe.gate.bias.clone()
    moe.eval()(inputs()[0])
    assert moe.gate.load is None and torch.equal(moe.gate.bias, before)


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


def one_token(sequence_parallel: bool):
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    moe = make_moe("sigmoid-bias-shared", mesh, sequence_parallel)
    whole = make_moe("sigmoid-bias-shared")
    x = inputs()[0].flatten(0, 1)[: mesh.size() if sequence_parallel else 1]
    own = x.chunk(mesh.size())[mesh.get_local_rank()] if sequence_parallel else x
    y = moe(own.clone())
    wanted = whole(x)
    y.sum().backward()
    return y, wanted.chunk(mesh.size())[mesh.get_local_rank()] if sequence_parallel else wanted


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_one_token_on_four_ranks(ranks, sequence_parallel):
    for y, wanted in ranks(4).run(one_token, sequence_parallel):
        assert_same(y, wanted)
