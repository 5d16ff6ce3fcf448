"""What a stage's layers keep of a microbatch, one after the other, and the bytes that the backward of each needs.

Belongs here: a stage as a row of units, by formula: layers, or regions of several that are recomputed as one.
How units of several stages and microbatches add up to a rank's peak is in rank_memory.py. No tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from tpformer.config import LayerKeep, RunConfig, regions
from tpformer.layers.embedding import padded_vocab
from tpformer.models import GPTConfig
from tpformer.ops.offload import SMALLEST
from tpformer.parallel import split_stages

from .kept import Kept, kept_by_kind, packed_size
from .memory import layer_workspace
from .states import Elements, elements, exchanging_ranks


class Unit(NamedTuple):
    """One unit of a stage, in bytes of one microbatch.

    layers: which. kept: what waits on the device. moved: what waits in host memory; the last unit of a stage moves
    nothing, because its backward comes at once. working: what its backward holds while it runs, beside what was kept.
    elements: of its parameters. freed: of what it holds, what is gone before all gradients of a layer are there.
    """

    layers: range
    kept: float
    moved: float
    working: float
    elements: float
    freed: float = 0.0


def with_keep(config: RunConfig, keep: str) -> RunConfig:
    """The configuration with this text of parallel.keep, and nothing else that says what layers keep."""
    layout = dataclasses.replace(
        config.parallel,
        recompute="none",
        recompute_layers="",
        recompute_interval=1,
        pack_activations=False,
        pack_layers="",
        offload_activations=False,
        keep=keep,
    )
    return dataclasses.replace(config, parallel=layout)


@functools.lru_cache(maxsize=4096)
def stage_ranges(model: GPTConfig, by: str, n_stages: int) -> tuple[range, ...]:
    """The layers of each stage. by: parameters or time."""
    return tuple(split_stages(model.layer_costs(by), n_stages))


def again(kept: Kept, way: LayerKeep) -> float:
    """Bytes that the backward of a layer makes again: what the layer would have kept, and its input if that is
    packed."""
    if way.recompute == "none":
        return 0.0
    return sum(kept.storages("none")) - sum(kept.storages(way.recompute)) + (kept.stream if way.pack else 0.0)


def stage_units(
    config: RunConfig,
    stage: int,
    *,
    kept: Mapping[bool, Kept] | None = None,
    worst: bool = False,
) -> list[Unit]:
    """The units of a stage. kept: kept_by_kind's. worst: as there."""
    model, layout = config.model, config.parallel
    layers, of_kind = stage_ranges(model, layout.pipeline_split, layout.n_stages)[stage], kept or kept_by_kind(config)
    ways, each_kept = layout.kept(model.n_layers), {layer: of_kind[model.has_experts(layer)] for layer in layers}
    first, sizes = regions(layers, ways, layout.recompute_interval), _sizes(config, layers)
    needed = {
        (experts, packs): layer_workspace(config, experts=experts, worst=worst, packs=packs)
        for experts, packs in {(model.has_experts(layer), ways[layer].pack) for layer in layers}
    }
    found: list[Unit] = []
    for _, some in itertools.groupby(layers, key=lambda layer: first.get(str(layer), layer)):
        unit = list(some)
        way, storages = ways[unit[0]], each_kept[unit[0]].storages(ways[unit[0]].recompute, ways[unit[0]].pack)
        if found == [] and stage > 0:
            storages[0] = each_kept[unit[0]].stream  # it is received in memory that the pipeline holds, not packed
        leaves = way.offload and unit[-1] < layers[-1]  # the last one's backward comes at once
        moved = sum(each for each in storages if each >= SMALLEST) if leaves else 0.0
        # a region keeps its first input, and what routers decided; its backward holds what all its layers would keep
        decided = sum(each_kept[layer].decided for layer in unit if ways[layer].recompute != "none")
        working = max(needed[model.has_experts(layer), ways[layer].pack] for layer in unit) + again(
            each_kept[unit[0]], way
        )
        working += sum(sum(each_kept[layer].storages("none")) for layer in unit[1:])
        of_unit = sum(sizes[layer - layers.start] for layer in unit)
        # what the activation has read ends with the MLP's second GEMM; experts are one operation
        packed = way.pack and way.recompute == "none"
        read = () if model.has_experts(unit[-1]) else each_kept[unit[-1]].hidden
        freed = sum(packed_size(each) if packed else each for each in read)
        some_layers, waits = range(unit[0], unit[-1] + 1), sum(storages) + decided - moved
        found.append(Unit(some_layers, waits, moved, working, of_unit, freed))
    return found


def _sizes(config: RunConfig, layers: range) -> tuple[float, ...]:
    layout = config.parallel
    return elements(config.model, [layers], layout.tensor_parallel, exchanging_ranks(layout)).sizes


def head_elements(model: GPTConfig, size: Elements, tp: int) -> float:
    """Elements of the last norm and the table behind it, of which the last of a rank's stages makes gradients first."""
    table = padded_vocab(model.vocab_size or 0, model.vocab_multiple) * model.hidden_size / tp
    return min(size.rest, table + model.hidden_size * (2 if model.norm == "layernorm" else 1))


def head_kept(config: RunConfig, stream: float, item: int) -> float:
    """Bytes that the fused loss keeps: its input, the gradients of this and of the table, the norm's statistics.

    In float16 the table's gradient waits in float32.
    """
    model, layout = config.model, config.parallel
    rows = -(-padded_vocab(model.vocab_size or 0, model.vocab_multiple) // layout.tensor_parallel)
    table = rows * model.hidden_size * (4 if config.train.dtype == "float16" else item)
    statistics = stream / model.hidden_size / item * max(4, item) * (2 if model.norm == "layernorm" else 1)
    return 2 * stream + table + statistics
