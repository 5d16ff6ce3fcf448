"""What the host calls in a layer's part of a step, at one rank in bfloat16, where our kernels take what torch does not.

Belongs here: the count, in a process that believes that it has an H100. test_layer_calls.py judges it.
"""

import cProfile
import importlib
import json
import pstats
from pathlib import Path

import torch
import torch.distributed as dist
from driving import HEADS, compiling
from torch.testing._internal.distributed.fake_pg import FakeStore

from checks.driver.stub import Stub
from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.kernels import operands
from tpformer.ops import implementation
from tpformer.training import setup
from tpformer.training.optimizer import build_optimizers
from tpformer.training.step import train_step

LAYERS = 2, 6
MODEL = {"vocab_size": 512, "seq_length": 64, "hidden_size": 128, "n_heads": 2}
PLANNED = 4  # steps, after which every launch has its plan


def step_calls(n_layers: int) -> tuple[int, int]:
    """Calls of Python and C functions in a step of so many layers, and those of functions of torch.distributed."""
    train = TrainSection(steps=10, global_batch_size=1, dtype="bfloat16")
    config = RunConfig(
        model=ModelSection(n_layers=n_layers, **MODEL), data=DataSection(train=("none",)), train=train,
        optimizer=OptimizerSection(lr=1e-4),
    )  # fmt: skip
    model = setup.build_model(config, setup.run_mesh(config, "cpu"))
    optimizers, batch = build_optimizers(model, config.optimizer), torch.arange(65)[None]
    for _ in range(PLANNED):
        train_step(model, optimizers, batch, first_sample=0, lr=1e-4, clip_norm=1.0)
    with cProfile.Profile() as profile:
        train_step(model, optimizers, batch, first_sample=0, lr=1e-4, clip_norm=1.0)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    of_file = [(path, numbers[1]) for (path, *_), numbers in stats.items()]
    return sum(n for _, n in of_file), sum(n for path, n in of_file if "/torch/distributed/" in path)


def count(driver: Path) -> None:
    """Print what a layer adds to both."""
    _stub, operands.readable = Stub(driver, 90, quiet=True), lambda _: False
    implementation._module = lambda op, _: importlib.import_module(f"tpformer.kernels.{op}.kernel")
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    with compiling(driver.parent / "cache", HEADS):
        few, many = map(step_calls, LAYERS)
    print(json.dumps([(b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(few, many, strict=True)]))
