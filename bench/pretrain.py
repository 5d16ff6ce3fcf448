"""How fast, in how much memory and to what loss do 300 real training steps go, in one process on one device?

Belongs here: which models, the loop, the row, what must hold.
"""

import argparse
import dataclasses
import gc
import math
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from harness.plot import draw_curves
from harness.runner import Bench, Report, columns
from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.distributed import build_mesh, close
from tpformer.kernels.cost import machine_for
from tpformer.models import GPTConfig, preset_config
from tpformer.planner.storages import Saved
from tpformer.training.data import build_stdlib, read_sidecar
from tpformer.training.graph import build_steps
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, default_dtype, join_ranks, open_data
from tpformer.training.step import batch
from tpformer.training.transfers import Fetched, to_device
from tpformer.words import dtype_name

from .profile import profile_line, profiled

STEPS, QUICK_STEPS = 300, 4
PROFILED = 2  # steps
WARM_UP = 20  # steps without a share in the speed: kernels compile, allocators fill, clocks settle
LAST = 20  # steps whose mean is the final loss
LEARNED = 0.8  # the final loss must be below this share of the best loss without context, the unigram entropy
NOTE = (
    f"tokens/s: median step after the first {WARM_UP}, from one step's end to the next one's. saved: what autograd "
    f"keeps of one forward with its loss. final loss: mean of the last {LAST} steps; it must be below {LEARNED:g} of "
    "the unigram entropy, the best loss that ignores context, all in nats per token."
)


Row = dict[str, Any]  # one model, as `pretrain` makes it


class Model(NamedTuple):
    """A model, samples per step, and its peak learning rate."""

    name: str
    config: GPTConfig
    samples: int
    lr: float


# on a GPU of 80 GB
GPT2 = Model("GPT-2 124M", preset_config("gpt2-124m"), 32, 6e-4)
LARGE_CONFIG = GPTConfig(vocab_size=50257, seq_length=2048, n_layers=24, hidden_size=2048, n_heads=16)
LARGE = Model("GPT 1.3B", LARGE_CONFIG, 8, 2e-4)
TINY_CONFIG = GPTConfig(vocab_size=257, seq_length=128, n_layers=4, hidden_size=128, n_heads=2)
TINY = Model("GPT tiny", TINY_CONFIG, 16, 2e-3)
MODELS = {"cuda": (GPT2, LARGE), "cpu": (TINY,)}


def run_config(model: Model, steps: int, dataset: Path, cuda_graph: str = "auto") -> RunConfig:
    return RunConfig(
        model=ModelSection(**dataclasses.asdict(model.config)),
        data=DataSection(train=(str(dataset),)),
        optimizer=OptimizerSection(lr=model.lr, warmup_steps=30),
        train=TrainSection(steps=steps, global_batch_size=model.samples, cuda_graph=cuda_graph),
    )


def saved_bytes(network: ModelParts, samples: Tensor) -> int:
    """What autograd keeps of one forward of a single part with its loss; parameters are left out."""
    (model,) = network.parts
    with network.computing():
        with Saved().recording(model) as saved:
            index = torch.arange(len(samples), device=samples.device)
            loss = model(samples[:, :-1], targets=samples[:, 1:], sample_index=index, step=1)
        total = saved.total()
        loss.backward()  # FSDP2 expects one after each forward
    model.zero_grad()
    return total


def peak_bytes(device: torch.device) -> tuple[int, str]:
    """The largest memory so far, and what it is of."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated"
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024), "ru_maxrss of the process"


def mfu(config: GPTConfig, tokens_per_second: float, device: torch.device) -> float | None:
    machine = machine_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if machine is None else config.flops_per_token * tokens_per_second / machine.peak_flops


class TimedRun(NamedTuple):
    """The loss and the seconds of every step, and what steps after them spent their time on, if that was asked."""

    losses: list[float]
    seconds: list[float]
    profile: dict[str, Any]


def train(model: Model, config: RunConfig, network: ModelParts, device: torch.device, profiles: bool) -> TimedRun:
    """A training run that writes no checkpoints and no logs.

    A step's loss is read when the next step is queued, so that a GPU has no pause between them.
    """
    data, steps = open_data(config).train, config.train.steps
    take_step = build_steps(config, device.type, network, build_optimizers(network, config.optimizer))

    def take(step: int) -> Fetched:
        first = (step - 1) * model.samples
        samples = to_device(batch(data, first, model.samples), device)
        rate = learning_rate(min(step, steps), steps, config.optimizer)
        options: dict = {"lr": rate, "clip_norm": config.optimizer.clip_norm}
        result = take_step(samples, first_sample=first, **options)
        return Fetched({"loss": result.loss})

    fetched: list[Fetched] = []
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        fetched.append(take(step))
        if step > 1:
            fetched[-2].read()
    losses = [each.read()["loss"] for each in fetched]
    ends = [begun, *(each.at for each in fetched)]
    profile = profiled(lambda: [take(steps + each).read() for each in range(PROFILED)], device) if profiles else {}
    return TimedRun(losses, [end - begin for begin, end in pairwise(ends)], profile)


def pretrain(
    model: Model, steps: int, dataset: Path, mesh: DeviceMesh, profiles: bool = False, cuda_graph: str = "auto"
) -> Row:
    """Train a model; return its row, with a profile if that is asked. mfu is None if the device's peak is unknown;
    peak_is says what peak_bytes is."""
    config = run_config(model, steps, dataset, cuda_graph)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    network = build_model(config, mesh)
    losses, seconds, profile = train(model, config, network, device, profiles)
    peak, of = peak_bytes(device)
    speed = model.samples * model.config.seq_length / median(seconds[min(WARM_UP, steps // 2) :])
    samples = batch(open_data(config).train, 0, model.samples).to(device)
    return {
        "model": model.name,
        "parameters": model.config.n_parameters,
        "dtype": dtype_name(default_dtype(config)),
        "samples_per_step": model.samples,
        "seq_length": model.config.seq_length,
        "steps": steps,
        "tokens_per_second": round(speed, 1),
        "mfu": mfu(model.config, speed, device),
        "peak_bytes": peak,
        "peak_is": of,
        "saved_bytes": saved_bytes(network, samples),
        "unigram_entropy": read_sidecar(dataset)["entropy_nats_per_token"],  # type: ignore[index]
        "first_loss": losses[0],
        "final_loss": mean(losses[-LAST:]),
        "losses": losses,
        **({"profile": profile} if profiles else {}),
    }


def problems(row: Row) -> list[str]:
    """Why a run is not a training: a loss that is not finite, or a final one that hardly any context explains."""
    if not all(map(math.isfinite, row["losses"])):
        return [f"{row['model']}: a loss is not finite"]
    final, entropy = row["final_loss"], row["unigram_entropy"]
    if final >= LEARNED * entropy:
        return [f"{row['model']}: final loss {final:.4f}, not below {LEARNED:g} of {entropy:.4f}, the unigram entropy"]
    return []


def result_table(rows: Sequence[Row]) -> Table:
    numbers = ("tokens/s", "MFU", "peak", "saved", "first loss", "final loss", "unigram entropy")
    table = columns(("model", "parameters", "dtype", "step"), numbers)
    for row in rows:
        table.add_row(
            *(row["model"], f"{row['parameters'] / 1e6:,.1f}M", row["dtype"]),
            *(f"{row['samples_per_step']} x {row['seq_length']}", f"{row['tokens_per_second']:,.0f}"),
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            *(f"{size / 2**20:,.0f} MiB" for size in (row["peak_bytes"], row["saved_bytes"])),
            *(f"{row[name]:.4f}" for name in ("first_loss", "final_loss", "unigram_entropy")),
        )
    return table


def run(options: argparse.Namespace) -> Report:
    """Train every model of this device, on the standard library's text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = QUICK_STEPS if options.quick else options.steps or STEPS
    rows: list[Row] = []
    join_ranks(device)
    mesh = build_mesh(device, tensor_parallel=1)
    try:
        with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
            dataset, _ = build_stdlib(Path(directory), quiet=True)
            for model in MODELS[device]:
                rows.append(pretrain(model, steps, dataset, mesh, options.profile, "off" if options.eager else "auto"))
                gc.collect()  # the model before is not in the next one's peak
    finally:
        close(mesh.get_group("tp"))
        dist.destroy_process_group()
    found = [] if steps < STEPS else [problem for row in rows for problem in problems(row)]
    outcome = "no loss is required of few steps" if steps < STEPS else "every final loss is as low as it must be"
    profiles = [f"{row['model']}: {profile_line(row['profile'])}" for row in rows if options.profile]
    return Report([result_table(rows), f"peak: {rows[0]['peak_is']}.", *profiles], {"rows": rows}, found, outcome)


BENCH = Bench(
    name="pretrain",
    description="300 training steps on real text: tokens/s, MFU, peak and saved bytes, losses; on one GPU, else a CPU",
    device=None,
    options={
        "--quick": {"action": "store_true", "help": f"{QUICK_STEPS} steps, nothing written"},
        "--steps": {"type": int, "help": f"so many in place of {STEPS}, nothing written"},
        "--eager": {"action": "store_true", "help": "without CUDA graphs, nothing written"},
        "--profile": {"action": "store_true", "help": "and what a step's kernels take, nothing written"},
    },
    run=run,
    draw=draw_curves,
    note=NOTE,
)
