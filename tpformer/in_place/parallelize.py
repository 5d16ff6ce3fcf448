"""parallelize: a model becomes tensor-parallel where it stands, by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tpformer.layers import ParallelModule, TensorParallel, explain

from .cut import APPLIED, Applied, cut, cut_what_was_added
from .exchanged import check_groups, find_exchanges
from .kinds import describe
from .measured import measuring
from .plan import is_measured, plan_of
from .ranks import check_model, share_out
from .regions import example_of, record
from .streams import Streams, streams_of
from .verify import verify

MOST_VERIFIED = 2**30  # bytes of parameters; parallelize(gpus=) verifies models up to this size
TOKENS = 4096  # for which parallelize(gpus=) explains how linears are carried


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
    tp:      the ranks, a 1-D DeviceMesh or a TensorParallel. One with `experts` lets the model's mixtures exchange
             tokens over these ranks (exchanged.exchange_tokens), with the samples of each; its own mesh may be None.
    plan:    "auto" (auto_plan), or {pattern: style} as auto_plan returns it.
    gpus:    instead of tp, the number of processes: joins them, chooses how many share one copy of the model
             (ranks.share_out), prints the plan and verifies the result; needs torchrun.
    sequence_parallel: between the linears of a layer each rank has its part of the sequence, where the layers allow it.
    transport: what carries the linears between the ranks (ops.choose_transport).
    example: arguments of one small forward, a tuple, or a dict of keyword arguments; transformers models need none.
    Communication: an all-reduce of 32 bytes per parameter and buffer, and those of make_column.
    Errors:  ValueError for an entry of a plan that is not right, for ranks that hold different values, for
             sequence_parallel where no layer allows it, for a model without mixtures that can exchange tokens, where
             they should, and for ranks of experts that are no whole groups of tensor-parallel ones. Of calls of the
             model, whichever of its modules is called: ValueError for ranks at different places of a program, for
             inputs or gradients of outputs that differ, for random numbers that ranks would draw for parts of the
             features, and for output_attentions.
    """
    before = _applied_to(model)
    ranks = tp if isinstance(tp, TensorParallel) else TensorParallel(tp, transport=transport)
    if ranks.precision != "16":
        raise ValueError(
            f"tp.precision={ranks.precision!r}: parallelize leaves modules that it does not cut as they are, so the "
            f"plan would decide what is quantised; leave precision out, or build the model of tpformer.layers"
        )
    ranks = replace(ranks, sequence_parallel=sequence_parallel or ranks.sequence_parallel)
    exchanges = ranks.experts is not None and ranks.of_experts.size > 1
    if before is None and gpus is None and (ranks.size > 1 or exchanges):
        _cut_whole(model, ranks, plan, example, exchanges)
    elif before is not None:
        if exchanges and before.tp.experts is None:
            raise ValueError(
                f"the model was made parallel without ranks that exchange tokens, and its experts cannot be moved to "
                f"{ranks.of_experts.size} ranks any more: give experts in the first call of parallelize"
            )
        cut_what_was_added(model, before)
    elif gpus is not None:
        if tp is not None:
            raise ValueError("tp and gpus both say which ranks there are: give one of them")
        _from_counts(model, gpus, plan, sequence_parallel, transport, example)
    return model


def _applied_to(model: nn.Module) -> Applied | None:
    """What parallelize did to a model, or to a part of it. ValueError for one of this library's layers."""
    before = next((vars(part)[APPLIED] for part in model.modules() if APPLIED in vars(part)), None)
    if before is None and any(isinstance(part, ParallelModule) for part in model.modules()):
        raise ValueError("the model has this library's layers, which lie on their ranks already")
    return before


def _cut_whole(
    model: nn.Module, ranks: TensorParallel, plan: str | Mapping[str, str], example: Any, exchanges: bool
) -> None:
    """parallelize of a model that is on no ranks yet. exchanges: whether its mixtures exchange tokens."""
    with measuring(model):
        if exchanges:
            check_groups(ranks)
        for each in dict.fromkeys((ranks, ranks.of_experts)):  # in one order on all ranks
            if each.size > 1:
                check_model(model, each)
        known = describe(model)
        needed = exchanges or not is_measured(plan, ranks.size, known)
        recording = record(model, known, example) if needed else None
        found = find_exchanges(model, recording, ranks.of_experts.size) if exchanges and recording else {}
        made = plan_of(model, plan, ranks.size, recording)
        made.leave_to_exchanges(found)
        streams = streams_of(model, made, known.given, example) if ranks.sharded else Streams()
    cut(model, made, ranks, streams, found)


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
        modes, args = {module: module.training for module in model.modules()}, example_of(model, example)
        try:
            report = verify(model.eval(), cut_copy, args[1] or args[0])
        finally:
            for module, training in modes.items():
                module.training = training
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
