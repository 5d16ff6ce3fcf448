"""What people do to a layer of experts: autocast, a router of their own, losses of its weights, slices of samples with
positions, inference between steps, .to(), and checkpoints of torch. Each gives torch's result, or one sentence."""

from itertools import product

import pytest
import torch
from steps import Results, gradients, joined
from test_moe_layer import BATCH, EXPERTS, SEQ, by_loop, inputs, make_moe
from testing import assert_identical, assert_kernel_close, assert_same
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import MoE, Positions, Router, TensorParallel, TransformerBlock, balance_losses
from tpformer.ops.route import record_routing

PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])


def mesh_of_all():
    return build_mesh("cpu", tensor_parallel=torch.distributed.get_world_size())["tp"]


def own(x: torch.Tensor, mesh, sequence_parallel: bool, dim: int = 0) -> torch.Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone() if sequence_parallel else x


def under_autocast(mesh, sequence_parallel: bool, k: int, hooked: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    moe = make_moe("softmax", mesh, sequence_parallel, dtype=torch.float32, policy=ops.Policy(k))
    if hooked:
        moe.get_submodule(hooked).register_forward_hook(lambda *_: None)
    x = own(inputs()[0].flatten(0, 1).bfloat16().float(), mesh, sequence_parallel)
    with record_routing() as decisions, torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
        y.float().sum().backward()
    return y.detach(), decisions[0][1].scores


ROUTED = list(product((True, False), (2, 4), (None, "gate")))  # sequence shards, experts a token, a part with a hook


def all_under_autocast() -> list[tuple[torch.Tensor, torch.Tensor]]:
    mesh = mesh_of_all()
    return [under_autocast(mesh, *case) for case in ROUTED]


@pytest.mark.parametrize("t", [1, 2])
def test_a_router_computes_in_float32_under_autocast(ranks, t):
    """Fails if autocast reaches the router's GEMM. Weights in 16 bits were gathered as halves of wider numbers."""
    for case, *found in zip(ROUTED, *ranks(t).run(all_under_autocast), strict=True):
        split = case[0] and t > 1
        y, scores = (torch.cat(each) if split else each[0] for each in zip(*found, strict=True))
        assert_routed_in_float32(y, scores, case[1], f"{case} on {t}")


def assert_routed_in_float32(y: torch.Tensor, scores: torch.Tensor, k: int, what: str) -> None:
    moe = make_moe("softmax", policy=ops.Policy(k), dtype=torch.float32)
    x = inputs()[0].bfloat16().float()
    baseline, of_baseline = ((x.flatten(0, 1) @ moe.gate.weight.t()).softmax(1), by_loop(moe, x, x, torch.bfloat16))
    moe, x = moe.double(), x.double()
    assert_kernel_close(scores, (x.flatten(0, 1) @ moe.gate.weight.t()).softmax(1), baseline, f"{what}: scores")
    assert_kernel_close(y.bfloat16(), by_loop(moe, x, x)["y"], of_baseline["y"].bfloat16(), f"{what}: y")


class Theirs(Router):
    """A user's router, in plain torch: the two largest shares, neither sorted nor divided by their sum."""

    def forward(self, x, positions=None):
        weight = self.weight if self.tp.mesh is None else self.weight.to_local()
        weights, experts = (x @ weight.t()).softmax(1).topk(2)
        return ops.Routing(experts, weights)


def routed_by(kind: type[Router], moe: MoE) -> MoE:
    gate = kind(moe.gate.hidden_size, EXPERTS, moe.gate.policy, tp=moe.tp, dtype=torch.float64)
    gate.weight, moe.gate = moe.gate.weight, gate
    return moe


def with_their_router(sequence_parallel: bool) -> Results:
    mesh = mesh_of_all()
    moe = routed_by(Theirs, make_moe("softmax", mesh, sequence_parallel))
    x, dy = (own(z.flatten(0, 1), mesh, sequence_parallel).clone() for z in inputs())
    y = moe(x.requires_grad_())
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(moe)


@pytest.mark.parametrize("t", [1, 2])
def test_a_router_of_another_forward_gets_whole_gradients(ranks, t):
    """Fails if each rank's gradient of a routing's weights is that of its own experts only."""
    wanted = by_loop(make_moe("softmax", policy=ops.Policy(2, normalised=False)), *inputs())
    for result in ranks(t).run(with_their_router, False):
        assert_same(result, wanted)


def refused(sequence_parallel: bool) -> None:
    with pytest.raises(ValueError, match="a routing of 6 tokens for x with 6 rows on each of 2 ranks: give"):
        with_their_router(sequence_parallel)


def test_a_routing_of_other_tokens_is_refused(ranks):
    ranks(2).run(refused, True)


def with_a_loss_of_weights(sequence_parallel: bool) -> Results:
    mesh = mesh_of_all()
    moe, found = make_moe("softmax", mesh, sequence_parallel), []
    moe.gate.register_forward_hook(lambda module, args, routing: found.append(routing.weights))
    x = own(inputs()[0].flatten(0, 1), mesh, sequence_parallel).clone().requires_grad_()
    y = moe(x)
    found[0].square().sum().backward()
    return {"y": y.detach(), "dx": x.grad, "gate.weight": gradients(moe)["gate.weight"]}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_loss_of_a_routings_weights_counts_once(ranks, sequence_parallel):
    """Fails if a loss that all ranks compute from the weights is summed over the ranks."""
    (wanted,) = ranks(1).run(with_a_loss_of_weights, False)
    results = ranks(2).run(with_a_loss_of_weights, sequence_parallel)
    for result in joined(results, 0) if sequence_parallel else results:
        assert_same(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_compute_in_at_least_float32_whatever_a_routings_weights_are(dtype):
    moe, x = make_moe("softmax", dtype=dtype), inputs()[0].flatten(0, 1).to(dtype)
    experts, weights = torch.tensor([[0, 2]] * len(x)), torch.rand(len(x), 2).bfloat16()
    wide = moe.experts(x, ops.Routing(experts, weights.to(torch.promote_types(dtype, torch.float32))))
    assert torch.equal(moe.experts(x, ops.Routing(experts, weights)), wide)


def balanced(sequence_parallel: bool, hooked: bool) -> tuple[Results, list[int]]:
    mesh = mesh_of_all()
    moe = make_moe("balance", mesh, sequence_parallel)
    if hooked:
        moe.gate.register_forward_hook(lambda *_: None)
    x = own(inputs()[0], mesh, sequence_parallel, 1).clone().requires_grad_()
    with balance_losses() as losses:
        y = moe(x, Positions(BATCH, SEQ, key_padding_mask=PADDING))
    losses[0].backward()
    return {"y": y.detach(), "dx": x.grad, "gate.weight": gradients(moe)["gate.weight"]}, moe.gate.load.tolist()


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_positions_beside_slices_of_samples(ranks, sequence_parallel, hooked):
    """Fails if rows (batch, seq / t) of all ranks are taken for samples one after another."""
    ((wanted, load),) = ranks(1).run(balanced, False, False)
    chosen = (inputs()[0][~PADDING] @ make_moe("balance").gate.weight.t()).topk(2).indices
    assert load == chosen.flatten().bincount(minlength=EXPERTS).tolist()
    results = ranks(2).run(balanced, sequence_parallel, hooked)
    assert all(each == load for _, each in results)
    found = [result for result, _ in results]
    for result in joined(found, 1) if sequence_parallel else found:
        assert_same(result, wanted)


def test_positions_of_another_shape_are_refused():
    with balance_losses(), pytest.raises(ValueError, match="that are not those of Positions"):
        make_moe("balance")(inputs()[0], Positions(SEQ, BATCH))


def wrapped(sequence_parallel: bool, cases: list[tuple[str, str]]) -> list[tuple[Results, list[int]]]:
    """A block with padding as it is, then with one part within a wrapper of torch."""
    mesh, found = mesh_of_all(), []
    moe = {"n_experts": EXPERTS, "ffn_hidden_size": 12, "balance": 0.3}
    options: dict = {"bias": False, "activation": "swiglu", "dtype": torch.float64}
    for part, how in [("", ""), *cases]:
        torch.manual_seed(0)
        block = TransformerBlock(16, 2, moe=moe, tp=TensorParallel(mesh, sequence_parallel), **options)
        gate = block.mlp.gate
        if part:
            inner = block.get_submodule(part)
            outer = checkpoint_wrapper(inner) if how == "checkpointed" else torch.compile(inner, backend="eager")
            block.set_submodule(part, outer)
        x, dy = (own(z, mesh, sequence_parallel, 1).clone() for z in inputs())
        x.requires_grad_()
        with balance_losses() as losses:
            y = block(x, positions=Positions(BATCH, SEQ, key_padding_mask=PADDING))
        ((y * dy).sum() + losses[0]).backward()
        grads = {name.split(".")[-1]: each for name, each in gradients(block).items() if name.endswith("up_proj")}
        found.append(({"y": y.detach(), "dx": x.grad, **grads}, gate.load.tolist()))
    return found


@pytest.mark.parametrize("t", [1, 2])
def test_a_wrapped_part_knows_samples_and_padding(ranks, t):
    """Fails if a wrapper keeps positions from a router: it would count padding, and refuse to balance. Compiling
    the part that holds the others takes seconds: one rank does."""
    parts = ("mlp", "mlp.gate", "mlp.experts")
    cases = [*product(parts, ["checkpointed"]), *product(parts[t - 1 :], ["compiled"])]
    (((wanted, load),),) = ranks(1).run(wrapped, False, [])
    assert sum(load) == 2 * int((~PADDING).sum())
    for case, *found in zip([("", ""), *cases], *ranks(t).run(wrapped, t > 1, cases), strict=True):
        assert all(each == load for _, each in found), case
        for result in joined([result for result, _ in found], 1):
            assert_same(result, wanted, f"{case} on {t}")


def test_training_follows_inference_in_training_mode():
    moe, (x, _) = make_moe("softmax"), inputs()
    with torch.inference_mode():
        moe(x)
    moe(x).sum().backward()
    assert int(moe.gate.load.sum()) == 2 * 2 * BATCH * SEQ


def test_a_bias_stays_wide_where_a_module_becomes_narrow():
    """Fails if a bias is rounded to 16 bits, in which a step of 0.001 is lost beside 0.5."""
    moe = make_moe("sigmoid-bias-shared", dtype=torch.float32)
    before = moe.gate.bias.clone()
    moe.to(torch.bfloat16)
    assert moe.gate.weight.dtype == torch.bfloat16 and torch.equal(moe.gate.bias, before)
    moe.gate.move_bias(torch.tensor([2, 1, 0, 1]), 0.001)
    assert_identical(moe.gate.bias, before + torch.tensor([-0.001, 0.0, 0.001, 0.0]))
    assert moe.half().gate.bias.dtype == torch.float32 and moe.double().gate.bias.dtype == torch.float64


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_balance_loss_that_a_reentrant_checkpoint_loses_is_refused(steps_before):
    """Fails if a loss that an earlier forward gave hides that this one's is lost."""
    moe, x = make_moe("balance"), inputs()[0].requires_grad_()
    for _ in range(steps_before):
        with balance_losses():
            moe(x)
    with balance_losses() as losses:
        y = checkpoint(moe, x, use_reentrant=True)
    with pytest.raises(ValueError, match="is lost in torch.utils.checkpoint with use_reentrant=True"):
        (y.sum() + sum(losses)).backward()
    with balance_losses() as losses:
        y = checkpoint(moe, x, use_reentrant=False)
    (y.sum() + sum(losses)).backward()
    assert len(losses) == 1
