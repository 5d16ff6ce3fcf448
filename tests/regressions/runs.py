"""What the tests of this folder compute of a small run: the gradients of one batch.

Belongs here: what several files of this folder build. No test logic.
"""

from collections.abc import Mapping
from typing import Any

import small_runs
import torch
from small_runs import built, taken_gradients

from tpformer.config import RunConfig
from tpformer.training.model import ModelParts

BATCH = 4
MODEL = {"vocab_size": 60, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 4}
LLAMA = {**MODEL, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}


def run_config(model: Mapping, parallel: Mapping, **train: Any) -> RunConfig:
    train = {"global_batch_size": BATCH, "microbatch_size": 1, "dtype": "float64"} | train
    return small_runs.run_config(dict(parallel), dict(model), **train)


def whole_batch(model: ModelParts, targets: float = 1.0) -> torch.Tensor:
    """Samples, of whose tokens this share are targets."""
    size = (BATCH, model.config.seq_length + 1)
    batch = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(1))
    return torch.where(drawn < targets, batch, ~batch)


def gradients(model: ModelParts, targets: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and this rank's parameters' whole gradients."""
    first, share = model.own_samples(0, BATCH)
    rows = whole_batch(model, targets)[first : first + share]
    loss = float(model.gradients(rows, first_sample=first))
    return loss, taken_gradients(model)


def of_run(model: Mapping, parallel: Mapping, train: Mapping) -> tuple[float, dict[str, torch.Tensor]]:
    return gradients(built(run_config(model, parallel, **train)))
