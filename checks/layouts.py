"""`python -m bench layouts`: one training run in many layouts on 1 to 8 CPU processes, compared with one process.

Belongs here: which layouts, a rank's training, what must agree and how closely. Tables and
drawing: layout_report.py.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from bench.ranks import Calls, Ranks
from bench.runner import Bench, Report
from tpformer.config import (
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    TrainSection,
    check_config,
)
from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import SCHEDULES, Layout
from tpformer.training.data import build_stdlib
from tpformer.training.optimizer import build_optimizer
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch, train_step

from .layout_report import bfloat16_table, draw, result_table

STEPS, CURVE_STEPS, BATCH = 10, 60, 8
LR, CURVE_LR = 1e-3, 5e-3
FLOAT64, FLOAT32, BFLOAT16 = "float64", "float32", "bfloat16"
BOUNDS = {FLOAT64: 1e-9, FLOAT32: 1e-5}
LAYERS = 4
NOTE = (
    f"Largest difference from one process over {STEPS} steps and all ranks, of a model of {LAYERS} layers, or as many "
    "as the layout has stages. loss, norm (of all gradients): relative. parameters: after the last step, element by "
    f"element, in units of max(|p|, learning rate). Bounds: {BOUNDS[FLOAT64]:g} in float64, {BOUNDS[FLOAT32]:g} in "
    "float32 (parameters only in float64: AdamW amplifies the rounding of gradients that are zero, such as the key "
    "biases'). m: microbatches of a data-parallel rank. bfloat16: error against one process in float64, at most 2 * "
    "(that of one process in bfloat16 + eps * largest value), as maximum and as RMS over the steps. Dropout 0.1 "
    "throughout. The newer model has norms of queries and keys, a head dim of its own, biases of q, k and v alone, a "
    "sliding window, scaled RoPE, two key-value heads and a gated MLP; the other is a GPT-2."
)
Row = dict[str, Any]
NEWER: dict[str, Any] = {  # what Llama 3.1, Qwen and Mistral add, in one model
    **{"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "qkv_bias": True, "qk_norm": True},
    **{"n_kv_heads": 2, "head_dim": 12, "sliding_window": 7, "rope_scaling_factor": 8.0, "rope_original_length": 16},
}


class Case(NamedTuple):
    """A layout, and the settings that it is trained with. microbatch_size None: the configuration derives it.

    newer: the model has NEWER's options; otherwise it is a GPT-2.
    """

    layout: Layout
    microbatch_size: int | None = None
    tied: bool = True
    layers: int = LAYERS
    newer: bool = False

    def config(self, dtype: str, train: str, steps: int, lr: float) -> RunConfig:
        model = ModelSection(
            vocab_size=257, seq_length=16, n_layers=self.layers, hidden_size=32, n_heads=4, dropout=0.1,
            tie_embeddings=self.tied, **(NEWER if self.newer else {}),
        )  # fmt: skip
        section = TrainSection(
            steps=steps, dtype=dtype, device="cpu", global_batch_size=BATCH, microbatch_size=self.microbatch_size
        )
        optimizer = OptimizerSection(lr=lr, warmup_steps=steps // 5)
        data = DataSection(train=(train,))
        return RunConfig(model=model, data=data, parallel=self.layout, optimizer=optimizer, train=section)

    @property
    def alone(self) -> Case:
        """The same model in one process."""
        return Case(Layout(), tied=self.tied, layers=self.layers, newer=self.newer)

    @property
    def n_microbatches(self) -> int:
        return self.config(FLOAT64, "", STEPS, LR).n_microbatches

    def __str__(self) -> str:
        layout, words = self.layout, []
        if layout.tensor_parallel > 1:
            words.append(f"TP{layout.tensor_parallel}" + ("" if layout.sequence_parallel else " without SP"))
        if layout.pipeline_parallel > 1:
            words.append(f"PP{layout.pipeline_parallel} {layout.pipeline_schedule}")
        if layout.data_parallel > 1:
            replicate, shard = layout.data_parallel_replicate, layout.data_parallel_shard
            hybrid = f"{replicate}x{shard}" if min(replicate, shard) > 1 else f"{replicate * shard}"
            words.append(f"DP{hybrid} ZeRO-{layout.zero}")
        words += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
        words += ["CPU offload"] if layout.cpu_offload else []
        words += [] if self.tied else ["untied"]
        words += ["newer model"] if self.newer else []
        return ", ".join(words) or ALONE


def case(microbatch_size: int | None = None, tied: bool = True, newer: bool = False, **layout: object) -> Case:
    """A case from Layout's keywords, some by short names. It has 4 layers, or one a stage if stages are more."""
    short = {
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "schedule": "pipeline_schedule",
        "replicate": "data_parallel_replicate",
        "shard": "data_parallel_shard",
        "zero": "zero_stage",
    }
    made = Layout(**{short.get(key, key): value for key, value in layout.items()})  # type: ignore[arg-type]
    return Case(made, microbatch_size, tied, max(LAYERS, made.n_stages), newer)


ONE = case()
TP4, PP4 = case(tp=4), case(2, pp=4, schedule="1F1B")
DP4 = case(shard=4, zero=3)
ALL_AXES = case(2, tp=2, pp=2, shard=2, zero=3, recompute="full")
CASES = (
    # one process: accumulation, recompute, offload
    *(case(1), case(2, recompute="mlp"), case(4, recompute="full"), case(4, cpu_offload=True)),
    # one axis of two
    *(case(tp=2), case(2, tp=2, sequence_parallel=False), case(4, tp=2, recompute="mlp"), case(tp=2, tied=False)),
    *(case(2, replicate=2), case(2, shard=2, zero=1), case(1, shard=2, zero=2), case(2, shard=2, zero=3)),
    case(2, shard=2, zero=3, cpu_offload=True),
    *(case(None if name == "naive" else 2, pp=2, schedule=name) for name in SCHEDULES),
    case(2, pp=2, schedule="ZBVZeroBubble", recompute="full"),
    case(2, pp=2, schedule="GPipe", tied=False),
    # four ranks: one axis, two axes
    *(TP4, case(tp=4, sequence_parallel=False, recompute="full")),
    *(case(replicate=4), case(shard=4, zero=1), case(1, shard=4, zero=2), DP4),
    *(case(None if stage == 1 else 1, replicate=2, shard=2, zero=stage) for stage in (1, 2, 3)),
    *(case({"naive": None, "DualPipeV": 1}.get(name, 2), pp=4, schedule=name) for name in SCHEDULES),
    *(case(2, tp=2, shard=2, zero=2), case(2, tp=2, pp=2, schedule="Interleaved1F1B")),
    *(case(2, pp=2, replicate=2), case(2, pp=2, shard=2, schedule="ZBVZeroBubble")),
    *(case(2, pp=2, shard=2, zero=2, schedule="Interleaved1F1B"), case(2, pp=2, shard=2, zero=3)),
    # eight ranks
    *(case(2, tp=4, shard=2, zero=3), case(tp=2, replicate=2, shard=2, zero=3)),
    *(case(2, tp=4, pp=2, schedule="ZBVZeroBubble"), case(1, tp=2, pp=4, schedule="DualPipeV")),
    *(case(1, pp=4, shard=2, zero=2), case(1, pp=2, shard=4, zero=3)),
    case(2, tp=2, pp=2, replicate=2, schedule="GPipe"),
    case(1, tp=2, pp=2, shard=2, schedule="DualPipeV", recompute="mlp"),
    case(2, tp=2, pp=2, shard=2, zero=2, schedule="Interleaved1F1B"),
    ALL_AXES,
    case(2, tp=2, pp=2, shard=2, zero=3, schedule="LoopedBFS", cpu_offload=True, tied=False),
    # the other model: with more ranks than key-value heads, with the backward split, and on all axes
    *(case(2, tp=4, sequence_parallel=False, newer=True), case(2, tp=2, pp=2, schedule="ZBVZeroBubble", newer=True)),
    case(2, tp=2, pp=2, shard=2, zero=3, recompute="full", newer=True),
)
# the least, on at most four processes
QUICK_CASES = (case(4, tp=2), case(2, shard=2, zero=3), case(2, tp=2, pp=2, schedule="ZBVZeroBubble"))
BFLOAT16_CASES = (TP4, PP4, DP4, ALL_AXES)
LISTS = {"loss": "losses", "norm": "norms"}
ALONE = "one process"
CURVES = {ALONE: ONE, "TP4": TP4, "PP4 1F1B": PP4, "DP4 ZeRO-3": DP4}


class Trained(NamedTuple):
    """A rank's run: mean loss and gradient norm of each step, and whole parameters after the last."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]
    seconds: float


Results = dict[tuple[str, Case], list[Trained]]  # by purpose (a dtype, or a curve's) and layout: every rank's


def train(config: RunConfig, mesh: DeviceMesh, keep_parameters: bool) -> Trained:
    """This rank's part of a run: the functions of `tpformer pretrain`, without its files."""
    model = build_model(config, mesh)
    optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
    data = open_data(config).train
    losses, norms, steps = [], [], config.train.steps
    start = time.perf_counter()
    for step in range(1, steps + 1):
        first, share = model.own_samples((step - 1) * BATCH, BATCH)
        lr = learning_rate(step, steps, config.optimizer)
        samples, clip_norm = batch(data, first, share), config.optimizer.clip_norm
        result = train_step(model, optimizers, samples, first_sample=first, step=step, lr=lr, clip_norm=clip_norm)
        losses.append(float(result.loss))
        norms.append(float(result.norm))
    seconds = time.perf_counter() - start
    parameters = {}
    if keep_parameters:
        named = [one for part in model.parts for one in part.named_parameters()]
        parameters = {name: full_tensor(parameter.detach()).cpu().numpy() for name, parameter in named}
    return Trained(losses, norms, parameters, seconds)


def setup(runs: Mapping[str, RunConfig]) -> Calls:
    """A rank's calls: the runs, by name; those in float64 that are no curves return their parameters.

    One mesh serves all runs of its shape: DTensor keeps the first of equal meshes, and so its process groups, for good.
    """
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of how a whole tensor is gathered
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    gc.freeze()  # the collections below then skip what is imported, and are quick

    def call(config: RunConfig) -> Trained:
        layout = config.parallel
        degrees = (layout.pipeline_parallel, layout.data_parallel_replicate, layout.data_parallel_shard)
        if degrees not in meshes:
            meshes[degrees] = run_mesh(config, "cpu")
        gc.collect()  # frees the model of the run before, which refers to itself
        return train(config, meshes[degrees], config.train.dtype == FLOAT64 and config.optimizer.lr == LR)

    return {name: partial(call, config) for name, config in runs.items()}


def relative(values: Sequence[Sequence[float]], expected: Sequence[float]) -> float:
    """Largest |value / expected - 1| of several ranks' series; nan where a value is."""
    return float(np.abs(np.array(values) / np.array(expected) - 1).max())


def compare(ranks: Sequence[Trained], one: Trained) -> Row:
    """All ranks' results against one process's; ValueError when a parameter is on no rank."""
    worst, seen = (0.0, ""), set()
    for name, value in (each for rank in ranks for each in rank.parameters.items()):
        expected = one.parameters[name]
        difference = (np.abs(value - expected) / np.maximum(np.abs(expected), LR)).max()
        worst = max(worst, (float(np.nan_to_num(difference, nan=np.inf)), name))
        seen.add(name)
    if missing := one.parameters.keys() - seen:
        raise ValueError(f"no rank has {', '.join(sorted(missing))}")
    return {
        "loss": relative([rank.losses for rank in ranks], one.losses),
        "norm": relative([rank.norms for rank in ranks], one.norms),
        "parameters": worst[0],
        "worst": worst[1],
        "seconds": max(rank.seconds for rank in ranks),
    }


def rounded(value: Any) -> Any:
    """A number with as many digits as are read; anything else as it is."""
    return float(f"{value:.2g}") if isinstance(value, float) else value


def make_row(one: Case, runs: Mapping[str, Sequence[Trained]], expected: Mapping[str, Trained]) -> Row:
    """A layout's row. runs: of all its ranks, by dtype; expected: of one process, by dtype; ok: within BOUNDS."""
    if not expected[FLOAT64].parameters:
        raise ValueError(f"{one}: one process returned no parameters in float64, so none would be compared")
    found = {dtype: compare(runs[dtype], expected[dtype]) for dtype in BOUNDS}
    ok = all(found[dtype][key] <= bound for dtype, bound in BOUNDS.items() for key in ("loss", "norm", "parameters"))
    sizes: Row = {"layout": str(one), "ranks": one.layout.world_size, "microbatches": one.n_microbatches}
    for dtype, each in found.items():
        kept = each if dtype == FLOAT64 else ("loss", "norm", "seconds")
        sizes[dtype] = {key: rounded(each[key]) for key in kept}
    return {**sizes, "ok": ok}


def errors(values: Sequence[Sequence[float]], oracle: Sequence[float]) -> list[float]:
    """Largest and RMS difference from float64 over the steps; of several ranks, the worst one's."""
    difference = np.abs(np.array(values) - np.array(oracle))
    return [float(difference.max()), float(np.sqrt(np.square(difference).mean(axis=1)).max())]


def bfloat16_row(one: Case, ranks: Sequence[Trained], single: Trained, oracle: Trained) -> Row:
    """A layout in bfloat16. single: one process in bfloat16; oracle: one process in float64.

    loss, norm: largest relative difference from one process; errors against float64, each maximum and RMS, beside those
    of one process in bfloat16 (single) and what is allowed.
    """
    row: Row = {"layout": str(one), "ranks": one.layout.world_size, "ok": True}
    for key, series in LISTS.items():
        values = [getattr(each, series) for each in ranks]
        alone, exact = getattr(single, series), getattr(oracle, series)
        rounding = torch.finfo(torch.bfloat16).eps * max(map(abs, exact))
        error, own = errors(values, exact), errors([alone], exact)
        allowed = [2 * (each + rounding) for each in own]
        row[key] = relative(values, alone)
        row |= {f"{key}_error": error, f"{key}_single": own, f"{key}_allowed": allowed}
        row["ok"] &= all(mine <= limit for mine, limit in zip(error, allowed, strict=True))
    return row


def curves_of(trained: Results) -> Row:
    """One process's float64 losses, and for each dtype and layout the relative difference from it at every step."""
    losses = {
        dtype: {name: np.array(trained[f"curve {dtype}", one][0].losses) for name, one in CURVES.items()}
        for dtype in BOUNDS
    }
    differences = {
        dtype: {
            name: [rounded(value) for value in (of_layout / of_dtype[ALONE] - 1).tolist()]
            for name, of_layout in of_dtype.items()
            if name != ALONE
        }
        for dtype, of_dtype in losses.items()
    }
    return {"losses": losses[FLOAT64][ALONE].round(5).tolist(), "differences": differences}


def plan(cases: Sequence[Case], complete: bool, train: str) -> dict[int, dict[tuple[str, Case], RunConfig]]:
    """World size -> its runs, by purpose (a dtype, or a curve's) and layout. ValueError for one that cannot run."""
    wanted = {(dtype, one) for dtype in BOUNDS for one in cases}
    wanted |= {(dtype, one.alone) for dtype, one in wanted}
    if complete:
        wanted |= {(BFLOAT16, one) for one in (ONE, *BFLOAT16_CASES)}
        wanted |= {(f"curve {dtype}", one) for dtype in BOUNDS for one in CURVES.values()}
    worlds: dict[int, dict[tuple[str, Case], RunConfig]] = {}
    for purpose, one in sorted(wanted, key=str):
        long = purpose.startswith("curve")
        steps, lr = (CURVE_STEPS, CURVE_LR) if long else (STEPS, LR)
        config = one.config(purpose.removeprefix("curve "), train, steps, lr)
        check_config(config)
        worlds.setdefault(one.layout.world_size, {})[purpose, one] = config
    return dict(sorted(worlds.items()))


def train_all(worlds: Mapping[int, Mapping[tuple[str, Case], RunConfig]]) -> Results:
    """Run everything, one world size after the other."""
    results: Results = {}
    for size, runs in worlds.items():
        print(f"{size} ranks: {len(runs)} runs", flush=True)
        with Ranks(size, 1, setup, {str(key): config for key, config in runs.items()}) as ranks:
            for key in runs:
                results[key] = ranks.call(str(key))
    return results


def run(options: argparse.Namespace) -> Report:
    """Train in every layout and in one process, and compare."""
    quick = options.quick
    cases = QUICK_CASES if quick else CASES
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        text, _ = build_stdlib(Path(directory), quiet=True)
        trained = train_all(plan(cases, not quick, str(text)))
    rows = []
    for one in cases:
        runs, expected = ({dtype: trained[dtype, each] for dtype in BOUNDS} for each in (one, one.alone))
        rows.append(make_row(one, runs, {dtype: single for dtype, (single,) in expected.items()}))
    missed = [row["layout"] for row in rows if not row["ok"]]
    tables, content = [result_table(rows)], {}
    if not quick:
        single, oracle = trained[BFLOAT16, ONE][0], trained[FLOAT64, ONE][0]
        low = [bfloat16_row(one, trained[BFLOAT16, one], single, oracle) for one in BFLOAT16_CASES]
        missed += [f"{row['layout']} in bfloat16" for row in low if not row["ok"]]
        tables.append(bfloat16_table(low))
        content = {"bounds": BOUNDS, "rows": rows, "bfloat16": low, "curves": curves_of(trained)}
    problem = f"{len(missed)} of {len(rows)} layouts are not the run of one process: {'; '.join(missed)}"
    return Report(tables, content, [problem] if missed else [], f"all {len(rows)} layouts are the run of one process")


BENCH = Bench(
    name="layouts",
    description="one run in many layouts, schedules and ZeRO stages against one process; on 8 CPU processes",
    options={"--quick": {"action": "store_true", "help": "few layouts on at most 4 processes, nothing written"}},
    run=run,
    draw=draw,
    note=NOTE,
)
