"""Parameter servers: their messages beside the formula, and how long a step takes if one worker is slow.

Belongs here: counts, times, and whose turn it is. The servers are in tpformer/lessons/parameter_server.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.ranks import Calls, Ranks
from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.distributed import record_collectives
from tpformer.lessons.algorithms import ALGORITHMS
from tpformer.lessons.arrivals import Arrivals
from tpformer.lessons.parameter_server import ParameterServer
from tpformer.parallel import Layout
from tpformer.training.model import summed_loss
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, check_run, run_mesh

RANKS = (2, 4, 8)
TIMED_RANKS, MICROBATCHES, TAKES, SLOWER = 4, 64, 0.06, 4  # seconds of a microbatch, and times as long on one worker
BARS = {"sync": (3.0, 4.5), "stale": (1.0, 1.5)}  # what a slow worker may multiply a step's time by
MODEL = {"vocab_size": 128, "seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 2}
Row = dict[str, Any]


class Waiting(ParameterServer):
    """Every microbatch waits as long, and on the last worker `slower` times as long."""

    slower = 1.0

    def _wait(self, microbatches: int) -> None:
        time.sleep(TAKES * microbatches * (self.slower if self.rank == self.ranks - 1 else 1.0))

    def own_gradients(self, batch: Tensor, first_sample: int) -> Tensor:
        self._wait(len(batch))
        return super().own_gradients(batch, first_sample)

    def microbatch_gradients(self, rows: Tensor, first_sample: int) -> tuple[Tensor, Tensor]:
        self._wait(len(rows))
        return super().microbatch_gradients(rows, first_sample)


def settings(server: str, ranks: int) -> RunConfig:
    """A run whose step is MICROBATCHES samples. server: of BARS."""
    config = RunConfig(
        model=ModelSection(**MODEL),
        data=DataSection(train=("unused",)),
        parallel=Layout(data_parallel_replicate=ranks, exchange=f"{server}_server"),
        optimizer=OptimizerSection(name="sgd", lr=0.01),
        train=TrainSection(global_batch_size=MICROBATCHES, microbatch_size=1, device="cpu", dtype="float32"),
    )
    check_run(config)
    return config


def rank_calls(ranks: int, repeats: int) -> Calls:
    """A rank's step of each server: its messages, and its seconds without and with a slow worker."""

    def take(server: str, slower: float, steps: int) -> tuple[list[int], float]:
        """(bytes of each message, seconds) of the fastest of some steps."""
        config = settings(server, ranks)
        model = build_model(config, run_mesh(config, "cpu"))
        waiting = Waiting(model, build_optimizers(model, config.optimizer), summed_loss)
        waiting.slower = slower
        found = []
        for _ in range(steps):
            first, share = model.own_samples(0, MICROBATCHES)
            rows = (torch.arange(first, first + share)[:, None] * 7 + torch.arange(17)) % 128
            dist.barrier()
            began = time.perf_counter()
            with record_collectives() as sent:
                waiting.step(rows, first_sample=first, lr=0.01, clip_norm=1.0)
            found.append(time.perf_counter() - began)
        return [nbytes for name, nbytes in sent if name == "send"], min(found)

    calls: dict[str, Any] = {"count": partial(take, "sync", 0.0, 1)}
    for server in BARS:
        calls[f"{server} even"] = partial(take, server, 1.0, repeats)
        calls[f"{server} slow"] = partial(take, server, float(SLOWER), repeats)
    return calls


def measure(quick: bool) -> Row:
    """The counts of the server that works at once, and the steps' seconds of both."""
    counts, times = [], []
    for size in (TIMED_RANKS,) if quick else RANKS:
        with Ranks(size, 1, rank_calls, size, 1 if quick else 3) as ranks:
            sent = [nbytes for nbytes, _ in ranks.call("count")]
            n = settings("sync", size).model.n_parameters
            cost = ALGORITHMS["parameter_server"](size, n)
            most = max(map(sum, sent)) / 4
            found = {"messages": sum(map(len, sent)), "values": sum(map(sum, sent)) / 4, "busiest": most}
            equal = found["messages"] == cost.messages and found["values"] == cost.values
            counts.append(
                {"ranks": size, "algorithm": "parameter_server", "n": n, "steps": cost.steps}
                | {name: [number, getattr(cost, name)] for name, number in found.items()}
                | {"ok": equal and cost.busiest <= most < 1.25 * cost.busiest}
            )
            if size == TIMED_RANKS:
                for server in BARS:
                    even, slow = (max(s for _, s in ranks.call(f"{server} {name}")) for name in ("even", "slow"))
                    times.append({"server": server, "even": round(even, 3), "slow": round(slow, 3)})
    return {"counts": counts, "times": times}


def problems(content: Row) -> list[str]:
    """Counts that are not the formula's, and slow workers that delay a step otherwise than they may."""
    found = [
        f"the server on {row['ranks']} ranks is not as its formula says" for row in content["counts"] if not row["ok"]
    ]
    for row in content["times"]:
        low, high = BARS[row["server"]]
        ratio = row["slow"] / row["even"]
        if not low <= ratio <= high:
            found.append(f"a slow worker makes a {row['server']} step {ratio:.2f} times as long, not {low} to {high}")
    return found


def time_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header, and a line for each server."""
    cells = [("server", "all as fast, s", "one slow, s", "ratio")]
    for row in rows:
        ratio = f"{row['slow'] / row['even']:.2f}"
        cells.append((f"`{row['server']}_server`", f"{row['even']:.2f}", f"{row['slow']:.2f}", ratio))
    return cells


def turns(server: str, slower: int = SLOWER) -> list[tuple[int, float, float]]:
    """(worker, begin, end) of each microbatch in a step of 24 by four workers, of which the last is slower, if nothing
    but computing takes time."""
    takes = [1.0, 1.0, 1.0, float(slower)]
    if server == "sync":
        return [(worker, n * takes[worker], (n + 1) * takes[worker]) for worker in range(4) for n in range(6)]
    arrivals, found = Arrivals(4, 24, 16), []
    ends = {worker: takes[worker] for worker in range(4)}
    while not arrivals.finished:
        worker = min(ends, key=lambda each: (ends[each], each))
        found.append((worker, ends[worker] - takes[worker], ends[worker]))
        if arrivals.take(worker) is None:
            del ends[worker]
        else:
            ends[worker] += takes[worker]
    return found
