"""Small models of runs in many layouts, for tests of their gradients, steps, checkpoints and exports.

Belongs here: building, stepping, spoiling and comparing them. The only assertion is that copies are equal.
"""

import torch
from torch.optim import Optimizer

from tpformer.config import RunConfig, build_config, check_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import local_part
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import StepResult, train_step

MODEL = {"vocab_size": 100, "seq_length": 12, "n_layers": 4, "hidden_size": 24, "n_heads": 4, "n_kv_heads": 2}
LAYOUTS: dict[str, dict] = {
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp2-zero3": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
    "v-schedule": {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2},
    "offload": {"data_parallel_shard": 2, "zero_stage": 3, "cpu_offload": True},
    "tp4": {"tensor_parallel": 4},
}


def run_config(parallel: dict, model: dict = MODEL, optimizer: dict | None = None, **train) -> RunConfig:
    sections = {"model": model, "parallel": parallel, "optimizer": optimizer or {}, "data": {"train": ["none"]}}
    train = {"dtype": "float32", "global_batch_size": 4, "device": "cpu", **train}
    config = build_config({**sections, "train": train})
    check_config(config)
    return config


def world_size(parallel: dict) -> int:
    return build_config({"parallel": parallel}).parallel.world_size


def build(config: RunConfig) -> tuple[ModelParts, list[Optimizer]]:
    """This rank's parts of a run's model, and an optimizer for each."""
    model = built(config)
    return model, build_optimizers(model, config.optimizer)


def built(config: RunConfig) -> ModelParts:
    return build_model(config, run_mesh(config, "cpu"))


def take_step(
    model: ModelParts, optimizers: list, rows: torch.Tensor, first: int = 0, lr: float = 1e-2, **options
) -> StepResult:
    """A step of a whole batch's rows, of which each rank takes its own. first: the number of its first sample."""
    own, share = model.own_samples(first, len(rows))
    given = {"first_sample": own, "lr": lr, "clip_norm": 1.0, **options}
    return train_step(model, optimizers, rows[own - first : own - first + share], **given)


def taken_gradients(model: ModelParts) -> dict[str, torch.Tensor]:
    """The whole gradients of this rank's parameters by name; then there are none any more."""
    named = [pair for part in model.parts for pair in part.named_parameters()]
    found = {name: full_tensor(parameter.grad).detach().clone() for name, parameter in named}
    for _, parameter in named:
        parameter.grad = None
    return found


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
