"""Where the ranks of a layout are: which share a node, which belong together on each axis, and what each axis sends.

Belongs here: arithmetic on a layout and its nodes. placement_pictures.py draws it; dry_run.py counts what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.config import FP8, RunConfig
from tpformer.distributed.mesh import AXES
from tpformer.kernels.quantize.format import NUMBER_BYTES
from tpformer.layers.embedding import padded_vocab
from tpformer.parallel import Layout
from tpformer.parallel.zero import uses_fsdp

from .counting import EXPERT_AXES, OF_OWNERS, SEND, named_axes
from .devices import Device, load_device
from .gathers import gather_bytes, in_blocks
from .memory import boundary_bytes, context_bytes, exchanged_rows, microbatch_rows, microbatch_tokens
from .muon import itemsize, sent_elements
from .states import Precision, exchanging_ranks, stage_elements
from .units import stage_ranges

# rows of a microbatch that tensor-parallel ranks gather or scatter for one layer, in forward and backward together. An
# all-reduce, without sequence parallelism, sends as much as one of each. docs/layouts.md has the collectives
TRANSFERS = {
    True: {"none": 10, "mlp": 11, "full": 13},
    False: {"none": 8, "mlp": 8, "full": 10},
}
# of these so many are gathers with sequence parallelism, which in FP8 send blocks
GATHERS = {"none": 6, "mlp": 7, "full": 8}
# of the transfers the MLP's, which experts have only if they are on the tensor-parallel ranks, or one is shared by all
# tokens
OF_MLP = {"none": 5, "mlp": 6, "full": 6}
# exchanges of rows for one layer, if ranks exchange tokens: out and back; gradients out and back, and tokens out again
# for the weights. A region sends them out once more, but nothing back
EXCHANGED = {"none": 5, "mlp": 6, "full": 6}
# numbers for each of a token's experts that a router sends: index and weight are gathered, the weight's gradient is
# scattered; without sequence parallelism that is an all-reduce. No region repeats them
ROUTED = {True: 3, False: 2}
OF_END = 2  # the same for the embedding, and for the head
# how often context-parallel ranks exchange the keys and values of whole samples for one layer: a gather in the forward,
# another and an all-to-all of their gradients in the backward. A layer that is recomputed gathers once more
KEYS_AND_VALUES = {"none": 3, "mlp": 3, "full": 4}


def rank_grid(layout: Layout) -> Tensor:
    """The ranks by their coordinates on the axes AXES, as in distributed.build_mesh."""
    sizes = (layout.pipeline_parallel, layout.data_parallel_replicate, layout.data_parallel_shard)
    return torch.arange(layout.world_size).view(*sizes, layout.context_parallel, layout.tensor_parallel)


def data_axes(layout: Layout) -> tuple[str, str]:
    """Over whose ranks FSDP2 adds up equal shards, and over whose it shares: the axes of distributed.data_mesh."""
    if layout.context_parallel == 1:
        return "dp_replicate", "dp_shard"
    several = {"dp_replicate": layout.data_parallel_replicate, "dp_shard": layout.data_parallel_shard, "cp": 2}
    found = [axis for axis, size in several.items() if size > 1]
    if layout.zero == 0:
        return named_axes(found), "dp_shard"
    return "dp_replicate", named_axes(axis for axis in found if axis != "dp_replicate")


def owners_axes(layout: Layout) -> str:
    """The axes over all of whose ranks a stage's matrices have owners, if Muon trains them; "" for one rank."""
    first = 1 if layout.exchange == type(layout).exchange else 2  # with a sum of its own each replica has owners
    sizes = zip(AXES[first:], rank_grid(layout).shape[first:], strict=True)
    return named_axes(axis for axis, size in sizes if size > 1)


def axis_names(layout: Layout) -> tuple[str, ...]:
    """AXES, among them data_axes and owners_axes, and EXPERT_AXES if there are some: what a layout's collectives are
    counted by."""
    found = (*AXES[:3], *data_axes(layout), *filter(None, [owners_axes(layout)]), *AXES[3:])
    return tuple(dict.fromkeys(found if exchanging_ranks(layout) is None else (*found, *EXPERT_AXES)))


def axis_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """The groups of ranks that communicate on each of axis_names, in order of their first rank."""
    grid, found = rank_grid(layout), {}
    experts = grid
    if exchanging_ranks(layout) is not None:
        sizes = layout.expert_replicas, layout.expert_shards, layout.expert_parallel or 1
        experts = grid.view(layout.pipeline_parallel, *sizes)
    for name in axis_names(layout):
        if name in EXPERT_AXES:
            found[name] = experts.movedim(1 + EXPERT_AXES.index(name), -1).flatten(0, -2).tolist()
            continue
        dims = [AXES.index(axis) for axis in name.split(" x ")]
        last = [*range(-len(dims), 0)]
        found[name] = grid.movedim(dims, last).flatten(-len(dims)).flatten(0, -2).tolist()
    return found


def sent_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """Bytes that each rank sends, in a ring or to every other one. nbytes: of the whole tensor, or of what is sent for
    "send" and OF_OWNERS."""
    share = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "receive": 0}
    return nbytes if operation in (SEND, *OF_OWNERS) else share[operation] * nbytes * (ranks - 1) / ranks


def axis_bytes(config: RunConfig, pipeline_rank: int = 0) -> dict[str, float]:
    """Bytes that a rank at this place of the pipeline sends on each of axis_names in a step. train.dtype must be set.

    Left out are a few numbers for each token or step: statistics of the loss, norms, partial gradients of vectors
    and of positions. A test compares them with what a dry run counts.
    """
    layout, m = config.parallel, config.n_microbatches
    stages = layout.stages_of(pipeline_rank)
    sent = {**dict.fromkeys(axis_names(layout), 0.0), **_data_parallel_bytes(config, pipeline_rank)}
    neighbours = [other for stage in stages for other in (stage - 1, stage + 1) if other not in stages]
    sent["pp"] = m * boundary_bytes(config) * sum(0 <= other < layout.n_stages for other in neighbours)
    ends = (0 in stages) + (layout.n_stages - 1 in stages)
    if config.model.tie_embeddings and ends == 1:  # both stages hold the table, and add up its gradients' shards
        sent["pp"] += sent_bytes("all_reduce", _table_bytes(config) / layout.shards, 2)
    model, tokens = config.model, microbatch_tokens(config)
    ranges = stage_ranges(model, layout.pipeline_split, layout.n_stages)
    ways, own = layout.kept(model.n_layers), [layer for stage in stages for layer in ranges[stage]]
    of_stages, again = [model.has_experts(layer) for layer in own], [ways[layer].recompute for layer in own]
    keys = sum(KEYS_AND_VALUES[each] for each in again) * context_bytes(config)
    sent["cp"] += m * sent_bytes("all_gather", keys, layout.context_parallel)
    transfers = sum(TRANSFERS[layout.sequence_parallel][each] for each in again) + ends * OF_END
    if config.train.precision == FP8 and layout.sequence_parallel:
        transfers -= sum(GATHERS[each] for each in again) * (1 - NUMBER_BYTES / Precision.of(config).compute.itemsize)
    routed = sum(of_stages) * ROUTED[layout.sequence_parallel] * model.experts_per_token * tokens
    precision = Precision.of(config)
    if (ep := exchanging_ranks(layout)) is not None:
        of_experts = [each for each, experts in zip(again, of_stages, strict=True) if experts]
        other = 0 if model.shared_expert_size else sum(OF_MLP[each] for each in of_experts)
        transfers, routed = transfers - other, 0
        sent["ep"] = m * sum(sent_bytes("all_to_all", exchanged_bytes(config, each), ep) for each in of_experts)
    whole = transfers * gathered_bytes(config) + routed * max(4, precision.compute.itemsize)
    sent["tp"] = m * sent_bytes("all_gather", whole, layout.tensor_parallel)
    # partial are gradients of routers' weights on sequence shards, and those of keys and values that ranks share, which
    # FP8 adds up before they are quantised, too
    shared = 2 * len(own) * model.kv_size * (model.kv_heads % layout.tensor_parallel > 0)
    if config.train.precision == FP8:
        added = shared * tokens * precision.compute.itemsize
        sent["tp"] += m * sent_bytes("all_reduce", added, layout.tensor_parallel)
    partial = sum(of_stages) * (model.n_experts or 0) * layout.sequence_parallel + shared
    times, dtype = (m, precision.compute) if layout.zero > 1 else (1, precision.reduce)
    sent["tp"] += times * sent_bytes("all_reduce", partial * model.hidden_size * dtype.itemsize, layout.tensor_parallel)
    if config.optimizer.name == "muon" and (axes := owners_axes(layout)):
        sent[axes] += itemsize(config) * sum(sum(sent_elements(config, ranges[stage])) for stage in stages)
    return sent


def exchanged_bytes(config: RunConfig, recompute: str) -> int:
    """Bytes of all exchanges of a layer for one microbatch: rows; of each of a token's experts its number, its weight
    and the weight's gradient; 16 bytes for each rank. With parts that stay on their rank. train.dtype must be set.
    recompute: the layer's."""
    model, item = config.model, Precision.of(config).compute.itemsize
    chosen = microbatch_rows(model, config.parallel, config.microbatch_size) * model.experts_per_token
    out = NUMBER_BYTES if config.train.precision == FP8 else item  # results come home in 16 bits, twice
    rows = exchanged_rows(config) * model.hidden_size
    return (
        round(((EXCHANGED[recompute] - 2) * out + 2 * item) * rows)
        + 3 * max(4, item) * chosen
        + 16 * (exchanging_ranks(config.parallel) or 1)
    )


def gathered_bytes(config: RunConfig) -> int:
    """Bytes of a microbatch's rows on all tensor-parallel ranks together. train.dtype must be set."""
    return microbatch_tokens(config) * config.model.hidden_size * Precision.of(config).compute.itemsize


def _table_bytes(config: RunConfig) -> float:
    table = padded_vocab(config.model.vocab_size or 0, config.model.vocab_multiple) * config.model.hidden_size
    return table / config.parallel.tensor_parallel * Precision.of(config).master.itemsize


def _data_parallel_bytes(config: RunConfig, pipeline_rank: int) -> dict[str, float]:
    """Bytes sent on data_axes, and by experts that exchange tokens on theirs: docs/zero.md's table of collectives."""
    layout, m, precision = config.parallel, config.n_microbatches, Precision.of(config)
    sizes = stage_elements(config, pipeline_rank).values()
    layers, rest = sum(size.layers for size in sizes), sum(size.rest for size in sizes)
    exchanged = sum(size.exchanged for size in sizes)
    if not uses_fsdp(layout, precision.compute):
        return {}
    ranges = stage_ranges(config.model, layout.pipeline_split, layout.n_stages)
    blocks = in_blocks(config, [layer for stage in layout.stages_of(pipeline_rank) for layer in ranges[stage]])
    families = [(*data_axes(layout), layers - exchanged, rest, layout.replicas, layout.shards, blocks.others)]
    if exchanged:
        expert_ranks = layout.expert_replicas, layout.expert_shards
        families.append((*EXPERT_AXES[:2], exchanged, 0.0, *expert_ranks, blocks.exchanged))
    found = {}
    for replica, shard, of_layers, others, replicas, shards, of_blocks in families:
        reduced = (of_layers + others) * precision.reduce.itemsize
        times, of_root = (2 * m, m) if layout.zero == 3 else (1, 1)
        layer_bytes = gather_bytes(of_layers, of_blocks, precision.compute.itemsize)
        gathered = times * layer_bytes + of_root * others * precision.compute.itemsize
        reductions = m if layout.zero > 1 else 1
        found[replica] = sent_bytes("all_reduce", reduced / shards, replicas)
        found[shard] = sent_bytes("all_gather", gathered, shards)
        found[shard] += sent_bytes("reduce_scatter", reductions * reduced, shards)
    return found


class AxisPlacement(NamedTuple):
    """An axis of more than one rank. nodes: on how many a group is at most. sent: bytes of a rank in a step."""

    axis: str
    groups: Sequence[Sequence[int]]
    nodes: int
    sent: float

    def __str__(self) -> str:
        where = "in one node" if self.nodes == 1 else f"over {self.nodes} nodes"
        groups = f"{len(self.groups)} group{'s' if len(self.groups) > 1 else ''} of {len(self.groups[0])}"
        return f"{self.axis}: {groups} {where}, {self.sent / 1e9:.2f} GB"


def placement(config: RunConfig, devices_of_node: int, pipeline_rank: int = 0) -> list[AxisPlacement]:
    """The axes of more than one rank that send something, outermost first. Ranks fill one node after the other.

    pipeline_rank: whose bytes these are. ValueError unless devices_of_node is positive.
    """
    if devices_of_node < 1:
        raise ValueError(f"a node of {devices_of_node} devices holds no rank: give at least 1")
    groups, sent = axis_groups(config.parallel), axis_bytes(config, pipeline_rank)
    return [
        AxisPlacement(axis, of_axis, max(len({rank // devices_of_node for rank in g}) for g in of_axis), sent[axis])
        for axis, of_axis in groups.items()
        if len(of_axis[0]) > 1 and sent[axis]
    ]


class TensorParallelTime(NamedTuple):
    """Seconds that a layer takes for one microbatch: its GEMMs and attention, and its communication if exposed."""

    tensor_parallel: int
    nodes: int
    compute: float
    communication: float


def tensor_parallel_times(
    config: RunConfig, device: Device, sizes: Sequence[int] = (8, 16)
) -> list[TensorParallelTime]:
    """Prediction: a layer with different numbers of tensor-parallel ranks, which share nodes as far as they fit.

    A group that fills several nodes has as many rings as it has devices in a node, each through a network card of its
    own, so its bandwidth is the smaller of that and a node's. Latency is left out, and so is what is lost besides: the
    fused kernels need all ranks in one NVLink domain.
    """
    tokens = config.microbatch_size * config.model.seq_length
    moved = TRANSFERS[True]["none"] * gathered_bytes(config)
    _, node = device.inside
    found = []
    for size in sizes:
        nodes = -(-size // device.gpus_per_node)
        across = min(node, device.network * min(size, device.gpus_per_node))
        seconds = sent_bytes("all_gather", moved, size) / (node if nodes == 1 else across)
        compute = config.model.layer_flops_per_token(config.model.n_layers - 1) * tokens / size / device.machine.flops
        found.append(TensorParallelTime(size, nodes, compute, seconds))
    return found


def across_nodes_lines(config: RunConfig) -> Iterator[str]:
    """What tensor parallelism over two nodes costs, in words, for two kinds of GPUs."""
    for device in map(load_device, ("a100-80", "h100")):
        for each in tensor_parallel_times(config, device):
            where = "one node" if each.nodes == 1 else f"{each.nodes} nodes"
            share = each.communication / each.compute
            yield (
                f"{device.machine.name}, tp {each.tensor_parallel} on {where}: "
                f"compute {each.compute * 1e3:.2f} ms a layer, "
                f"communication {each.communication * 1e3:.2f} ms, {share:.0%} of it (predicted)"
            )


class Split(NamedTuple):
    """A way to share a model and its batch among ranks. sizes: of its axes, outer to inner.

    weights, data: the axes along which each is cut; along the others it is repeated.
    """

    name: str
    sizes: Mapping[str, int]
    weights: tuple[str, ...]
    data: tuple[str, ...]

    def pieces(self, axes: Sequence[str]) -> list[int]:
        """The index of each rank's piece, if something is cut along these axes."""
        index = torch.zeros([1] * len(self.sizes), dtype=torch.int64)
        for dim, (axis, size) in enumerate(self.sizes.items()):
            if axis in axes:
                shape = [size if other == dim else 1 for other in range(len(self.sizes))]
                index = index * size + torch.arange(size).view(shape)
        return index.expand(*self.sizes.values()).flatten().tolist()


# arXiv:2101.03961, figure 9. Experts are shared among the data-parallel ranks: each has other experts and other data
SPLITS = (
    Split("data parallel", {"data": 16}, (), ("data",)),
    Split("model parallel", {"tensor": 16}, ("tensor",), ()),
    Split("model + data parallel", {"data": 4, "tensor": 4}, ("tensor",), ("data",)),
    Split("expert + data parallel", {"data": 16}, ("data",), ("data",)),
    Split("expert + model + data parallel", {"data": 4, "tensor": 4}, ("data", "tensor"), ("data",)),
)
"""How 16 cores may share weights and data."""
