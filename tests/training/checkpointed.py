"""Small models of runs in many layouts, for the tests of steps, checkpoints and exports.

Belongs here: building, spoiling and comparing them. The only assertion is that copies are equal.
"""

import torch
from torch.optim import Optimizer

from tpformer.config import RunConfig, build_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import local_part
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh

MODEL = {"vocab_size": 100, "seq_length": 12, "n_layers": 4, "hidden_size": 24, "n_heads": 4, "n_kv_heads": 2}
LAYOUTS: dict[str, dict] = {
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp2-zero3": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
    "v-schedule": {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2},
    "offload": {"data_parallel_shard": 2, "zero_stage": 3, "cpu_offload": True},
    "tp4": {"tensor_parallel": 4},
}


def run_config(parallel: dict, model: dict = MODEL, **train) -> RunConfig:
    train = {"dtype": "float32", "global_batch_size": 4, "device": "cpu", **train}
    return build_config({"model": model, "parallel": parallel, "train": train, "data": {"train": ["none"]}})


def world_size(parallel: dict) -> int:
    return build_config({"parallel": parallel}).parallel.world_size


def build(config: RunConfig) -> tuple[ModelParts, list[Optimizer]]:
    """This rank's parts of a run's model, and an optimizer for each."""
    model = build_model(config, run_mesh(config, "cpu"))
    return model, build_optimizers(model, config.optimizer)


def spoil(parts):
    """Fill parameters and buffers with NaN."""
    for tensor in (each for part in parts for each in part.state_dict().values()):
        local_part(tensor).fill_(float("nan"))


def everything(parts, optimizers):
    """Every whole parameter, buffer and optimizer state of the parts by name; copies of a name must be equal."""
    found: dict[str, torch.Tensor] = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, tensor in part.state_dict(keep_vars=True).items():
            state = {f"{name} {key}": value for key, value in optimizer.state.get(tensor, {}).items()}
            own = {key: full_tensor(value.detach()).clone() for key, value in ({name: tensor} | state).items()}
            found = merged([found, own])
    return found


def merged(results):
    """All tensors by name; what several results have must be equal."""
    found: dict[str, torch.Tensor] = {}
    for name, value in (pair for result in results for pair in result.items()):
        assert torch.equal(found.setdefault(name, value), value), name
    return found
