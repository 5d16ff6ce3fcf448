"""parallelize: a model becomes tensor-parallel where it stands, by a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tpformer.layers import ParallelModule, TensorParallel, explain
from tpformer.torch_private import has_gradient_hooks, refuse_replicas

from .adapters import check_config, cut_adapters, follow_peft
from .alone import COLUMNS, EMBEDDING, EXPERTS, GATHERED, ROWS, SPLIT
from .guard import guard
from .linears import make_column, make_embedding, make_row
from .matrices import make_matrices
from .measured import unchanged
from .narrowed import Narrowed
from .plan import Plan, auto_plan, check_plan, check_shapes
from .ranks import check_equal, share_out
from .refusals import sample_alike
from .regions import example_of, is_adapted, join, pattern_of
from .replaced import REPLACED_BY
from .saving import save_from_all_ranks
from .sequence import SEQUENCE_DIM, shard_sequence
from .sequence_trial import Linears
from .siblings import share_inputs
from .streams import Streams, find_streams
from .summing import sum_gradients
from .tensors import globalize
from .verify import verify
from .ways import Cut

MOST_VERIFIED = 2**30  # bytes of parameters; parallelize(gpus=) verifies models up to this size
TOKENS = 4096  # for which parallelize(gpus=) explains how linears are carried
WRAPPED = (DistributedDataParallel, DataParallel, FSDPModule, FullyShardedDataParallel)
APPLIED = "_tpformer"  # the attribute of a model that says what was done to it

REPLICATED = (
    "DistributedDataParallel around a model that is cut over ranks would not average its gradients: make copies along "
    "a data-parallel axis by FSDP2's fully_shard(model, mesh=mesh['dp_shard'])"
)


@dataclass
class Applied:
    """What parallelize did to a model: its plan, the ranks that it lies on, and the mesh that these are an axis of."""

    plan: Plan
    tp: TensorParallel
    mesh: DeviceMesh | None = None


def parallelize(
    model: nn.Module,
    tp: TensorParallel | DeviceMesh | None = None,
    plan: str | Mapping[str, str] = "auto",
    *,
    gpus: int | None = None,
    sequence_parallel: bool = False,
    transport: str = "auto",
    example: Any = None,
) -> nn.Module:
    """Cut a model over tensor-parallel ranks, in place, and return it.

    Each rank calls it with the same model, then uses the model as before, on the same inputs as the others: results and
    gradients are those of one process. Modules, names and global shapes stay as they are. All parameters become
    GlobalTensors: DTensors, sharded where they are cut, else whole on every rank with equal gradients. Those mix with
    plain tensors. Call it before FSDP2, optimizers and torch.compile. On a model that is parallel already it cuts the
    LoRA adapters that have been added since.
    tp:      the ranks, a 1-D DeviceMesh or a TensorParallel.
    plan:    "auto" (auto_plan), or {pattern: style} as auto_plan returns it.
    gpus:    instead of tp, the number of processes: joins them, chooses how many share one copy of the model
             (ranks.share_out), prints the plan and verifies the result; needs torchrun.
    sequence_parallel: between the linears of a layer each rank has its part of the sequence, where the layers allow it.
    transport: what carries the linears between the ranks (ops.choose_transport).
    example: arguments of one small forward, a tuple, or a dict of keyword arguments; transformers models need none.
    Communication: an all-reduce of 16 bytes per parameter and buffer, and those of make_column.
    Errors:  ValueError for an entry of a plan that is not right, for ranks that hold different values, and for
             sequence_parallel where no layer allows it. Of calls of the model, whichever of its modules is called:
             ValueError for ranks at different places of a program, for inputs or gradients of outputs that differ, for
             random numbers that ranks would draw for parts of the features, and for output_attentions.
    """
    before = next((vars(part)[APPLIED] for part in model.modules() if APPLIED in vars(part)), None)
    if before is not None:
        for config in (getattr(model, "peft_config", None) or {}).values():
            check_config(config, before.tp)
        cut_adapters(model)
        check_equal(dict(model.named_parameters()), before.tp)
        globalize(model, before.tp.mesh)
        share_inputs(model)
        _guard(model, before.plan, before.tp, ())
        return model
    if any(isinstance(part, ParallelModule) for part in model.modules()):
        raise ValueError("the model has this library's layers, which lie on their ranks already")
    if gpus is not None:
        if tp is not None:
            raise ValueError("tp and gpus both say which ranks there are: give one of them")
        return _from_counts(model, gpus, plan, sequence_parallel, transport, example)
    ranks = tp if isinstance(tp, TensorParallel) else TensorParallel(tp, transport=transport)
    ranks = replace(ranks, sequence_parallel=sequence_parallel or ranks.sequence_parallel)
    if ranks.size == 1:
        return model
    _check_values(model, ranks)
    if isinstance(plan, Mapping):
        made = check_plan(plan, model, ranks.size, example)
    else:
        made = auto_plan(model, ranks.size, example=example)
    streams = _streams(model, made, example) if ranks.sharded else Streams()
    cut(model, made, ranks, streams)
    setattr(model, APPLIED, Applied(made, ranks, ranks.mesh))
    return model


def _from_counts(
    model: nn.Module, gpus: int, plan: str | Mapping[str, str], sequence_parallel: bool, transport: str, example: Any
) -> nn.Module:
    """parallelize for a number of processes. Rank 0 prints what is planned, how it is carried, and what was verified.

    Copies of the model along the axis "dp_shard" are made one by FSDP2, which averages their gradients. The model moves
    to the ranks' device.
    """
    mesh, made = share_out(model, gpus, plan, example)
    size, first = sum(x.nbytes for x in model.parameters()), dist.get_rank() == 0
    tp = TensorParallel(mesh["tp"], sequence_parallel, transport)

    def cut_copy(whole: nn.Module) -> nn.Module:
        return parallelize(whole, tp, made, example=example)

    verdict = f"not verified: verify copies the model twice, and it has more than {MOST_VERIFIED >> 20} MiB"
    if any(x.is_meta for x in model.parameters()):
        verdict = "not verified: the model is on meta, and has no values"
    elif size <= MOST_VERIFIED and tp.size > 1:
        training, args = model.training, example_of(model, example)
        report = verify(model.eval(), cut_copy, args[1] or args[0])
        model.train(training)
        report.check()
        verdict = f"verified: {report.sentence}"
    cut_copy(model).to(mesh.device_type)
    if tp.size < gpus:
        for block in [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]:
            if any(block.children()):
                fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    setattr(model, APPLIED, Applied(made, tp, mesh))
    carried = explain(model, TOKENS) if tp.size > 1 else ""
    if first:
        print(made, carried, verdict, sep="\n")
    return model


def _check_values(model: nn.Module, tp: TensorParallel) -> None:
    """ValueError if parameters have gradients, or if parameters or buffers differ between ranks."""
    check_shapes(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrapped = next((part for part in model.modules() if isinstance(part, WRAPPED)), None)
    if wrapped is not None:
        raise ValueError(
            f"a {type(wrapped).__name__} is data-parallel already: call parallelize first, and then FSDP2's "
            f"fully_shard on top"
        )
    graded = next((name for name, x in named.items() if x.grad is not None), None)
    if graded is not None:
        raise ValueError(f"{graded} has a gradient: call parallelize before the first backward, or zero_grad() first")
    hooked = next((name for name, x in model.named_parameters() if has_gradient_hooks(x)), None)
    if hooked is not None:
        raise ValueError(f"{hooked} has hooks for its gradient: call parallelize before they are registered")
    check_equal(named, tp)


def _streams(model: nn.Module, plan: Plan, example: Any) -> Streams:
    """The layers that may pass on sequence shards. Those that cannot are listed in plan.kept."""
    if any(is_adapted(module) for module in model.modules()):
        raise ValueError("sequence_parallel=True with LoRA's adapters is not supported: leave one of them out")
    named = [(name, plan.style(name)) for name, _ in model.named_modules()]
    styles = COLUMNS, ROWS, (*GATHERED, *SPLIT, *EMBEDDING, *EXPERTS)
    linears = Linears(*([name for name, style in named if style in some] for some in styles))
    with unchanged(model):
        streams = find_streams(model, linears, *example_of(model, example))
    for name, reason in streams.kept.items():
        plan.kept.setdefault(pattern_of(name, model), f"runs on the whole sequence: {reason}")
    return streams


def cut(model: nn.Module, plan: Plan, tp: TensorParallel, streams: Streams) -> None:
    """Do to a model what the plan says."""
    cuts: dict[nn.Module, Cut] = {}
    seen: dict[nn.Module, dict[str, int | None]] = {}
    for region, way in plan.regions.values():
        root = model.get_submodule(region.root)
        for holder, changes in way.attributes.items():
            for name, value in changes.items():
                setattr(root.get_submodule(holder), name, value)
        cuts |= {root.get_submodule(name): found for name, found in way.cuts.items()}
        for name, own in way.seen_by_rank().items():
            if join(region.root, name) in plan.outside:  # others read it, such as the holder of a ParameterDict
                seen.setdefault(root, {}).update({join(name, key): dim for key, dim in own.items()})
            else:
                seen.setdefault(root.get_submodule(name), {}).update(own)
    on_shards = streams.linears()
    for name, module in list(model.named_modules()):
        style = plan.style(name)
        base = module.base_layer if is_adapted(module) else module
        dim = SEQUENCE_DIM if name in on_shards else None
        if style in (*COLUMNS, *GATHERED):
            found = cuts.get(module)
            rows = None if found is None or found.is_even(tp.size) else found.rows(tp.rank, tp.size)
            make_column(base, tp, rows=rows, gather_output=style in GATHERED, sequence_dim=dim)
        elif style in (*ROWS, *SPLIT):
            make_row(base, tp, split_input=style in SPLIT, sequence_dim=dim)
        elif style in EMBEDDING:
            make_embedding(module, tp, derived=True)
    for module in model.modules():  # what else holds a parameter that was cut
        for name, parameter in module.named_parameters(recurse=False):
            if hasattr(parameter, REPLACED_BY):
                module.register_parameter(name, getattr(parameter, REPLACED_BY))
    for module, own in seen.items():
        sum_gradients(module, tp, own)
    for name, division in plan.divisions.items():
        make_matrices(model.get_submodule(name), division, tp)
    cut_adapters(model)
    globalize(model, tp.mesh)
    share_inputs(model)
    if streams.chains:
        shard_sequence(model, streams, tp)
    for region, way in plan.regions.values():
        for narrowed in Narrowed.of(region, way, tp.size):
            narrowed.attach(model)  # behind what gathers the module's input
    _guard(model, plan, tp, [name for chain in streams.chains for name in chain])


def _guard(model: nn.Module, plan: Plan, tp: TensorParallel, on_shards: Sequence[str]) -> None:
    """Make what is called on a cut model right on all ranks, or refused. on_shards: layers on sequence shards."""
    follow_peft()
    save_from_all_ranks(model, tp)
    refuse_replicas(model, REPLICATED)
    sample_alike(model)
    guard(model, tp, [*(region.root for region, _ in plan.regions.values()), *on_shards], bool(plan.regions))
