"""Mistakes that experts over the data axes invite, each made on purpose: the comparison that is named beside it sees
it, or a refusal shows it, and without a mistake nothing is seen.

A mistake would train to a wrong loss without a message. They have the numbers 20 to 42 among the silent traps of
context and expert parallelism. ELSEWHERE names the tests that see the others of these.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from planted import Mistake, Patch, changed, instead, wrapped
from pool import WorkerPool
from small_runs import run_config, take_step, world_size
from testing import differ_on_a_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from turns import in_turns

from tpformer.config import Layout, RunConfig, build_config
from tpformer.distributed import mesh as meshes
from tpformer.distributed.mesh import expert_mesh
from tpformer.inference import settings
from tpformer.layers import TensorParallel, dropout, module, moe
from tpformer.layers.moe import Experts
from tpformer.models import GPT
from tpformer.parallel import gradients, reduce_partial_gradients, zero
from tpformer.planner import counting
from tpformer.planner.counting import CollectiveCounter
from tpformer.training import setup
from tpformer.training import step as training_step
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import evaluate

BATCH, SEQ, STEPS = 4, 8, 2
NUMBERED: Any = SimpleNamespace(n_samples=6, sample=lambda index: np.full(SEQ + 1, index))
MODEL = {
    "vocab_size": 50, "seq_length": SEQ, "n_layers": 2, "hidden_size": 16, "n_heads": 4, "dropout": 0.1,
    "n_experts": 8, "expert_ffn_size": 5, "shared_expert_size": 4, "first_dense_layers": 1, "router_bias": True,
    "activation": "swiglu", "bias": False, "norm": "rmsnorm", "router_score": "sigmoid",
}  # fmt: skip
LAYOUTS: dict[str, dict] = {
    "dp4 ep2": {"data_parallel_shard": 4, "zero_stage": 3, "cpu_offload": True, "expert_parallel": 2},
    "tp4 ep2": {"tensor_parallel": 4, "expert_parallel": 2},
    "tp2 dp2 ep4": {"tensor_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 4},
    "cp2 tp2 ep2": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "pp2 dp2 ep2": {
        "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2, "expert_parallel": 2,
    },
    "tp2 dp2 ep1": {"tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 1},
}  # fmt: skip


def config_of(layout: str) -> RunConfig:
    parallel = build_config({"parallel": LAYOUTS[layout]}).parallel
    other = {"pp2 dp2 ep2": {"n_layers": 4}, "tp4 ep2": {"n_experts": 6}}  # which 4 ranks could not share without ep
    several = parallel.pipeline_parallel > 1 or parallel.data_parallel_replicate > 1
    size = 1 if several else BATCH // parallel.data_parallel
    options: dict[str, Any] = {"dtype": "float64", "global_batch_size": BATCH, "balance_loss": 0.1}
    return run_config(LAYOUTS[layout], MODEL | other.get(layout, {}), microbatch_size=size, **options)


class Check(NamedTuple):
    """What all ranks of a layout should give, and what one gives on its mesh. The first is made without ranks."""

    layout: str
    expected: Callable[[RunConfig], Any]
    found: Callable[[RunConfig, DeviceMesh], Any]


def steps(model: ModelParts, config: RunConfig) -> dict[str, Any]:
    """What training gives: losses, norms before clipping, experts' loads. A step begins with what the last one made."""
    optimizers, found = build_optimizers(model, config.optimizer), dict[str, Any]()
    for step in range(STEPS):
        rows = torch.randint(50, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
        result = take_step(model, optimizers, rows, step * BATCH)
        found |= {f"loss {step}": result.loss, f"norm {step}": result.norm, f"loads {step}": result.loads}
    return found


def of_one_process(config: RunConfig) -> dict[str, Any]:
    train = config.train
    alone = GPT(config.model.architecture, seed=train.seed, dtype=torch.float64, balance_loss=train.balance_loss)
    options: dict[str, Any] = {"microbatch_size": BATCH, "router_bias_rate": train.router_bias_rate}
    return steps(ModelParts([alone], dtype=torch.float64, **options), config)


def training(layout: str) -> Check:
    return Check(layout, of_one_process, lambda config, mesh: steps(build_model(config, mesh), config))


def rounds(config: RunConfig, mesh: DeviceMesh) -> list[tuple]:
    """The forwards of a validation, in which every rank has to take part: how many samples, and how many targets."""
    model, found = build_model(config, mesh), []

    def forward(batch: torch.Tensor) -> torch.Tensor:
        found.append((len(batch), int((batch[:, 1:] >= 0).any(1).sum())))
        return torch.ones(2, dtype=torch.float64)

    with mock.patch.object(model, "summed_loss", forward):
        evaluate(model, [NUMBERED], NUMBERED.n_samples, torch.device("cpu"))
    return gathered(found)


def gathered(own: Any) -> list:
    """What every rank has, in rank order."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def offloaded(config: RunConfig, mesh: DeviceMesh) -> list[set]:
    """Whether FSDP2 keeps the states of each of its groups of parameters on the host."""
    (part,) = build_model(config, mesh).parts
    states = [zero.fully_shard.state(each) for each in part.modules() if isinstance(each, FSDPModule)]
    groups = [group for state in states for group in zero._groups(state)]
    return [{len(groups)}, {each.offload_to_cpu for group in groups for each in group.fsdp_params}]


def collectives(config: RunConfig, mesh: DeviceMesh) -> list:
    """The axes over which a step's gradients sent something through torch, and by which operations."""
    model = build_model(config, mesh)
    with CollectiveCounter(mesh, config.parallel) as counter:
        model.gradients(torch.zeros(1, SEQ + 1, dtype=torch.int64), first_sample=dist.get_rank())
    return sorted({(call.axis, call.operation) for call in counter.take()})


def parts_of_gradients(config: RunConfig, mesh: DeviceMesh) -> str:
    """What reduce_partial_gradients refuses after a step's gradients."""
    model = build_model(config, mesh)
    model.gradients(torch.zeros(1, SEQ + 1, dtype=torch.int64), first_sample=dist.get_rank())
    try:
        reduce_partial_gradients(model.parts[0])
    except ValueError as error:
        return str(error)
    return ""


def views(config: RunConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """The ranks of two folds on one mesh, and whether an equal mesh has groups of its own for them."""
    again = run_mesh(config, "cpu")
    folds = [expert_mesh(each, 1, ep) for each, ep in ((mesh, 2), (mesh, 4), (again, 2))]
    groups = [[fold[name].get_group() for name in fold.mesh_dim_names[1:]] for fold in folds]
    ranks = [[dist.get_process_group_ranks(group) for group in each] for each in groups]
    return {"ranks": gathered(ranks), "own groups": groups[0][1] is not groups[2][1]}


TWO = [[[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]] for rank in range(4)]  # of each: eshard, ep
FOLDS = [[two, [[rank], [0, 1, 2, 3]], two] for rank, two in enumerate(TWO)]
SENT = [
    ("dp_shard", "all_gather"), ("dp_shard", "reduce_scatter"), ("ep", "all_to_all"),
    ("eshard", "all_gather"), ("eshard", "reduce_scatter"),
]  # fmt: skip
CHECKS: dict[str, Check] = {
    **{f"training {layout}": training(layout) for layout in LAYOUTS},
    "rounds of validation": Check("dp4 ep2", lambda _: [[(1, 1), (1, 1)]] * 2 + [[(1, 1), (1, 0)]] * 2, rounds),
    "offloaded states": Check("dp4 ep2", lambda _: [{4}, {True}], offloaded),
    "collectives by axis": Check("dp4 ep2", lambda _: SENT, collectives),
    "parts of gradients": Check("dp4 ep2", lambda _: "", parts_of_gradients),
    "views of the mesh": Check("dp4 ep2", lambda _: {"ranks": FOLDS, "own groups": True}, views),
}


def parts_by(axis: str) -> Mistake:
    """As if a gradient of experts had its parts on one of their axes alone."""

    def wrong(right: Callable) -> Callable:
        def copies(grad: Any, ranks: int) -> int:
            mesh = getattr(grad, "device_mesh", None)
            sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            own = {name.partition("_")[0]: size for name, size in sizes.items()}
            return ranks // own.get(axis, 1) if own.keys() & {"eshard", "ep"} else right(grad, ranks)

        return copies

    return wrapped(gradients, "_copies", wrong)


def with_sequence_shards(self: TensorParallel) -> TensorParallel:
    return self if self.experts is None else TensorParallel(self.experts, True)


def experts_stay_on_the_device(right: Callable) -> Callable:
    def init(self: Any, params: Any, modules: Any, mesh_info: Any, *more: Any, **options: Any) -> None:
        if mesh_info.mesh.size() == 2:
            more = tuple(OffloadPolicy() if isinstance(each, OffloadPolicy) else each for each in more)
            options = {name: OffloadPolicy() if isinstance(v, OffloadPolicy) else v for name, v in options.items()}
        right(self, params, modules, mesh_info, *more, **options)

    return init


def of_half_the_length(right: Callable) -> Callable:
    return lambda seed, step, length, *names: right(seed, step, length // 2, *names)


def views_of_equal_meshes_are_shared(patch: Patch) -> None:
    shared: dict = {}
    patch.setattr(meshes, "_views", lambda mesh: shared.setdefault(mesh, {}))


# the trap's number, the comparison that sees the mistake, the mistake
TRAPS: dict[str, tuple[int, str, Mistake]] = {
    # as if a gradient's parts were those of the dense parameters
    "the norm counts copies of experts": (20, "training dp4 ep2",
     instead(gradients, "_copies", lambda grad, ranks: ranks // grad.device_mesh.size(0))),
    # as FSDP2 does without a factor; the rest of this layout has no copies
    "gradients of experts are averages": (21, "training tp4 ep2",
     instead(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)),
    "experts are drawn by local index": (25, "training dp4 ep2",
     changed(module, "own_part", lambda part: (part[0], (0,) * len(part[1])))),
    "experts with sequence shards": (28, "parts of gradients",
     instead(TensorParallel, "of_experts", property(with_sequence_shards))),
    "views of equal meshes are shared": (29, "views of the mesh", views_of_equal_meshes_are_shared),
    "experts stay on the device": (31, "offloaded states",
     wrapped(FSDPParamGroup, "__init__", experts_stay_on_the_device)),
    "weight gradients after the reduction": (32, "training pp2 dp2 ep2",
     instead(zero, "take_weight_gradients", lambda part: None)),
    "validation of own samples alone": (34, "rounds of validation",
     wrapped(training_step, "_slice", lambda right: lambda *args: right(*args)[: max(0, args[3] - args[1])])),
    "views are not counted": (35, "collectives by axis", instead(counting, "exchanging_ranks", lambda layout: None)),
    "dropout of the own length": (37, "training cp2 tp2 ep2", wrapped(dropout, "philox_key", of_half_the_length)),
    "copies of experts without data parallelism": (41, "training tp4 ep2",
     instead(setup, "uses_fsdp", lambda layout, dtype: layout.copies > 1)),
    # right where one rank has all experts, and where nobody has the same ones
    "the norm of experts by shards alone": (42, "training tp2 dp2 ep4", parts_by("eshard")),
    "the norm of experts by their ranks alone": (42, "training tp2 dp2 ep1", parts_by("ep")),
}  # fmt: skip


def differences(name: str, expected: Any, mistakes: Iterable[str | None]) -> list[bool]:
    """Whether a rank's results with each mistake differ from what is expected."""
    config, found = config_of(CHECKS[name].layout), []
    mesh = run_mesh(config, "cpu")
    for mistake in mistakes:
        with pytest.MonkeyPatch.context() as patch:
            if mistake is not None:
                TRAPS[mistake][2](patch)
            found.append(differ_on_a_rank(CHECKS[name].found(config, mesh), expected))
    return found


KEPT = [(name, False) for name in CHECKS if not name.startswith("training") or name[9:12] in ("cp2", "tp4")]
OTHERS = [case for case in product(CHECKS, (False, True)) if case not in KEPT]


@pytest.mark.parametrize(("name", "planted"), [*KEPT, *in_turns(OTHERS, first=0)])
def test_each_mistake_is_seen_and_nothing_else(ranks: WorkerPool, name: str, planted: bool) -> None:
    check, world = CHECKS[name], ranks(world_size(LAYOUTS[CHECKS[name].layout]))
    mistakes = [each for each, (_, by, _) in TRAPS.items() if by == name] if planted else [None]
    found, *_ = world.run(differences, name, check.expected(config_of(check.layout)), mistakes)
    assert found == [planted] * len(mistakes) != [], mistakes


def hooks_of_experts_do_not_run(patch: Patch) -> None:
    """Experts are units of FSDP2 by themselves, and their layer runs them as if they had no hooks."""
    before = setup.apply_zero

    def apply(part: GPT, units: Iterable[nn.Module], *more: Any) -> None:
        own = [each for each in part.modules() if isinstance(each, Experts)]
        before(part, [*own, *units], *more)

    patch.setattr(setup, "apply_zero", apply)
    patch.setattr(moe, "fusable", lambda *_: True)


# the trap's number, the layout, the mistake, words of what is said
REFUSED: list[tuple[int, str, Mistake, str]] = [
    (30, "dp4 ep2", hooks_of_experts_do_not_run, r"gate_up is \(4, 5, 16\) .* give \(4, 10, 16\)"),
    (33, "tp2 dp2 ep1", instead(  # experts are always cut by columns
        zero, "_placement", lambda parameter, shards: Shard(1) if parameter.ndim > 2 else None
    ), r"uneven sharding on dim 1: .*\[8, 10, 16\]"),
]  # fmt: skip


def refused(case: int) -> None:
    _, layout, mistake, words = REFUSED[case]
    config = config_of(layout)
    mesh = run_mesh(config, "cpu")
    with pytest.MonkeyPatch.context() as patch, pytest.raises((ValueError, RuntimeError), match=words):
        mistake(patch)
        steps(build_model(config, mesh), config)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_mistake_is_refused(ranks: WorkerPool, case: int) -> None:
    ranks(world_size(LAYOUTS[REFUSED[case][1]])).run(refused, case)


ASKED: list[tuple[int, Callable[[Layout], None], dict[str, Any], str]] = [
    (36, settings._check_shares_nothing, {"data_parallel_shard": 2, "expert_parallel": 2}, "wait for one another"),
    (40, Layout.check, {"data_parallel_replicate": 2, "exchange": "int8", "expert_parallel": 2}, "other replicas than"),
]


@pytest.mark.parametrize(("trap", "check", "fields", "words"), ASKED)
def test_what_could_not_be_right_is_refused(trap: int, check: Callable, fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(Layout(**fields))


ELSEWHERE: dict[int, str] = {
    # decided again in recomputation; rows in the order of their ranks, or of other weights; gradients without any row
    **dict.fromkeys((22, 23, 24, 26), "tests/ops/test_exchanged_experts.py::test_mutants_are_noticed"),
    27: "tests/ops/test_exchanged_experts.py::test_a_rank_that_leaves_an_exchange_out_ends_the_group",
    # two runs of sums in 16 bits have the same bits
    38: "tests/ops/test_context_attention.py::test_halves_of_samples_are_the_same_attention",
    # the balance of packed documents is logged
    39: "tests/training/test_separation.py::test_a_run_logs_the_balance_and_goes_on_with_the_same_bits",
    # sums that were compressed for the ranks of another layout
    40: "tests/lessons/test_compression.py::test_errors_are_for_the_layout_that_saved_them",
}


def test_every_trap_is_seen_here_or_elsewhere() -> None:
    here = {trap for trap, *_ in (*TRAPS.values(), *REFUSED, *ASKED)}
    assert {*range(20, 43)} <= here | ELSEWHERE.keys()
    for file, _, name in (each.partition("::") for each in ELSEWHERE.values()):
        body = ast.parse((Path(__file__).parents[2] / file).read_text()).body
        assert name in {each.name for each in body if isinstance(each, ast.FunctionDef)}, f"{file} has no {name}"
