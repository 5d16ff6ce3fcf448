"""`python -m bench replicas`: DiLoCo in many layouts, beside replicas that one process trains one after the other.

Belongs here: which layouts, the oracle, and what must agree. A rank's training is that of layouts.py.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report, columns
from tpformer.config import Layout, RunConfig, check_config
from tpformer.parallel import exchange_named
from tpformer.training.data import build_stdlib
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch, train_step

from .layout_cases import BATCH, EIGHT, NEWER_MODEL, SIXTEEN, LayoutCase, case
from .layouts import FLOAT64, LR, RankRun, relative, train_all, write_short_documents

STEPS = 7  # two rounds of three, and a step of the third
ROUNDS, SHORT_ROUNDS = "diloco every=3", "diloco every=2 lr=0.5 momentum=0.5"
STREAMED = "diloco every=4 fragments=2 delay=1 mix=0.5"
EVERY_STEP = "diloco every=1 lr=1 momentum=0"
BOUND = 1e-9  # of losses, norms and parameters, in float64
EXACT = 1e-12  # of parameters that are those of synchronous training
SYNCHRONOUS = tuple(
    case(2, exchange=EVERY_STEP, optimizer="sgd", **layout)
    for layout in (
        *({"replicate": 2}, {"replicate": 2, "shard": 2, "zero": 3}, {"replicate": 2, "tp": 2, "model": NEWER_MODEL}),
        *({"replicate": 2, "pp": 2, "schedule": "ZBVZeroBubble"}, {"replicate": 2, "cp": 2, "model": NEWER_MODEL}),
        *({"replicate": 2, "tp": 2, "pp": 2, "shard": 1, "schedule": "1F1B"}, {"replicate": 4, "model": EIGHT}),
    )
)
CASES = (
    *(case(2, replicate=2, exchange=ROUNDS), case(1, replicate=4, exchange=ROUNDS, model=NEWER_MODEL)),
    *(case(2, replicate=2, shard=2, zero=stage, exchange=ROUNDS) for stage in (1, 2, 3)),
    *(case(2, replicate=2, tp=2, exchange=ROUNDS), case(2, replicate=2, tp=2, tied=False, exchange=SHORT_ROUNDS)),
    case(2, replicate=2, tp=2, sequence_parallel=False, exchange=ROUNDS, model=NEWER_MODEL),
    *(case(1, replicate=2, pp=2, schedule=name, exchange=ROUNDS) for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")),
    case(2, replicate=2, cp=2, exchange=ROUNDS, model=NEWER_MODEL),
    *(case(2, replicate=2, tp=2, exchange=ROUNDS, model=name) for name in (EIGHT, SIXTEEN)),
    case(2, replicate=2, shard=2, zero=3, cpu_offload=True, exchange=ROUNDS),
    *(case(2, replicate=2, optimizer=name, exchange=ROUNDS) for name in ("muon", "sgd")),
    case(2, replicate=2, shard=2, zero=3, optimizer="muon", exchange=ROUNDS),
    *(case(2, replicate=2, exchange=STREAMED), case(2, replicate=2, tp=2, exchange=STREAMED, model=SIXTEEN)),
    case(2, replicate=2, pp=2, schedule="ZBVZeroBubble", exchange=STREAMED),
    case(2, replicate=2, exchange="diloco every=4 fragments=4"),
    case(2, replicate=2, tp=2, pp=2, schedule="Interleaved1F1B", recompute="full", exchange=ROUNDS),
    case(1, replicate=2, tp=2, shard=2, zero=3, recompute="mlp", exchange=STREAMED),
    case(1, replicate=2, pp=2, shard=2, zero=3, exchange=SHORT_ROUNDS, documents=True),
)
QUICK = (SYNCHRONOUS[1], CASES[5], CASES[18])
NOTE = (
    f"Largest difference over {STEPS} steps and all ranks, in float64. loss, norm: relative. parameters: after the "
    "last step, which lies within a round, in units of max(|p|, learning rate). Above: SGD without clipping, a round "
    "for each step, the outer rate 1 and no momentum, beside one process on the global batch. Below: AdamW, or what "
    "is named, beside replicas in one process, each on its samples, with an outer step in plain torch."
)


class Whole(NamedTuple):
    """What replicas in one process had: losses and norms of each, and its parameters after the last step."""

    losses: list[list[float]]
    norms: list[list[float]]
    parameters: list[dict[str, np.ndarray]]


def config_of(one: LayoutCase, text: str) -> RunConfig:
    """The run of a case. Its SGD with a round for each step is that of synchronous training."""
    config = one.config(FLOAT64, text, STEPS, LR)
    if one in SYNCHRONOUS:
        plain = replace(config.optimizer, momentum=None, nesterov=False, clip_norm=0.0, weight_decay=0.0)
        config = replace(config, optimizer=plain)
    check_config(config)
    return config


def fragment_of(name: str, fragments: int) -> int:
    """Whose turn a tensor shares: that of its layer, or of the first one."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) % fragments if found else 0


class Oracle:
    """Replicas in one process, and their outer step in plain torch."""

    def __init__(self, config: RunConfig) -> None:
        self.n, options = config.parallel.data_parallel_replicate, exchange_named(config.parallel.exchange)
        share = BATCH // self.n
        train = replace(config.train, global_batch_size=share, microbatch_size=share)
        self.config = replace(config, parallel=Layout(), train=train)
        self.options: Any = options
        mesh = run_mesh(self.config, "cpu")
        self.models = [build_model(self.config, mesh) for _ in range(self.n)]
        self.optimizers = [build_optimizers(model, config.optimizer) for model in self.models]
        self.data = open_data(config).train
        self.values = [
            {name: x for name, x in model.parts[0].state_dict(keep_vars=True).items() if x.is_floating_point()}
            for model in self.models
        ]
        self.common = {name: x.detach().clone() for name, x in self.values[0].items()}
        self.momentum = {name: torch.zeros_like(x) for name, x in self.common.items()}
        self.travelling: dict[str, tuple[int, torch.Tensor]] = {}

    def run(self) -> Whole:
        """Train all replicas, step by step."""
        losses: list[list[float]] = [[] for _ in self.models]
        norms: list[list[float]] = [[] for _ in self.models]
        share, optimizer = BATCH // self.n, self.config.optimizer
        for step in range(1, STEPS + 1):
            for index, model in enumerate(self.models):
                first = (step - 1) * BATCH + index * share
                lr, rows = learning_rate(step, STEPS, optimizer), batch(self.data, first, share)
                result = train_step(
                    model, self.optimizers[index], rows, first_sample=first, lr=lr, clip_norm=optimizer.clip_norm
                )
                losses[index].append(float(result.loss))
                norms[index].append(float(result.norm))
            with torch.no_grad():
                self.meet(step)
        found = [{name: x.detach().numpy().copy() for name, x in each.items()} for each in self.values]
        return Whole(losses, norms, found)

    def meet(self, step: int) -> None:
        """What replicas do after a step."""
        options = self.options
        gap = options.every // options.fragments
        for name, common in self.common.items():
            if name in self.travelling and self.travelling[name][0] == step:
                self.take(name, self.travelling.pop(name)[1], options.mix)
            if step % gap == 0 and (step // gap - 1) % options.fragments == fragment_of(name, options.fragments):
                delta = torch.stack([common - each[name] for each in self.values]).mean(0)
                if options.delay:
                    self.travelling[name] = step + options.delay, delta
                else:
                    self.take(name, delta, 0.0)

    def take(self, name: str, delta: torch.Tensor, mix: float) -> None:
        """The outer step of a tensor in all replicas."""
        common, options = self.common[name], self.options
        if isinstance(self.values[0][name], torch.nn.Parameter):
            self.momentum[name] = options.momentum * self.momentum[name] + delta
            common -= options.lr * (delta + options.momentum * self.momentum[name])
        else:
            common -= delta
        for each in self.values:
            each[name].copy_((1 - mix) * common + mix * each[name])


def simulations(runs: Mapping[str, RunConfig]) -> Calls:
    """A process's calls: the oracle of each run."""
    return {name: partial(lambda config: Oracle(config).run(), config) for name, config in runs.items()}


def replica_of(rank: int, layout: Layout) -> int:
    """The replica of a rank, whose place among the axes pp, dp_replicate and the rest it is."""
    inside = layout.world_size // layout.pipeline_parallel // layout.data_parallel_replicate
    return rank // inside % layout.data_parallel_replicate


def row_of(one: LayoutCase, ranks: Sequence[RankRun], whole: Whole) -> dict[str, Any]:
    """How far a layout's ranks are from the replicas of one process."""
    row: dict[str, Any] = {"layout": str(one), "ranks": len(ranks), "loss": 0.0, "norm": 0.0, "parameters": 0.0}
    seen: list[set[str]] = [set() for _ in whole.parameters]
    for rank, found in enumerate(ranks):
        replica = replica_of(rank, one.layout)
        row["loss"] = max(row["loss"], relative([found.losses], whole.losses[replica]))
        row["norm"] = max(row["norm"], relative([found.norms], whole.norms[replica]))
        for name, value in found.parameters.items():
            expected = whole.parameters[replica][name]
            worst = np.abs(value - expected) / np.maximum(np.abs(expected), LR)
            row["parameters"] = max(row["parameters"], float(np.nan_to_num(worst, nan=np.inf).max(initial=0.0)))
        seen[replica] |= found.parameters.keys()
    if missing := {name for names in seen for name in whole.parameters[0].keys() - names}:
        raise ValueError(f"no rank has {', '.join(sorted(missing))}")
    return row | {"ok": all(row[key] <= BOUND for key in ("loss", "norm", "parameters"))}


def synchronous_row(one: LayoutCase, ranks: Sequence[RankRun], alone: RankRun) -> dict[str, Any]:
    """How far a layout with a round for each step is from one process on the global batch."""
    n = one.layout.data_parallel_replicate
    of_replicas = [[r.losses for rank, r in enumerate(ranks) if replica_of(rank, one.layout) == i][0] for i in range(n)]
    worst = 0.0
    for name, value in (each for found in ranks for each in found.parameters.items()):
        expected = alone.parameters[name]
        worst = max(worst, float((np.abs(value - expected) / np.maximum(np.abs(expected), LR)).max(initial=0.0)))
    loss = relative([np.mean(of_replicas, 0)], alone.losses)
    row = {"layout": str(one), "ranks": len(ranks), "loss": loss, "norm": None, "parameters": worst}
    return row | {"ok": worst <= EXACT and loss <= EXACT}


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout."""
    table = columns([title], ("ranks", "loss", "norm", "parameters", "ok"))
    for row in rows:
        figures = ["-" if row[key] is None else f"{row[key]:.1e}" for key in ("loss", "norm", "parameters")]
        table.add_row(row["layout"], str(row["ranks"]), *figures, "yes" if row["ok"] else "NO")
    return table


def run(options: argparse.Namespace) -> Report:
    """Train in every layout, and in one process."""
    cases = QUICK if options.quick else (*SYNCHRONOUS, *CASES)
    worlds: dict[int, dict[tuple[str, LayoutCase], RunConfig]] = {}
    oracles: dict[str, RunConfig] = {}
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        text, _ = build_stdlib(Path(directory), quiet=True)
        write_short_documents(text)
        for one in cases:
            config = config_of(one, str(text))
            worlds.setdefault(one.layout.world_size, {})[FLOAT64, one] = config
            if one in SYNCHRONOUS:
                alone = replace(config, parallel=Layout(), train=replace(config.train, microbatch_size=None))
                worlds.setdefault(1, {})["alone", one] = alone
            else:
                oracles[str(one)] = config
        trained = train_all(dict(sorted(worlds.items())))
        with Ranks(1, 1, simulations, oracles) as ranks:
            whole: dict[str, Whole] = {name: ranks.call(name)[0] for name in oracles}
    first = [
        synchronous_row(one, trained[FLOAT64, one], trained["alone", one][0]) for one in cases if one in SYNCHRONOUS
    ]
    rows = [row_of(one, trained[FLOAT64, one], whole[str(one)]) for one in cases if one not in SYNCHRONOUS]
    missed = [row["layout"] for row in (*first, *rows) if not row["ok"]]
    problem = f"{len(missed)} of {len(cases)} layouts are not the run of one process: {'; '.join(missed)}"
    tables = [table_of("a round for each step, SGD", first), table_of("rounds of several steps", rows)]
    content = {"bounds": [EXACT, BOUND], "rows": [*first, *rows]}
    return Report(tables, content, [problem] if missed else [], f"all {len(cases)} layouts are the run of one process")


BENCH = Bench(
    name="replicas",
    description="DiLoCo in many layouts against replicas in one process; on 8 CPU processes",
    options={"--quick": {"action": "store_true", "help": "few layouts, nothing written"}},
    run=run,
    draw=None,
    note=NOTE,
)
