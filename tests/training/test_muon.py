"""Muon on ranks is Muon on whole matrices: shards, stacks, copies and uneven rows; steps that are skipped, gradients of
zeros, and matrices without a gradient. Layouts of whole runs are in `python -m bench layouts --muon`."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import build, run_config, take_step
from testing import assert_identical, assert_kernel_close, assert_same, on_every_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from turns import in_turns

import tpformer
from tpformer.config import PRESETS, OptimizerSection, preset_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.kernels.newton_schulz.reference import muon_scale, newton_schulz
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import local_part, whole_matrices
from tpformer.training import muon
from tpformer.training.checkpoint import Checkpointer
from tpformer.training.checkpoint_tensors import model_tensors, optimizer_tensors
from tpformer.training.muon import Muon, hidden_matrices
from tpformer.training.optimizer import build_optimizer
from tpformer.training.updates import LocalAdamW

LR, DECAY, MOMENTUM, STEPS = 0.1, 0.2, 0.9, 3
# name -> (shape, matrices in its rows, how three ranks hold it)
PARAMETERS = {
    "row": ((40, 10), 1, Shard(0)),  # 14, 14 and 12 rows
    "column": ((6, 8), 1, Shard(1)),
    "few": ((2, 9), 1, Shard(0)),  # one rank has none
    "copied": ((5, 7), 1, Replicate()),
    "zeros": ((8, 4), 1, Shard(0)),  # whose gradient is 0
    "experts": ((5, 6, 4), 2, Shard(0)),  # 2, 2 and 1 expert
    "thin": ((4, 6, 5), 2, Shard(2)),
    "table": ((12, 4), None, Shard(0)),  # of AdamW
    "norm": ((12,), None, Shard(0)),
}
MATRICES = {name: stacked for name, (_, stacked, _) in PARAMETERS.items() if stacked}


def drawn(name: str, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A parameter's value (step 0), or its gradient in a step."""
    shape, index = PARAMETERS[name][0], list(PARAMETERS).index(name)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + index), dtype=torch.float64)
    return (torch.zeros_like(value) if step and name == "zeros" else value).to(dtype)


def model_of(mesh=None, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = nn.Module()
    for name, (_, _, place) in PARAMETERS.items():
        value = drawn(name, 0, dtype)
        model.register_parameter(name, nn.Parameter(value if mesh is None else distribute_tensor(value, mesh, [place])))
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        value = drawn(name, step, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.grad = value


def expected(scale: str) -> dict[str, torch.Tensor]:
    """Plain tensors: each matrix by its formula, the others by torch's AdamW."""
    values = {name: nn.Parameter(drawn(name, 0)) for name in PARAMETERS}
    decays = [{"params": [values["table"]], "weight_decay": DECAY}, {"params": [values["norm"]], "weight_decay": 0.0}]
    adamw, sums = torch.optim.AdamW(decays, lr=LR, betas=(0.9, 0.95)), dict.fromkeys(MATRICES, 0.0)
    for step in range(1, STEPS + 1):
        for name in ("table", "norm"):
            values[name].grad = drawn(name, step)
        adamw.step()
        for name, stacked in MATRICES.items():
            gradient = drawn(name, step)
            sums[name] = MOMENTUM * sums[name] + gradient
            update, value = gradient + MOMENTUM * sums[name], values[name].data
            lead = math.prod(value.shape[:-2]) * stacked
            whole = (each.reshape(lead, -1, value.shape[-1]) for each in (update, value))
            for one, own in zip(*whole, strict=True):
                own.mul_(1 - LR * DECAY).sub_(LR * muon_scale(*one.shape, scale) * newton_schulz(one))
    return {name: value.detach() for name, value in values.items()}


def optimizer_of(model: nn.Module, **options) -> Muon:
    return Muon(model, MATRICES, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@on_every_rank(1, 3)
def test_ranks_take_the_step_of_whole_matrices(scale):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.get_world_size() > 1 else None
    model = model_of(mesh)
    optimizer, started = optimizer_of(model, scale=scale), model_of(mesh)
    for step in range(1, STEPS + 1):
        give_gradients(model, step)
        optimizer.update(LR, torch.tensor(0.0))
    for name, value in expected(scale).items():
        parameter = model.get_parameter(name)
        assert_same(full_tensor(parameter.detach()), value, name)
        state = optimizer.state[parameter]
        assert set(state) == set(optimizer.state_names(parameter))
        if name in MATRICES:
            buffer = state["momentum_buffer"]
            assert buffer.dtype == parameter.dtype and local_part(buffer).shape == local_part(parameter).shape
            assert isinstance(buffer, DTensor) == isinstance(parameter, DTensor)
    decayed = full_tensor(started.zeros.detach()) * (1 - LR * DECAY) ** STEPS
    assert_same(full_tensor(model.zeros.detach()), decayed, "a gradient of zeros gives no update but the decay")


@on_every_rank(3)
def test_what_travels_is_in_the_dtype_of_the_iterations_and_the_next_round_is_under_way():
    """Parts are rounded before they leave, which gives the bits of rounding whole matrices: those of one process."""
    events, start, compute = [], whole_matrices.start_all_to_all, muon.newton_schulz

    def started(x, *args):
        events.append(x.dtype)
        return start(x, *args)

    def computed(x, *args):
        events.append("NS")
        return compute(x, *args)

    models = [model_of(mesh, torch.float32) for mesh in (init_device_mesh("cpu", (3,)), None)]
    for model in models:
        optimizer = optimizer_of(model, dtype=torch.bfloat16)
        patched = mock.patch.object(muon, "newton_schulz", computed)
        with mock.patch.object(whole_matrices, "start_all_to_all", started), patched:
            for step in range(1, STEPS + 1):
                give_gradients(model, step)
                optimizer.update(LR, torch.tensor(0.0))
        if model is models[0]:
            assert set(events) == {torch.bfloat16, "NS"}
            assert events[:2] == [torch.bfloat16] * 2, "the second round's parts leave before the first is computed"
    for name, parameter in models[0].named_parameters():
        assert_identical(full_tensor(parameter.detach()), models[1].get_parameter(name).detach(), name)


@on_every_rank(3)
def test_a_skipped_step_changes_no_bit():
    """Whatever its gradients are, and if a weight or a momentum is -0.0."""
    model = model_of(init_device_mesh("cpu", (3,)), torch.float32)
    optimizer = optimizer_of(model)
    everything = lambda: [  # noqa: E731
        local_part(x).clone().view(torch.int32)
        for x in (*[p.detach() for p in model.parameters()], *(v for s in optimizer.state.values() for v in s.values()))
    ]
    for first in (True, False):
        if not first:
            give_gradients(model, 1)
            optimizer.update(LR, torch.tensor(0.0))
            for parameter in (model.row, model.experts):
                for tensor in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
                    local_part(tensor).view(-1)[:5] = -0.0
        before = everything()
        for value in (math.nan, math.inf, 1.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            optimizer.update(LR, torch.tensor(1.0))
            assert_identical(everything()[: len(before)], before)
    if dist.get_rank() == 0:
        assert local_part(model.row.detach()).view(-1)[:5].signbit().all()


@on_every_rank(3)
def test_a_matrix_without_a_gradient_is_named_on_all_ranks():
    """In any step, before anything is sent or a momentum has moved. The ranks can go on together afterwards."""
    model = model_of(init_device_mesh("cpu", (3,)))
    optimizer = optimizer_of(model)
    sent = mock.Mock(side_effect=AssertionError("something was sent"))
    for missing, ranks in (("column", [1]), ("experts", [0, 1, 2]), ("row", [2])):
        give_gradients(model, 1)
        if dist.get_rank() in ranks:
            model.get_parameter(missing).grad = None
        with (
            mock.patch.object(whole_matrices, "start_all_to_all", sent),
            pytest.raises(RuntimeError, match=f"{missing} has no gradient, and Muon needs those of all its matrices"),
        ):
            optimizer.step()
        give_gradients(model, 1)
        optimizer.step()
    alone = model_of()
    other = optimizer_of(alone)
    for _ in range(3):
        give_gradients(alone, 1)
        other.step()
    for name in MATRICES:
        assert_same(full_tensor(model.get_parameter(name).detach()), alone.get_parameter(name).detach(), name)
    model.column.requires_grad_(False)
    before, optimizer = full_tensor(model.column.detach()).clone(), optimizer_of(model)
    give_gradients(model, 1)
    model.column.grad = None
    optimizer.step()
    assert_identical(full_tensor(model.column.detach()), before, "a matrix that was frozen before")


@on_every_rank(4)
def test_a_missing_gradient_is_named_beyond_the_ranks_of_its_matrix():
    """Rows of the grid of ranks share one matrix, columns the other, and nobody is in both groups of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for missing in ("a", "b"):
        model = nn.Module()
        for axis in ("a", "b"):
            model.register_parameter(axis, nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh[axis], [Shard(0)])))
        optimizer = Muon(model, ["a", "b"])
        for axis in ("a", "b"):
            model.get_parameter(axis).grad = torch.ones_like(model.get_parameter(axis))
        optimizer.step()
        if dist.get_rank() == 3:
            model.get_parameter(missing).grad = None
        with pytest.raises(RuntimeError, match=f"^{missing} has no gradient"):
            optimizer.step()


def test_torchs_muon_is_the_same_within_bfloat16():
    """On plain matrices, with its momentum, which is 1 - 0.95 times ours."""
    ours, theirs, exact = (nn.Linear(24, 16, bias=False) for _ in range(3))
    torch.manual_seed(0)
    gradients = [torch.randn(16, 24) for _ in range(3)]
    for model in (ours, theirs):
        model.load_state_dict(exact.state_dict())
    exact.double()
    options = {"lr": 0.1, "weight_decay": 0.1}
    mine = Muon(ours, ["weight"], dtype=torch.bfloat16, **options)
    oracle = Muon(exact, ["weight"], **options)
    torchs = torch.optim.Muon(theirs.parameters(), adjust_lr_fn="match_rms_adamw", **options)
    for gradient in gradients:
        for model, optimizer in ((ours, mine), (theirs, torchs), (exact, oracle)):
            model.weight.grad = gradient.clone().to(model.weight.dtype)
            optimizer.step()
    assert_kernel_close(ours.weight.detach(), exact.weight.detach(), theirs.weight.detach(), "three steps")
    sums = [each.state[w]["momentum_buffer"] for each, w in ((mine, ours.weight), (oracle, exact.weight))]
    assert_kernel_close(sums[0] * 0.05, sums[1] * 0.05, torchs.state[theirs.weight]["momentum_buffer"], "momentum")


LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}


def test_which_parameters_of_a_model_it_takes():
    """Of every preset's model, and of one with shared experts: the linears of layers, and nothing else."""
    sizes = {"vocab_size": 50, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 2}
    of_experts = {"activation": "swiglu", "bias": False, "n_experts": 4, "shared_expert_size": 8, "router_bias": True}
    for config in (GPTConfig(**sizes), GPTConfig(**sizes, **of_experts), *map(preset_config, PRESETS)):
        layers = (config.first_dense_layers or 0) + 1
        part = GPT(dataclasses.replace(config, n_layers=layers), device="meta")
        found, named = hidden_matrices(part), dict(part.named_parameters())
        assert {each.removesuffix(".weight").split(".")[-1] for each in found} <= LINEARS, config
        assert {each for each, n in found.items() if n == 2} == {each for each in named if "gate_up_proj" in each}
        assert set(found.values()) <= {1, 2}, config
        rest = {each for each in named.keys() - found.keys() if named[each].ndim > 1}
        tables = {each for each in rest if not each.startswith("layers.")}
        assert all(each.endswith("mlp.gate.weight") for each in rest - tables) and "embed_tokens.weight" in tables
    optimizer = build_optimizer(GPT(GPTConfig(**sizes)), OptimizerSection(name="muon", weight_decay=0.3))
    decays = {group.get("muon", False): group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {True: 0.3, False: 0.0} and isinstance(optimizer, LocalAdamW)


def test_the_state_of_adamw_is_refused_and_copies_are_the_same():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight]}, {"params": [model[0].bias, model[1].bias]}]
    optimizer = Muon(model, ["0.weight"])
    with pytest.raises(ValueError, match="of an optimizer with other groups, so matrices would be AdamW's"):
        optimizer.load_state_dict(torch.optim.AdamW(groups).state_dict())
    optimizer = Muon(model, ["0.weight"])
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    again = Muon(model, ["0.weight"])
    again.load_state_dict(optimizer.state_dict())
    assert_identical(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(("matrices", "options", "words"), [
    (["nothing"], {}, "nothing is no parameter of the Linear: give names of its matrices"),
    (["bias"], {}, r"bias is \(3,\), which is no 1 matrices of equal rows: leave it to AdamW"),
    ({"weight": 2}, {}, r"weight is \(3, 4\), which is no 2 matrices"),
    ([], {}, "Muon got no matrices: name some"),
    (["weight"], {"newton_schulz": "cubic"}, "newton_schulz='cubic': choose one of quintic, polar_express"),
    (["weight"], {"scale": "none"}, "scale='none': choose one of rms, spectral"),
])  # fmt: skip
def test_what_is_no_matrix_and_no_choice_is_refused(matrices, options, words):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=words):
        tpformer.Muon(model, matrices, **options)
    with pytest.raises(ValueError, match="Muon got a list where the model belongs"):
        tpformer.Muon(list(model.parameters()), matrices, **options)


MODEL = {"vocab_size": 60, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 2, "dropout": 0.1}
RESUMED = {
    "bfloat16": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
    "float32": {"pipeline_parallel": 2, "data_parallel_replicate": 2},
}


@pytest.mark.parametrize("dtype", ["float32", *in_turns(["bfloat16"], first=0)])
@on_every_rank(4)
def test_a_resumed_run_has_the_same_bits(dtype, tmp_path):
    """Moments stay in float32 in a run of 16 bits, and no state needs AdamW's count of steps."""
    config = run_config(RESUMED[dtype], MODEL, {"name": "muon", "muon_dtype": "bfloat16"}, dtype=dtype)

    ends = []
    for resumed in (False, True):
        model, optimizers = build(config)
        checkpointer = Checkpointer(tmp_path)
        if resumed:
            checkpointer.load(1, model.parts, optimizers)
        for step in range(2 if resumed else 1, 3):
            rows = torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(step))
            take_step(model, optimizers, rows, 4 * step)
            if step == 1:
                checkpointer.save(step, model.parts, optimizers)
                checkpointer.wait()
        pairs = list(zip(model.parts, optimizers, strict=True))
        states = {name: value for pair in pairs for name, value in optimizer_tensors(*pair).items()}
        assert any("momentum" in name for name in states) and any("exp_avg" in name for name in states)
        assert all(value.dtype == torch.float32 for value in states.values())
        everything = states | {name: value for part in model.parts for name, value in model_tensors(part).items()}
        ends.append({name: local_part(value).clone() for name, value in everything.items()})
    assert_identical(*ends)
