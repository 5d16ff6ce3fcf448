"""Runs of a small model on a few ranks, as a configuration describes them: its checks, and each rank's samples.

Belongs here: what several files of this folder build their runs with. No test logic.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tpformer.config import RunConfig, build_config, check_config
from tpformer.training.model import ModelParts

BATCH = 4


def run_config(model: Mapping, parallel: Mapping, microbatch_size: int = 1, **train: Any) -> RunConfig:
    section = {"global_batch_size": BATCH, "microbatch_size": microbatch_size, "dtype": "float64", "device": "cpu"}
    sections = {"model": dict(model), "parallel": dict(parallel), "train": section | train}
    config = build_config({**sections, "data": {"train": ["none"]}})
    check_config(config)
    return config


def own_batch(model: ModelParts, targets: float = 1.0) -> tuple[torch.Tensor, int]:
    """This rank's samples, of whose tokens this share are targets, and the number of the first one."""
    batch = torch.randint(60, (BATCH, 9), generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(BATCH, 9, generator=torch.Generator().manual_seed(1))
    share = BATCH // model.layout.data_parallel
    first = model.data_rank * share
    return torch.where(drawn < targets, batch, ~batch)[first : first + share], first
