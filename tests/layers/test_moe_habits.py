"""What people do to a layer of experts: autocast, a router of their own, losses of its weights, slices of samples with
positions, padding, inference between steps, .to(), recomputation, and checkpoints of torch. Each gives torch's result,
or one sentence. Recomputation repeats no decision, sends no routing again and counts nothing twice."""

from functools import partial
from itertools import product

import pytest
import torch
from kept import kept
from steps import Results, assert_ranks_have, each_case, gradients, own, step, tp_mesh
from test_moe_layer import BATCH, EXPERTS, HIDDEN, SEQ, TOKENS, WIDTH, by_loop, inputs, make_moe
from testing import assert_identical, assert_kernel_close, assert_same, on_every_rank
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import Positions, Router, TensorParallel, TransformerBlock, balance_losses, transformer_block
from tpformer.ops.route import record_routing

PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
# Compiling the part that holds the others takes seconds: one rank does
WRAPPED = {
    1: [(False, "mlp", "compiled"), *product([False], ("mlp", "mlp.gate", "mlp.experts"), ["checkpointed"])],
    2: [
        (True, "", ""), *product((True, False), ["mlp.gate"], ("hooked", "checkpointed")),
        *product([True], ["mlp", "mlp.experts"], ["checkpointed"]), (True, "mlp.gate", "compiled"),
    ],
}  # fmt: skip


def of_rows(sequence_parallel: bool) -> list[Tensor]:
    """This rank's rows of x and dy."""
    return [own(z.flatten(0, 1), 0 if sequence_parallel else None) for z in inputs()]


def under_autocast(mesh, sequence_parallel: bool, k: int, hooked: str | None) -> tuple[Tensor, Tensor]:
    moe = make_moe("softmax", mesh, sequence_parallel, dtype=torch.float32, policy=ops.Policy(k), hooked=hooked)
    x = of_rows(sequence_parallel)[0].bfloat16().float()
    with record_routing() as decisions, torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
        y.float().sum().backward()
    return y.detach(), decisions[0][1].scores


@pytest.mark.parametrize("t", [1, 2])
def test_a_router_computes_in_float32_under_autocast(ranks, t):
    """Fails if autocast reaches the router's GEMM. Weights in 16 bits were gathered as halves of wider numbers."""
    # sequence shards, experts a token, a part with a hook
    for case, found in each_case(ranks, t, under_autocast, product((True, False), (2, 4), (None, "gate"))):
        split = case[0] and t > 1
        y, scores = (torch.cat(each) if split else each[0] for each in zip(*found, strict=True))
        moe = make_moe("softmax", policy=ops.Policy(case[1]), dtype=torch.float32)
        x = inputs()[0].bfloat16().float()
        low, of_low = (x.flatten(0, 1) @ moe.gate.weight.t()).softmax(1), by_loop(moe, x, x, torch.bfloat16)["y"]
        moe, x = moe.double(), x.double()
        assert_kernel_close(scores, (x.flatten(0, 1) @ moe.gate.weight.t()).softmax(1), low, f"{case} on {t}: scores")
        assert_kernel_close(y.bfloat16(), by_loop(moe, x, x)["y"], of_low.bfloat16(), f"{case} on {t}: y")


class Theirs(Router):
    """A user's router, in plain torch: the two largest shares, neither sorted nor divided by their sum."""

    def forward(self, x, positions=None):
        weight = self.weight if self.tp.mesh is None else self.weight.to_local()
        weights, experts = (x @ weight.t()).softmax(1).topk(2)
        return ops.Routing(experts, weights)


def with_their_router(mesh) -> Results:
    moe = make_moe("softmax", mesh, False)
    moe.gate.__class__ = Theirs
    return step(moe, *of_rows(False))


@pytest.mark.parametrize("t", [1, 2])
def test_a_router_of_another_forward_gets_whole_gradients(ranks, t):
    """Fails if each rank's gradient of a routing's weights is that of its own experts only."""
    wanted = by_loop(make_moe("softmax", policy=ops.Policy(2, normalised=False)), *inputs())
    ((_, found),) = each_case(ranks, t, with_their_router, [()])
    assert_ranks_have(found, wanted, None)


def with_a_loss_of_weights(mesh, sequence_parallel: bool) -> Results:
    moe, found = make_moe("softmax", mesh, sequence_parallel), []
    moe.gate.register_forward_hook(lambda module, args, routing: found.append(routing.weights))
    x = of_rows(sequence_parallel)[0].requires_grad_()
    y = moe(x)
    found[0].square().sum().backward()
    return {"y": y.detach(), "dx": x.grad, "gate.weight": gradients(moe)["gate.weight"]}


def test_a_loss_of_a_routings_weights_counts_once(ranks):
    """Fails if a loss that all ranks compute from the weights is summed over the ranks."""
    ((_, (wanted,)),) = each_case(ranks, 1, with_a_loss_of_weights, [(False,)])
    for (sharded,), found in each_case(ranks, 2, with_a_loss_of_weights, [(True,), (False,)]):
        assert_ranks_have(found, wanted, 0 if sharded else None, f"{sharded=}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_compute_in_at_least_float32_whatever_a_routings_weights_are(dtype):
    moe, x = make_moe("softmax", dtype=dtype), inputs()[0].flatten(0, 1).to(dtype)
    experts, weights = torch.tensor([[0, 2]] * len(x)), torch.rand(len(x), 2).bfloat16()
    wide = moe.experts(x, ops.Routing(experts, weights.to(torch.promote_types(dtype, torch.float32))))
    assert torch.equal(moe.experts(x, ops.Routing(experts, weights)), wide)


def make_block(mesh, recompute: str, sequence_parallel: bool = True) -> TransformerBlock:
    torch.manual_seed(0)
    moe = {"n_experts": EXPERTS, "ffn_hidden_size": WIDTH, "shared_ffn_size": 8, "router_bias": True, "balance": 0.3}
    options = {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "dtype": torch.float64, "recompute": recompute}
    return kept(transformer_block, HIDDEN, 4, moe=moe, tp=TensorParallel(mesh, sequence_parallel), **options)


def wrapped(mesh, sequence_parallel: bool, part: str, how: str) -> tuple[Results, list[int]]:
    """A block with padding, as it is, or with one part hooked or within a wrapper of torch."""
    block = make_block(mesh, "none", sequence_parallel)
    gate, inner = block.mlp.gate, block.get_submodule(part)
    if how == "hooked":
        inner.register_forward_hook(lambda *_: None)
    elif how:
        wrap = {"checkpointed": checkpoint_wrapper, "compiled": partial(torch.compile, backend="eager")}[how]
        block.set_submodule(part, wrap(inner))
    x, dy = (own(z, 1 if sequence_parallel else None) for z in inputs())
    x.requires_grad_()
    with balance_losses() as losses:
        y = block(x, positions=Positions(BATCH, SEQ, key_padding_mask=PADDING))
    ((y * dy).sum() + losses[0]).backward()
    experts = {name.split(".")[-1]: each for name, each in gradients(block).items() if name.endswith("up_proj")}
    return {"y": y.detach(), "dx": x.grad, "gate": full_tensor(gate.weight.grad), **experts}, gate.load.tolist()


@pytest.mark.parametrize("t", [2, *in_turns([1])])
def test_a_wrapped_part_knows_samples_and_padding(ranks, t):
    """Fails if a wrapper keeps positions from a router, which would count padding, and refuse to balance; or if rows
    (batch, seq / t) of all ranks are taken for samples one after another."""
    ((_, ((wanted, load),)),) = each_case(ranks, 1, wrapped, [(False, "", "")])
    assert sum(load) == 2 * int((~PADDING).sum())
    for case, by_rank in each_case(ranks, t, wrapped, WRAPPED[t]):
        assert all(each == load for _, each in by_rank), case
        assert_ranks_have([found for found, _ in by_rank], wanted, 1 if case[0] else None, f"{case} on {t}")


def test_a_bias_stays_wide_where_a_module_becomes_narrow():
    """Fails if a bias is rounded to 16 bits, in which a step of 0.001 is lost beside 0.5."""
    moe = make_moe("sigmoid-bias-shared", dtype=torch.float32)
    before = moe.gate.bias.clone()
    moe.to(torch.bfloat16)
    assert moe.gate.weight.dtype == torch.bfloat16 and torch.equal(moe.gate.bias, before)
    moe.gate.move_bias(torch.tensor([2, 1, 0, 1]), 0.001)
    assert_identical(moe.gate.bias, before + torch.tensor([-0.001, 0.0, 0.001, 0.0]))
    assert moe.half().gate.bias.dtype == torch.float32 and moe.double().gate.bias.dtype == torch.float64


def recomputed(mesh, recompute: str):
    layer, (x, dy) = make_block(mesh, recompute), of_rows(True)
    x.requires_grad_()
    with record_collectives() as calls, record_routing() as decisions, balance_losses() as losses:
        y = layer(x, positions=Positions(BATCH, SEQ))
        ((y * dy).sum() + sum(losses)).backward()
    found = [x.grad, *(p.grad.to_local() for p in layer.parameters())]
    return calls, len(decisions), len(losses), layer.mlp.gate.load.tolist(), found


def test_recomputation_repeats_no_decision_and_counts_nothing_twice(ranks):
    (_, kept), *others = each_case(ranks, 2, recomputed, [("none",), ("mlp",), ("full",)])
    routing, rows = ("all_gather", TOKENS * 2 * 2 * 8), ("all_gather", TOKENS * HIDDEN * 8)
    for (recompute,), again in others:
        for (calls, *_, load, wanted), (found, decisions, losses, count, same) in zip(kept, again, strict=True):
            assert decisions == losses == 1 and count == load and sum(count) == TOKENS * 2
            assert calls.count(routing) == found.count(routing) == 1
            assert found.count(rows) == calls.count(rows) + {"mlp": 1, "full": 2}[recompute]
            assert_identical(same, wanted, recompute)


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    layer, (x, dy) = make_block(None, "full"), (z.flatten(0, 1) for z in inputs())
    with balance_losses() as losses:
        y = layer(x.requires_grad_(), positions=Positions(BATCH, SEQ))
    loss = (y * dy).sum() + sum(losses)
    assert_identical(*(torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True) for _ in range(2)))


@pytest.mark.parametrize("reentrant, recompute", [*product([False, True], ["none", "full"])])
def test_torchs_own_checkpoint_counts_nothing_twice(reentrant, recompute):
    (x, dy), plain, other = inputs(), make_block(None, "none"), make_block(None, recompute)
    plain.mlp.gate.balance = other.mlp.gate.balance = 0.0 if reentrant else 0.3
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
    for layer in (make_moe("balance"), make_block(None, "none")):
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


def test_inference_in_training_mode_is_counted_and_padding_is_neither_counted_nor_balanced():
    x, trained, moe, alone = inputs()[0], make_moe("softmax"), make_moe("balance"), make_moe("balance")
    with torch.inference_mode():
        trained(x)
    trained(x).sum().backward()  # training may follow
    assert int(trained.gate.load.sum()) == 2 * TOKENS * 2
    with balance_losses() as losses:
        moe(x, Positions(BATCH, SEQ, key_padding_mask=PADDING))
    assert int(moe.gate.load.sum()) == (TOKENS - 2) * 2
    with balance_losses() as parts:
        alone(x[:1, :4]), alone(x[1:])
    assert_same(losses[0], parts[0] + parts[1])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_every_rank(4)
def test_one_token_on_four_ranks(sequence_parallel: bool) -> None:
    dim = 0 if sequence_parallel else None
    moe, whole = make_moe("sigmoid-bias-shared", tp_mesh(), sequence_parallel), make_moe("sigmoid-bias-shared")
    x = inputs()[0].flatten(0, 1)[: 4 if sequence_parallel else 1]
    y = moe(own(x, dim))
    assert_same(y, own(whole(x), dim))
    y.sum().backward()
