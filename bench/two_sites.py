"""`make two-sites`: two sites that a slow link joins, seconds of a step in rounds of DiLoCo beside the formula.

Belongs here: what is timed in which rounds. A site is a network namespace with one rank (harness/nodes.py), and its
link is limited by the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import nodes
from harness.bars import Bar, write_bars
from harness.runner import Bench, Report, WrongCall, columns
from tpformer.config import build_config
from tpformer.parallel.diloco import DiLoCo
from tpformer.parallel.exchange import exchange_named
from tpformer.planner.sites import link_of
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, join_ranks, run_mesh
from tpformer.training.step import train_step

MODEL = {"vocab_size": 257, "seq_length": 64, "n_layers": 4, "hidden_size": 256, "n_heads": 4}
SAMPLES = 4  # of a step, two on each site
ALONE = "diloco every=1000000"  # no round of it ends
TIMED = {  # parallel.exchange -> rounds, or steps where none ends
    **{ALONE: 30, "library": 20, "diloco every=1": 20, "diloco every=10": 4, "diloco every=100": 2},
    **{"diloco every=10 send=int8": 4, "diloco every=20 fragments=2 delay=5": 3},
}
NOTE = (
    "Seconds of a step on two sites of one machine, each with one rank and a GPT of {elements:,} parameters, joined by "
    "a link of {rate}. formula: a step without any exchange, plus what a step waits for: the bytes that a site sends "
    "in a round over the link, divided by the round's steps. MB: what the link carried from one site in a step, by the "
    "kernel's count, headers included."
)


def site(exchange: str, rounds: int) -> dict[str, float]:
    """A rank's steps: seconds of one, and bytes that it has sent for it."""
    parallel = {"data_parallel_replicate": 2, "exchange": exchange}
    train = {"global_batch_size": SAMPLES, "device": "cpu", "dtype": "float32"}
    config = build_config({"model": MODEL, "train": train, "parallel": parallel, "data": {"train": ["none"]}})
    model = build_model(config, run_mesh(config, "cpu"))
    optimizers, rows = build_optimizers(model, config.optimizer), torch.randint(257, (SAMPLES // 2, 65))

    def step(number: int) -> None:
        train_step(model, optimizers, rows, first_sample=SAMPLES * number, lr=1e-4, clip_norm=1.0)

    steps = rounds * (1 if exchange == ALONE else model.exchange.every)
    for number in range(2):  # kernels warm up, and replicas compare what they begin with
        step(number)
    model.exchange.finish()
    model.exchange.at(0)
    dist.barrier()
    interface, started = os.environ["GLOO_SOCKET_IFNAME"], time.perf_counter()
    before = nodes.sent_bytes(interface)
    for number in range(steps):
        step(number + 2)
    dist.barrier()
    seconds = (time.perf_counter() - started) / steps
    return {"seconds": seconds, "sent": (nodes.sent_bytes(interface) - before) / steps}


def formula(exchange: str, alone: float, elements: int, bandwidth: float) -> tuple[float, float]:
    """(seconds of a step, bytes that a site sends in it)."""
    found = exchange_named(exchange)
    if not isinstance(found, DiLoCo):
        return alone + 4 * elements / bandwidth, 4.0 * elements  # gradients in float32, over two replicas
    if exchange == ALONE:
        return alone, 0.0
    sent = found.sent_bytes(elements, 2)
    return alone + found.exposed_seconds(sent / bandwidth, alone), sent / found.every


def run(options: argparse.Namespace) -> Report:
    """Time each kind of rounds, in turn, on one pair of ranks."""
    try:
        link = link_of(options.rate, 0.0)
    except ValueError as error:
        raise WrongCall(str(error)) from None
    elements = build_config({"model": MODEL}).model.n_parameters
    with nodes.two_nodes(f"{round(8 * link.bandwidth)}bit") as found:
        words = [sys.executable, "-m", "bench.two_sites", *(["--quick"] if options.quick else [])]
        started = nodes.start_ranks(found, 2, words, {"OMP_NUM_THREADS": "1"})
        output, _ = started[0].communicate(timeout=1800)
        started[1].communicate(timeout=60)
    if started[0].returncode or started[1].returncode:
        raise RuntimeError(f"a site has failed:\n{output}")
    timed: dict[str, dict[str, float]] = json.loads(output.splitlines()[-1])
    alone = timed[ALONE]["seconds"]
    table = columns(["parallel.exchange"], ("s a step", "formula", "MB a step", "formula"))
    rows: list[dict[str, Any]] = []
    for exchange, each in timed.items():
        seconds, sent = formula(exchange, alone, elements, link.bandwidth)
        rows.append({"exchange": exchange, **each, "formula_seconds": seconds, "formula_sent": sent})
        cells = [f"{each['seconds']:.3f}", f"{seconds:.3f}", f"{each['sent'] / 1e6:.3f}", f"{sent / 1e6:.3f}"]
        table.add_row("no exchange" if exchange == ALONE else exchange, *cells)
    note = NOTE.format(elements=elements, rate=options.rate)
    return Report([table, note], {"rate": options.rate, "rows": rows}, [], "both sites trained")


def draw(path: Path) -> Path:
    """Seconds of a step, with a red line at the formula's."""
    found = json.loads(path.read_text())
    bars = [
        Bar(
            "no exchange" if row["exchange"] == ALONE else row["exchange"],
            "",
            {"a step": row["seconds"]},
            f"{row['seconds']:.3f}",
            row["formula_seconds"],
        )
        for row in found["rows"]
    ]
    note = f"Two sites, joined by a link of {found['rate']}: seconds of a step, and a red line at the formula's."
    return write_bars(path, note, "seconds", bars)


BENCH = Bench(
    name="two_sites",
    description="DiLoCo over a slow link between two network namespaces, beside the formula",
    options={
        "--rate": {"default": "1Gb/s", "help": "of the link, in each direction"},
        "--quick": {"action": "store_true", "help": "one round of each, nothing written"},
    },
    run=run,
    draw=draw,
    obstacle=lambda: nodes.obstacle("any"),
)

if __name__ == "__main__":  # a rank
    join_ranks("cpu")
    quick = "--quick" in sys.argv
    results = {exchange: site(exchange, 1 if quick else rounds) for exchange, rounds in TIMED.items()}
    print(json.dumps(results), flush=True)
    dist.destroy_process_group()
