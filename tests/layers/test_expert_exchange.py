"""MoE whose ranks exchange tokens equals a loop over experts in float64 with every gradient, on data-parallel and on
tensor-parallel ranks, fused and as modules; what it sends is counted, and what cannot work is refused.

tests/ops has the operation, tests/models steps of training in many layouts.
"""

from collections import Counter
from copy import deepcopy
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from test_moe_layer import BATCH, EXPERTS, HIDDEN, SEQ, by_loop, inputs, make_moe
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from turns import in_turns

from tpformer.distributed import build_mesh, record_collectives
from tpformer.distributed.dtensor import full_tensor, is_dtensor
from tpformer.distributed.groups import REGISTRY
from tpformer.distributed.mesh import expert_mesh
from tpformer.kernels.cost import gemm_seconds, machine_for
from tpformer.layers import (
    MoE,
    Positions,
    TensorParallel,
    balance_losses,
    explain,
    explain_notes,
    init_weights,
    keep,
    transformer_block,
)
from tpformer.layers.explain_notes import exchange_note
from tpformer.ops.choice.spare import NCCL_CTAS, spare_processors
from tpformer.parallel import reduce_partial_gradients

MIXTURE = {"n_experts": EXPERTS, "ffn_hidden_size": 8, "shared_ffn_size": 8}
KINDS = ("softmax", "sigmoid-bias-shared", "groups", "every-expert", "balance")


def exchanging(tensor_parallel: int) -> TensorParallel:
    """All ranks share the experts; so many of them share the rest, and the others have samples of their own."""
    ranks = dist.get_world_size()
    mesh = build_mesh("cpu", tensor_parallel=tensor_parallel, data_parallel_shard=ranks // tensor_parallel)
    view = expert_mesh(mesh, 1, ranks)
    tp = mesh["tp"] if tensor_parallel > 1 else None
    return TensorParallel(tp, tensor_parallel > 1, experts=view[view.mesh_dim_names[-1]])


def own_results(moe: MoE, x: Tensor, dy: Tensor, positions: Positions) -> dict[str, Tensor]:
    """y and dx of this rank's rows, and gradients of what ranks share, each of which adds its own part."""
    x = x.clone().requires_grad_()
    with balance_losses() as losses:
        y = moe(x, positions)
    (y.mul(dy).sum() + sum(losses)).backward()
    reduce_partial_gradients(moe)
    found = {name: full_tensor(p.grad) for name, p in moe.named_parameters()}
    if moe.tp.mesh is None:
        for name, p in moe.named_parameters():
            if not is_dtensor(p):
                dist.all_reduce(found[name])
    return {"y": y.detach(), "dx": x.grad, **found}


@pytest.mark.parametrize("hooked", [None, *in_turns(["experts", "gate"], first=0)])
@on_every_rank(2)
def test_a_layer_is_that_of_one_process(hooked: str | None) -> None:
    rank, (x, dy) = dist.get_rank(), inputs()
    for tensor_parallel in (1, 2):
        tp = exchanging(tensor_parallel)
        for kind in KINDS:
            whole = by_loop(make_moe(kind), x, dy)
            expected = {name: whole[name] for name, _ in make_moe(kind).named_parameters()}
            moe = make_moe(kind, tp, hooked=hooked)
            shape = (BATCH * SEQ, HIDDEN)
            rows = [each.reshape(shape).chunk(2)[rank] for each in (x, dy, whole["y"], whole["dx"])]
            positions = Positions(BATCH if tensor_parallel == 2 else BATCH // 2, SEQ)
            found = own_results(moe, *rows[:2], positions)
            assert_same(found, {"y": rows[2], "dx": rows[3], **expected}, f"{tensor_parallel} {kind}")
            loads = moe.gate.load.clone()
            dist.all_reduce(loads)
            assert int(loads.sum()) == BATCH * SEQ * moe.gate.policy.k


@on_every_rank(4)
def test_what_both_pictures_send() -> None:
    """docs/moe.md draws both. A shared expert has the collectives of an MLP, if tensor-parallel ranks share it."""
    for tensor_parallel, others in ((1, {}), (2, {"all_gather": 3, "reduce_scatter": 2})):
        moe = make_moe("sigmoid-bias-shared", exchanging(tensor_parallel))
        x = torch.randn(SEQ // tensor_parallel, HIDDEN, dtype=torch.float64, requires_grad=True)
        with record_collectives() as forward:
            y = moe(x)
        with record_collectives() as backward:
            y.sum().backward()
        assert Counter(name for name, _ in forward)["all_to_all"] == 4, "numbers, weights, rows out, rows back"
        assert Counter(name for name, _ in forward + backward) == {"all_to_all": 8, **others}


@on_every_rank(2)
def test_a_region_repeats_no_reduction_of_a_shared_expert() -> None:
    """Nobody reads what the second run would reduce: neither what experts give nor what is added to it."""
    options = {"n_heads": 2, "activation": "swiglu", "bias": False, "norm": "rmsnorm", "moe": MIXTURE}
    block = transformer_block(HIDDEN, **options, tp=exchanging(2), dtype=torch.float64)
    init_weights(block, seed=0)
    x = torch.randn(SEQ // 2, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    positions, sent, found = Positions(1, SEQ), {}, {}
    for recompute in ("none", "mlp", "full"):
        y = keep(block, recompute=recompute)(x, positions=positions)
        with record_collectives() as backward:
            y.square().sum().backward()
        sent[recompute] = Counter(name for name, _ in backward)
        reduce_partial_gradients(block)
        found[recompute] = {"x": x.grad, **{name: full_tensor(p.grad) for name, p in block.named_parameters()}}
        x.grad = None
        block.zero_grad(set_to_none=True)
    assert_identical([found["mlp"], found["full"]], [found["none"]] * 2)
    assert sent["mlp"] - sent["none"] == {"all_gather": 1, "all_to_all": 1}, "rows of both, sent out again"
    assert sent["full"] - sent["none"] == {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 1}, "and attention's"


def replicated(tp: TensorParallel | None) -> nn.Sequential:
    """Somebody's model with such a layer in it."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64), make_moe("softmax", tp))
    nn.init.eye_(model[0].weight), nn.init.zeros_(model[0].bias)
    return model


@on_every_rank(2)
def test_torchs_replicas_take_all_but_experts_and_are_refused_for_these() -> None:
    rank, (x, dy) = dist.get_rank(), (each.reshape(-1, HIDDEN) for each in inputs())
    one, tp = replicated(None), exchanging(1)
    (one(x) * dy).sum().backward()
    model = replicated(tp)
    block = transformer_block(HIDDEN, n_heads=2, activation="swiglu", bias=False, tp=tp, moe=MIXTURE)
    for refused in (model[1], model[1].experts, block):
        with pytest.raises(ValueError, match="take the experts of one rank for those of all: lay the model out by"):
            DistributedDataParallel(refused)
    experts = [name for name, p in model.named_parameters() if is_dtensor(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    replicas = DistributedDataParallel(model)  # which has to live until the backward
    (replicas(x.chunk(2)[rank]) * dy.chunk(2)[rank]).sum().backward()
    found = {name: full_tensor(p.grad) / (2 if name in experts else 1) for name, p in model.named_parameters()}
    assert_same(found, {name: p.grad / 2 for name, p in one.named_parameters()})


@on_every_rank(2)
def test_ranks_of_experts_are_those_of_the_model_or_are_refused() -> None:
    tp = exchanging(2)
    block, plain = transformer_block(8, n_heads=2, tp=tp), MoE(8, 2, ffn_hidden_size=4, tp=tp.mesh)
    for words, call in {
        "set sequence_parallel=True, or leave the argument experts out": lambda: TensorParallel(
            tp.mesh, experts=tp.experts
        ),
        "n_experts=3 cannot be divided among expert_parallel=2 ranks": lambda: MoE(8, 3, ffn_hidden_size=4, tp=tp),
        "cannot be part of": lambda: setattr(block, "mlp", plain),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="experts=3, a int: give a 1-D DeviceMesh or None"):
        TensorParallel(experts=3)  # type: ignore[arg-type]
    moe = MoE(HIDDEN, EXPERTS, ffn_hidden_size=8, tp=tp, dtype=torch.float64)
    copies, own = ({n: full_tensor(p.detach()) for n, p in each.named_parameters()} for each in (deepcopy(moe), moe))
    assert_same(copies, own)
    assert str(tp) == "2 tensor-parallel ranks with sequence shards and experts on 2 ranks"
    (line,) = [line for line in explain(moe, 16).splitlines() if "exchange" in line]
    assert line.startswith("experts exchange tokens over 2 expert-parallel ranks, with 2 experts on each: a token goes")
    assert "without expert_parallel 2 tensor-parallel ranks would send" in line
    with mock.patch.object(explain_notes, "device_name", lambda device: "NVIDIA H100"):
        (line,) = [line for line in explain(moe, 2**22).splitlines() if "exchange" in line]
    h100, rows = machine_for("NVIDIA H100"), 2**21 * 2  # a rank's tokens, for two experts each
    seconds = sum(gemm_seconds(rows, *sizes, 8, h100) for sizes in ((2 * 8, HIDDEN), (HIDDEN, 8)))
    assert f" beside {1e6 * seconds:.0f} us of the experts' GEMMs" in line, line
    assert exchange_note(2 * 10**6, 2, 4, 2, 3, 10**6).endswith("2.5 MB are sent in a forward and 3.3 MB in a backward")


@on_every_rank(2)
def test_fused_kernels_leave_processors_to_the_exchange_on_a_mesh_of_the_users() -> None:
    """A shared expert's linears run while rows travel: a kernel that waits on every processor would keep them back."""
    mesh, experts = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "ep"))
    with mock.patch.object(REGISTRY, "beside", WeakSet()):
        transformer_block(HIDDEN, 2, tp=TensorParallel(mesh, True))
        assert spare_processors(mesh.get_group()) == 0
        transformer_block(HIDDEN, 2, moe=MIXTURE, activation="swiglu", tp=TensorParallel(mesh, True, experts=experts))
        assert spare_processors(mesh.get_group()) == NCCL_CTAS
