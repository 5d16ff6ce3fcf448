"""A plan is done to a model: its linears, tables and matrices are cut over ranks where they stand.

Belongs here: the order of what is done, and what a model that was cut remembers of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer.layers import TensorParallel
from tpformer.torch_private import refuse_replicas

from .adapters import check_config, cut_adapters, follow_peft
from .alone import COLUMNS, EMBEDDING, GATHERED, ROWS, SPLIT
from .exchanged import Exchange, exchange_tokens, generate_together
from .guard import guard
from .linears import make_column, make_embedding, make_row
from .matrices import make_matrices
from .narrowed import Narrowed
from .plan import Plan
from .ranks import check_equal
from .refusals import sample_alike
from .regions import is_adapted, join
from .saving import save_from_all_ranks
from .sequence import SEQUENCE_DIM, shard_sequence
from .siblings import share_inputs
from .streams import Streams
from .summing import sum_gradients
from .tensors import REPLACED_BY, globalize
from .ways import Cut

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


def cut_what_was_added(model: nn.Module, before: Applied) -> None:
    """Cut the adapters that a model has got since it was cut. One rank has them whole."""
    if before.tp.size == 1:
        return
    for config in (getattr(model, "peft_config", None) or {}).values():
        check_config(config, before.tp)
    cut_adapters(model)
    check_equal(dict(model.named_parameters()), before.tp)
    globalize(model, before.tp.mesh)
    share_inputs(model)
    _guard(model, before.plan, before.tp, ())


def cut(model: nn.Module, plan: Plan, tp: TensorParallel, streams: Streams, exchanges: Mapping[str, Exchange]) -> None:
    """Do to a model what the plan says, and let mixtures exchange tokens. One rank has nothing else to do."""
    if tp.size > 1:
        _cut_over(model, plan, tp, streams)
    exchange_tokens(model, exchanges, tp)
    if tp.size > 1:
        _finish(model, plan, tp, streams)
    else:
        save_from_all_ranks(model, tp)
        refuse_replicas(model, REPLICATED)
    if exchanges:
        generate_together(model)
    setattr(model, APPLIED, Applied(plan, tp, tp.mesh))


def _cut_over(model: nn.Module, plan: Plan, tp: TensorParallel, streams: Streams) -> None:
    """Cut what the plan says over tensor-parallel ranks."""
    cuts: dict[nn.Module, Cut] = {}
    seen: dict[nn.Module, dict[str, int | None]] = {}
    for way in plan.regions.values():
        for holder, changes in way.attributes.items():
            for name, value in changes.items():
                setattr(model.get_submodule(holder), name, value)
        cuts |= {model.get_submodule(name): found for name, found in way.cuts.items()}
        for name, own in way.seen_by_rank().items():
            if name in plan.outside:  # others read it, such as the holder of a ParameterDict
                inside = name.removeprefix(way.root).removeprefix(".")
                seen.setdefault(model.get_submodule(way.root), {}).update({join(inside, key): own[key] for key in own})
            else:
                seen.setdefault(model.get_submodule(name), {}).update(own)
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


def _finish(model: nn.Module, plan: Plan, tp: TensorParallel, streams: Streams) -> None:
    """Cut what adapts linears, and do what wants all parameters and modules as they will be."""
    cut_adapters(model)
    globalize(model, tp.mesh)
    share_inputs(model)
    if streams.chains:
        shard_sequence(model, streams, tp)
    for way in plan.regions.values():
        for narrowed in Narrowed.of(way, tp.size):
            narrowed.attach(model)  # behind what gathers the module's input
    _guard(model, plan, tp, [name for chain in streams.chains for name in chain])


def _guard(model: nn.Module, plan: Plan, tp: TensorParallel, on_shards: Sequence[str]) -> None:
    """Make what is called on a cut model right on all ranks, or refused. on_shards: layers on sequence shards."""
    follow_peft()
    save_from_all_ranks(model, tp)
    refuse_replicas(model, REPLICATED)
    sample_alike(model)
    guard(model, tp, [*(way.root for way in plan.regions.values()), *on_shards], bool(plan.regions))
