"""What a step communicates and multiplies: collectives with their bytes, messages between pipeline ranks, GEMM FLOPs.

Belongs here: the configuration of a counted step, and the counting on one rank. Nothing about what should come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tpformer.config import RunConfig, build_config, check_config
from tpformer.distributed.collectives import record_collectives
from tpformer.planner.counting import SEND, CollectiveCounter

LAYERS, DATA, SENDS, GEMMS = "layers", "data", "sends", "GEMM FLOPs"
_ATEN = torch.ops.aten
GEMM_OPERANDS = {  # the position of the left operand among each product's arguments
    **dict.fromkeys((_ATEN.mm, _ATEN.bmm), 0),
    **dict.fromkeys((_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_), 1),
}


def run_config(parallel: Mapping[str, Any], dtype: str, model: Mapping[str, Any], microbatches: int = 4) -> RunConfig:
    """The configuration of a run with that many microbatches of one sample for every data-parallel rank."""
    share = parallel.get("data_parallel_shard", 1) * parallel.get("data_parallel_replicate", 1)
    batch = {"global_batch_size": share * microbatches, "microbatch_size": 1}
    train = {"steps": 2, "dtype": dtype, **batch}
    config = build_config(
        {"model": dict(model), "data": {"train": ["unused"]}, "parallel": dict(parallel), "train": train}
    )
    check_config(config)
    return config


class Gemms(TorchDispatchMode):
    """Adds up 2 M N K of every matrix product while it is the active mode; attention's own products are no GEMMs here.

    torch's FlopCounterMode leaves out products that are added in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = GEMM_OPERANDS.get(function.overloadpacket)
        if first is not None:
            a, b = args[first : first + 2]
            self.flops += 2 * a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))


class Call(NamedTuple):
    """of: LAYERS for collectives of tpformer.distributed, over the tp axis; DATA for those of FSDP2, and DTensor's
    all-reduce of partial gradients over tp before them; SENDS for the pipeline engine's messages; GEMMS, once for each
    FLOP. nbytes: of the full tensor."""

    of: str
    name: str = ""
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.of}, {self.name} of {self.nbytes} bytes" if self.name else self.of


StepCounts = Counter[Call]


@contextmanager
def count_step(mesh: DeviceMesh) -> Iterator[StepCounts]:
    """Counts what this rank does while the context is open; complete when it closes."""
    counts: StepCounts = Counter()
    with record_collectives() as calls, Gemms() as gemms, CollectiveCounter(mesh) as others:
        yield counts
    counts.update(Call(LAYERS, *call) for call in calls)
    for call, times in others.take().items():
        name = f"partial {call.operation}" if call.axis == "tp" else call.operation
        counts[Call(SENDS if name == SEND else DATA, name, call.nbytes)] += times
    counts[Call(GEMMS)] = gemms.flops


def by_name(counts: StepCounts, of: str) -> dict[str, int]:
    """How often each call of this kind was made, whatever its size."""
    numbers: Counter[str] = Counter()
    for call, times in counts.items():
        if call.of == of:
            numbers[call.name] += times
    return dict(sorted(numbers.items()))


def bytes_of(counts: StepCounts, of: str) -> int:
    """The bytes of all calls of this kind together."""
    return sum(call.nbytes * times for call, times in counts.items() if call.of == of)
