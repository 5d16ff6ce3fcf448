"""What ZeRO's all-gathers send where the weights of linears in FP8 travel in blocks: `parallel.zero_gather`.

Belongs here: bytes, seconds of passes, and memory of parallel/block_gather.py, by formula. All figures are predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from tpformer.config import RunConfig
from tpformer.config.zero_gather import Gathered, gathered_weights, gathers_blocks, in_whole_blocks
from tpformer.kernels.quantize.format import BLOCK
from tpformer.models import GPTConfig
from tpformer.parallel import Layout

from .devices import Device
from .roofline import stream_seconds

NUMBER = 1 + 1 / BLOCK**2  # bytes of a number of a weight in blocks, with its part of the exponent
PASS = NUMBER + 2  # bytes that are moved for each gathered number, which is read in blocks and written in 16 bits
LAUNCHES = 2  # for each weight: one quantises, one dequantises


class InBlocks(NamedTuple):
    """Elements of weights that are gathered in blocks. exchanged: of experts that exchange tokens."""

    others: float = 0.0
    exchanged: float = 0.0


def in_blocks(config: RunConfig, layers: Iterable[int]) -> InBlocks:
    """What ZeRO gathers in blocks for these layers, on one tensor- or expert-parallel rank."""
    if not gathers_blocks(config.parallel, config.train.precision):
        return InBlocks()
    found = [_of_layer(config.model, config.parallel, config.model.has_experts(layer)) for layer in layers]
    return InBlocks(*map(sum, zip(*found, strict=True)))


@functools.lru_cache(maxsize=4096)
def _of_layer(model: GPTConfig, layout: Layout, experts: bool) -> InBlocks:
    weights = _weights(model, layout, experts)
    return InBlocks(*(float(sum(each.elements for each in weights if each.exchanged == kind)) for kind in (0, 1)))


def _weights(model: GPTConfig, layout: Layout, experts: bool) -> list[Gathered]:
    return [each for each in gathered_weights(model, layout, experts=experts) if in_whole_blocks(each.shard)]


def gather_launches(config: RunConfig, experts: bool) -> int:
    """Kernels that blocks add to the gather of a layer. experts: whether it has some."""
    if not gathers_blocks(config.parallel, config.train.precision):
        return 0
    return LAUNCHES * len(_weights(config.model, config.parallel, experts))


def gather_bytes(elements: float, blocks: float, itemsize: int) -> float:
    """Bytes of parameters that are gathered, `blocks` of whose elements travel in blocks."""
    return itemsize * (elements - blocks) + NUMBER * blocks


def pass_seconds(blocks: float, device: Device) -> float:
    """Seconds of the passes over so many gathered elements in blocks, behind the gather. Before it a rank's own are
    quantised, which are few."""
    return stream_seconds(PASS * blocks, device)


def received_bytes(config: RunConfig) -> float:
    """The most bytes that a gather in blocks needs beside its result: the blocks of a layer."""
    model, layout, most = config.model, config.parallel, 0.0
    if not gathers_blocks(layout, config.train.precision):
        return 0.0
    for experts in {model.has_experts(layer) for layer in range(model.n_layers)}:
        weights = _weights(model, layout, experts)
        for kind in (False, True):  # experts that exchange tokens have a gather of their own
            most = max(most, NUMBER * sum(each.elements for each in weights if each.exchanged == kind))
    return most
