"""What data-parallel strategies do to the loss: at as many samples, and at as many bytes.

Belongs here: the strategies, their training, their curves and the gap of PipeDream at three depths.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from harness.ranks import Calls, Ranks
from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.distributed import record_collectives
from tpformer.parallel import Layout
from tpformer.training.data import build_stdlib
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, check_run, open_data, run_mesh
from tpformer.training.step import batch, evaluate, take_steps

from . import pipedream

RANKS, BATCH, STEPS, SEEDS = 4, 8, 200, (1, 2, 3)
QUICK_STEPS, QUICK_SEEDS = 8, (1,)
WINDOW = 10  # steps whose mean a point of a curve is
RATE = 4e-3
STRATEGIES = {  # and their parallel.exchange
    "synchronous": "ring",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "top-k 1 %": "topk share=0.01",
    "PowerSGD 4": "powersgd rank=4",
    "stale server": "stale_server arrivals=0,1,2,0,1,2,0,1,2,3",
}
PIPEDREAM, DEPTHS, FLUSHED = "PipeDream, 2 stages", (2, 4, 8), "1F1B with a flush"
SMALL = 64  # bytes: the loss, a norm and counts are not gradients
Row = dict[str, Any]


def settings(strategy: str, seed: int, data: tuple[str, str], steps: int) -> RunConfig:
    """A run of a byte GPT of 0.1M parameters.

    A stale server makes an update of each rank's two samples, 4 in a step, with half the rate: the square root rule.
    """
    exchange = STRATEGIES.get(strategy, "library")
    config = RunConfig(
        model=ModelSection(
            vocab_size=257, seq_length=64, n_layers=2, hidden_size=64, n_heads=4, norm="rmsnorm", position="rope",
            tie_embeddings=False,
        ),
        data=DataSection(train=(data[0],), valid=(data[1],)),
        parallel=Layout(data_parallel_replicate=RANKS, exchange=exchange),
        optimizer=OptimizerSection(lr=RATE / (2 if strategy == "stale server" else 1), warmup_steps=steps // 10),
        train=TrainSection(
            steps=steps, seed=seed, global_batch_size=BATCH, microbatch_size=BATCH // RANKS, device="cpu",
            dtype="float32",
        ),
    )  # fmt: skip
    check_run(config)
    return config


def sent_bytes(calls: Sequence[tuple[str, int]], ranks: int) -> float:
    """What a rank sends at least in its collectives: a P-th of the full tensor P - 1 times, twice to reduce all."""
    shares = {"send": 1.0, "all_gather": 1 - 1 / ranks, "all_to_all": 1 - 1 / ranks, "all_reduce": 2 - 2 / ranks}
    return sum(shares[name] * nbytes for name, nbytes in calls if nbytes > SMALL)


def train(config: RunConfig, mesh: DeviceMesh) -> Row:
    """A rank's part of a run: losses of all steps, its bytes in one, and the validation loss at the end."""
    model = build_model(config, mesh)
    optimizers = build_optimizers(model, config.optimizer)
    take_step, data, steps, losses, sent = take_steps(model, optimizers), open_data(config), config.train.steps, [], 0.0
    for step in range(1, steps + 1):
        first, share = model.own_samples((step - 1) * BATCH, BATCH)
        options = {"first_sample": first, "lr": learning_rate(step, steps, config.optimizer)}
        with record_collectives() as calls:
            losses.append(float(take_step(batch(data.train, first, share), clip_norm=1.0, **options).loss))
        sent = sent_bytes(calls, RANKS)
    return {"losses": losses, "bytes": sent, "valid": evaluate(model, data.valid, 64, torch.device("cpu"))}


def rank_calls(data: tuple[str, str], seeds: Sequence[int], steps: int) -> Calls:
    """A rank's runs, on one mesh."""
    torch.set_num_threads(1)
    mesh = run_mesh(settings("synchronous", 1, data, steps), "cpu")
    return {
        f"{strategy} {seed}": partial(train, settings(strategy, seed, data, steps), mesh)
        for strategy in STRATEGIES
        for seed in seeds
    }


def in_stages(config: RunConfig, stages: int) -> Row:
    """PipeDream's losses and validation loss with the samples of a run, in one process."""
    data, steps = open_data(config), config.train.steps

    def rows(number: int) -> Tensor:
        return batch(data.train, number * BATCH, BATCH)

    def rate(number: int) -> float:
        return learning_rate(number + 1, steps, config.optimizer)

    model, seed = config.model.architecture, config.train.seed
    found = pipedream.train(model, (1,) * stages, rows, steps, config.optimizer, rate, seed=seed)
    with torch.no_grad():
        samples = batch(data.valid[0], 0, 64)
        x, index = samples[:, :-1], torch.arange(64)
        for part in found.parts:
            part.train(False)
            x = part(x, **({"targets": samples[:, 1:]} if part is found.parts[-1] else {}), sample_index=index, step=0)
    between = 2 * (stages - 1) * BATCH * model.seq_length * model.hidden_size * 4
    return {
        "losses": found.losses, "bytes": between / RANKS, "valid": float(x) / samples[:, 1:].numel(),
        "versions": found.versions, "nbytes": found.nbytes,
    }  # fmt: skip


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each WINDOW steps."""
    return [round(mean(losses[first : first + WINDOW]), 4) for first in range(0, len(losses), WINDOW)]


def row_of(strategy: str, runs: Sequence[Row]) -> Row:
    """The row of a strategy, from a run of each seed. bytes: that all ranks send in a step."""
    curves = [smoothed(run["losses"]) for run in runs]
    return {
        "strategy": strategy,
        "bytes": runs[0]["bytes"],
        "valid": [round(run["valid"], 4) for run in runs],
        "curve": [round(mean(point), 4) for point in zip(*curves, strict=True)],
        "curves": curves,
    }


def depths(data: tuple[str, str], seeds: Sequence[int], steps: int) -> list[Row]:
    """A model of 8 layers in 1, 2, 4 and 8 stages. One stage is 1F1B with a flush: nothing is late."""
    rows = []
    for stages in (1, *DEPTHS):
        runs = []
        for seed in seeds:
            config = settings(PIPEDREAM, seed, data, steps)
            model = ModelSection(**{**vars(config.model), "n_layers": 8, "hidden_size": 32})
            runs.append(in_stages(RunConfig(**{**vars(config), "model": model}), stages))
        curves = [smoothed(run["losses"]) for run in runs]
        curve = [round(mean(point), 4) for point in zip(*curves, strict=True)]
        first, name = runs[0], FLUSHED if stages == 1 else f"PipeDream, {stages} stages"
        rows.append(
            {"strategy": name, "stages": stages, "versions": first["versions"], "nbytes": first["nbytes"]}
            | {"valid": [round(run["valid"], 4) for run in runs], "curve": curve}
        )
    return rows


def measure(quick: bool) -> Row:
    """Train everything."""
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if quick else (SEEDS, STEPS)
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        built = build_stdlib(Path(directory), quiet=True)
        data = str(built[0]), str(built[1])
        rows = []
        with Ranks(RANKS, 1, rank_calls, data, seeds, steps) as ranks:
            for strategy in STRATEGIES:
                found = [ranks.call(f"{strategy} {seed}") for seed in seeds]
                runs = [each[0] | {"bytes": sum(rank["bytes"] for rank in each)} for each in found]
                rows.append(row_of(strategy, runs))
                print(f"{strategy}: {mean(rows[-1]['valid']):.3f}", flush=True)
        runs = [in_stages(settings(PIPEDREAM, seed, data, steps), 2) for seed in seeds]
        rows.append(row_of(PIPEDREAM, [run | {"bytes": RANKS * run["bytes"]} for run in runs]))
        return {"strategies": rows, "depths": depths(data, seeds, steps), "steps": steps, "seeds": list(seeds)}


def problems(content: Row) -> list[str]:
    """Losses that are no numbers, and versions of weights that are not as the formula says."""
    found = [
        f"{row['strategy']} ends at no number" for row in content["strategies"] if not math.isfinite(sum(row["valid"]))
    ]
    for row in content["depths"]:
        if row["versions"] != [row["stages"] - stage for stage in range(row["stages"])]:
            found.append(f"{row['stages']} stages hold {row['versions']} versions")
    return found


def strategy_cells(content: Row) -> list[tuple[str, ...]]:
    """The header, and a line for each strategy."""
    cells = [("strategy", "MB sent in a step", "share", "loss, nats/byte", "of the seeds")]
    whole = content["strategies"][0]["bytes"]
    for row in content["strategies"]:
        seeds = ", ".join(f"{loss:.3f}" for loss in row["valid"])
        sent = f"{row['bytes'] / 1e6:.3f}", f"{row['bytes'] / whole:.3f}"
        cells.append((row["strategy"], *sent, f"{mean(row['valid']):.3f}", seeds))
    return cells


def depth_cells(content: Row) -> list[tuple[str, ...]]:
    """The header, and a line for each depth of PipeDream."""
    cells = [("pipeline", "versions of each stage", "MB of weights", "loss", "more than flushed")]
    flushed = mean(content["depths"][0]["valid"])
    for row in content["depths"]:
        loss = mean(row["valid"])
        held = ", ".join(map(str, row["versions"])), f"{sum(row['nbytes']) / 1e6:.2f}"
        cells.append((row["strategy"], *held, f"{loss:.3f}", f"{loss - flushed:+.3f}"))
    return cells


def write_csv(content: Row, path: Path) -> None:
    """A line for each point of each seed's curve."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("strategy", "seed", "step", "bytes", "loss"))
        for row in content["strategies"]:
            for seed, curve in zip(content["seeds"], row["curves"], strict=True):
                for index, loss in enumerate(curve, 1):
                    step = min(index * WINDOW, content["steps"])
                    writer.writerow((row["strategy"], seed, step, round(step * row["bytes"]), loss))
