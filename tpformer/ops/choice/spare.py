"""SMs that the fused kernels leave to the collectives of other groups (docs/kernels.md, rule 4)."""

import os

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpformer.distributed.groups import REGISTRY

NCCL_CTAS = 32  # SMs that a communicator of NCCL may hold if NCCL_MAX_CTAS is not set
FEWER_CTAS = 16  # with so many, collectives over NVLink lose little; between nodes fewer do


def spare_processors(group: ProcessGroup) -> int:
    """How many SMs a fused kernel of this group leaves free.

    A grid that waits on every SM leaves none to collectives of other groups, for which another rank may wait before it
    comes to this grid: a deadlock. So if there are other groups, some SMs stay free. A group of all ranks may have
    others beside it, too: those of experts.
    """
    alone = not dist.is_initialized() or group.size() == dist.get_world_size()
    return 0 if alone and not REGISTRY.beside else int(os.environ.get("NCCL_MAX_CTAS", NCCL_CTAS))
