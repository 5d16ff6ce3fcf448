"""The layouts that `python -m bench layouts --muon` trains in by Muon, and the bytes that its matrices travel in them.

Belongs here: which layouts, counting what is sent, and the formula of that. How they are trained is in layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import RunConfig
from tpformer.distributed.mesh import AXES
from tpformer.models import GPT
from tpformer.parallel import whole_matrices
from tpformer.training.muon import hidden_matrices

from .layout_cases import EIGHT, NEWER_MODEL, SIXTEEN, LayoutCase
from .layout_cases import case as any_case

case = partial(any_case, optimizer="muon")
MUON_CASES: tuple[LayoutCase, ...] = (
    # one process
    *(case(4), case(2, model=SIXTEEN, recompute="full"), case(4, cpu_offload=True)),
    # one axis of two
    *(case(tp=2), case(2, tp=2, sequence_parallel=False, model=NEWER_MODEL), case(2, tp=2, tied=False)),
    *(case(2, replicate=2), case(2, shard=2, zero=1), case(1, shard=2, zero=2), case(2, shard=2, zero=3)),
    *(case(2, pp=2, schedule="1F1B"), case(2, pp=2, schedule="ZBVZeroBubble"), case(2, pp=2, schedule="DualPipeV")),
    *(case(2, tp=2, model=EIGHT), case(2, shard=2, zero=3, model=SIXTEEN), case(2, replicate=2, model=EIGHT)),
    *(case(cp=2, model=NEWER_MODEL), case(2, cp=2, zero=0), case(2, shard=2, zero=3, cpu_offload=True)),
    *(case(2, shard=2, zero=3, ep=2, model=SIXTEEN), case(2, tp=2, ep=2, model=EIGHT)),
    # four ranks
    *(case(tp=4), case(2, tp=4, sequence_parallel=False, model=NEWER_MODEL), case(2, shard=4, zero=3)),
    *(case(2, tp=2, shard=2, zero=stage) for stage in (1, 2, 3)),
    *(case(1, replicate=2, shard=2, zero=stage) for stage in (1, 3)),
    *(case(1, replicate=2, shard=2, zero=2, exchange="ring"), case(1, replicate=4, model=NEWER_MODEL)),
    *(case(2, tp=2, pp=2, schedule="ZBVZeroBubble"), case(1, tp=2, pp=2, schedule="DualPipeV", model=EIGHT)),
    *(case(2, pp=2, shard=2, zero=3), case(2, pp=2, shard=2, zero=2, schedule="Interleaved1F1B")),
    *(case(2, tp=2, shard=2, zero=3, model=NEWER_MODEL), case(2, tp=2, shard=2, zero=3, model=SIXTEEN)),
    *(case(2, cp=2, tp=2, model=NEWER_MODEL), case(2, cp=2, shard=2, zero=3), case(2, cp=2, replicate=2, zero=0)),
    *(case(1, shard=4, zero=3, ep=2, model=SIXTEEN), case(1, replicate=2, shard=2, zero=3, ep=2, model=SIXTEEN)),
    *(case(2, shard=2, tp=2, ep=4, zero=3, model=SIXTEEN), case(2, cp=2, tp=2, ep=4, model=SIXTEEN)),
    case(1, shard=4, zero=3, cpu_offload=True, ep=2, model=SIXTEEN),
    # eight ranks
    *(case(2, tp=2, pp=2, shard=2, zero=3, recompute="full"), case(1, tp=2, replicate=2, shard=2, zero=3)),
    *(case(1, pp=2, tp=2, shard=2, ep=4, schedule="DualPipeV", model=SIXTEEN), case(2, tp=4, shard=2, zero=3)),
    case(1, cp=2, tp=2, shard=2, ep=8, zero=3, recompute="full", model=SIXTEEN),
    case(1, pp=2, cp=2, shard=2, ep=2, schedule="ZBVZeroBubble", model=SIXTEEN),
)
BFLOAT16_MUON_CASES = (case(2, tp=2, shard=2, zero=3), case(2, shard=2, zero=3, ep=2, model=SIXTEEN))
QUICK_MUON_CASES = (case(2, tp=2, shard=2, zero=3), case(2, shard=2, zero=3, ep=2, model=SIXTEEN))

Sent = dict[str, int]
"""Elements that ranks send, by the outermost axis on which sender and receiver differ."""


@contextmanager
def counting(mesh: DeviceMesh) -> Iterator[Sent]:
    """Within, what this rank sends of Muon's matrices is counted."""
    sent: Sent = {}
    start, places = whole_matrices.start_all_to_all, mesh.mesh

    def counted(x: torch.Tensor, group: dist.ProcessGroup, sizes: list[int], received: list[int]) -> Any:
        own = (places == dist.get_rank()).nonzero()[0]
        for rank, elements in zip(dist.get_process_group_ranks(group), sizes, strict=True):
            differs = (own != (places == rank).nonzero()[0]).tolist()
            if any(differs) and elements:
                axis = AXES[differs.index(True)]
                sent[axis] = sent.get(axis, 0) + elements
        return start(x, group, sizes, received)

    with mock.patch.object(whole_matrices, "start_all_to_all", counted):
        yield sent


def formula(config: RunConfig) -> dict[str, int] | None:
    """Elements that all ranks together send in a step: 2 E (S - 1) / S within each of R replicas' sum, where S ranks
    hold E elements once, and E (R - 1) over dp_replicate. None where ranks hold copies of some matrices, or whole ones.

    Of each rank that is 2 (E / P) (P - 1) / P without replicas, in elements.
    """
    model, layout = config.model, config.parallel
    tp, replicas = layout.tensor_parallel, layout.data_parallel_replicate
    holders = tp * layout.shards
    if model.n_experts is not None or model.kv_heads % tp or layout.replicas != replicas:
        return None
    # where the replicas' sum is no axis of FSDP2's, each replica computes for itself
    copies, over = (1, replicas - 1) if layout.exchange == "library" else (replicas, 0)
    part = GPT(model.architecture, device="meta")
    named = dict(part.named_parameters())
    elements = sum(named[name].numel() for name in hidden_matrices(part))
    return {"within": copies * 2 * elements * (holders - 1) // holders, "dp_replicate": over * elements}


def all_sent(ranks: Sequence[Sent], steps: int) -> dict[str, int]:
    """What all ranks together send in a step, over dp_replicate and within replicas."""
    total = {axis: sum(sent.get(axis, 0) for sent in ranks) for axis in AXES}
    over = total.pop("dp_replicate")
    return {"within": sum(total.values()) // steps, "dp_replicate": over // steps}
