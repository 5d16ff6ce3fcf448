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

from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report
from tpformer.config import RunConfig, check_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.ops.transports.quantized import record_blocks
from tpformer.training.data import IndexedDataset, IndexedWriter, build_stdlib
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch, train_step

from .layout_cases import (
    ALONE,
    BATCH,
    BFLOAT16_CASES,
    BFLOAT16_MOE_CASES,
    CASES,
    CONTEXT_CASES,
    CURVES,
    END,
    EXCHANGE_CASES,
    FP8_CASES,
    FP8_EXPERTS_CASES,
    LAYERS,
    MOE_CASES,
    QUICK_CASES,
    QUICK_CONTEXT_CASES,
    QUICK_EXCHANGE_CASES,
    QUICK_MOE_CASES,
    SHORT,
    LayoutCase,
)
from .layout_report import bfloat16_table, draw, quantized_table, result_table, routing_table, sent_table
from .muon_cases import BFLOAT16_MUON_CASES, MUON_CASES, QUICK_MUON_CASES, Sent, all_sent, counting, formula
from .quantized_blocks import Step, differing, digests, joined_steps, run_hash_of
from .quantized_errors import beyond, errors_table, precision_errors
from .routing import Key, Routed, flips, joined, recording, run_hash
from .scalings import scalings_table

STEPS, CURVE_STEPS = 10, 60
FP8_STEPS = 4  # its models are wider
LR, CURVE_LR = 1e-3, 5e-3
FLOAT64, FLOAT32, BFLOAT16 = "float64", "float32", "bfloat16"
BOUNDS = {FLOAT64: 1e-9, FLOAT32: 1e-5}
COMPARED = tuple(BOUNDS)  # the dtypes that every layout is trained in
FLIP_GAP = 1e-5  # float32 may send a token to other experts if its scores were as near as this
LISTS = {"loss": "losses", "norm": "norms"}
NOTE = (
    f"Largest difference from one process over {STEPS} steps and all ranks, of a model of {LAYERS} layers, or as many "
    "as the layout has stages. loss, norm (of all gradients): relative. parameters: after the last step, element by "
    f"element, in units of max(|p|, learning rate). Bounds: {BOUNDS[FLOAT64]:g} in float64, {BOUNDS[FLOAT32]:g} in "
    "float32 (parameters only in float64: AdamW amplifies the rounding of gradients that are zero, such as the key "
    "biases'). m: microbatches of a data-parallel rank. bfloat16: error against one process in float64, at most 2 * "
    "(that of one process in bfloat16 + eps * largest value), as maximum and as RMS over the steps. Dropout 0.1 "
    "throughout. The newer model has norms of queries and keys, a head dim of its own, biases of q, k and v alone, a "
    "sliding window, scaled RoPE, two key-value heads and a gated MLP; the other is a GPT-2. With experts the hash "
    "of every (step, layer, token) -> experts is that of one process in float64; float32 may send a token elsewhere "
    f"if the scores were nearer than {FLIP_GAP:g} in one process. 8 experts: 2 for each token. 16: 4, a shared one, a "
    "dense layer first, sigmoid scores, 2 of 4 groups, a bias that each step moves, and a balance loss. SGD: with "
    "Nesterov's momentum and 100 times the rate, in place of AdamW. Muon: with 10 times the rate. FP8: "
    f"{FP8_STEPS} steps; all quantised blocks in float64 are those of one process, and float32 is not judged: where "
    "its sums are rounded otherwise, a value may be quantised to its neighbour, and all later ones change with it."
)
Row = dict[str, Any]


class RankRun(NamedTuple):
    """A rank's run: mean loss and gradient norm of each step, whole parameters (and buffers) after the last."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]
    seconds: float
    routed: dict[Key, Routed] = {}  # noqa: RUF012  (of a model with experts: where its tokens went)
    quantized: list[Step] = []  # noqa: RUF012  (in FP8: the blocks of each step)
    sent: Sent = {}  # noqa: RUF012  (by Muon: the elements that this rank sends in all steps)


Results = dict[tuple[str, LayoutCase], list[RankRun]]  # by purpose (a dtype, or a curve's) and layout: every rank's


def train(config: RunConfig, mesh: DeviceMesh, keep_parameters: bool) -> RankRun:
    """This rank's part of a run: the functions of `tpformer pretrain`, without its files."""
    model = build_model(config, mesh)
    optimizers = build_optimizers(model, config.optimizer)
    data = open_data(config).train
    losses, norms, quantized, steps = [], [], [], config.train.steps
    start = time.perf_counter()
    with recording(model, BATCH) as routed, record_blocks() as made, counting(mesh) as sent:
        for step in range(1, steps + 1):
            first, share = model.own_samples((step - 1) * BATCH, BATCH)
            lr = learning_rate(step, steps, config.optimizer)
            samples, clip_norm = batch(data, first, share), config.optimizer.clip_norm
            result = train_step(model, optimizers, samples, first_sample=first, lr=lr, clip_norm=clip_norm)
            losses.append(float(result.loss))
            norms.append(float(result.norm))
            quantized.append(digests(made))
            made.clear()
    seconds = time.perf_counter() - start
    parameters = {}
    if keep_parameters:
        named = [one for part in model.parts for one in part.state_dict(keep_vars=True).items()]
        parameters = {name: full_tensor(parameter.detach()).cpu().numpy() for name, parameter in named}
    return RankRun(losses, norms, parameters, seconds, routed, quantized, dict(sent))


def setup(runs: Mapping[str, RunConfig]) -> Calls:
    """A rank's calls: the runs, by name; those in float64 that are no curves return their parameters.

    One mesh serves all runs of its shape: DTensor keeps the first of equal meshes, and so its process groups, for good.
    """
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of how a whole tensor is gathered
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    gc.freeze()  # the collections below then skip what is imported, and are quick

    def call(config: RunConfig) -> RankRun:
        layout = config.parallel
        data = (layout.data_parallel_replicate, layout.data_parallel_shard, layout.context_parallel)
        degrees = (layout.pipeline_parallel, *data)
        if degrees not in meshes:
            meshes[degrees] = run_mesh(config, "cpu")
        gc.collect()  # frees the model of the run before, which refers to itself
        return train(config, meshes[degrees], config.train.dtype == FLOAT64 and config.optimizer.lr != CURVE_LR)

    return {name: partial(call, config) for name, config in runs.items()}


def relative(values: Sequence[Sequence[float]], expected: Sequence[float]) -> float:
    """Largest |value / expected - 1| of several ranks' series; nan where a value is."""
    return float(np.abs(np.array(values) / np.array(expected) - 1).max())


def compare(ranks: Sequence[RankRun], one: RankRun) -> Row:
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


def make_row(one: LayoutCase, runs: Mapping[str, Sequence[RankRun]], expected: Mapping[str, RankRun]) -> Row:
    """A layout's row. runs: of all its ranks, by dtype; expected: of one process, by dtype; ok: within BOUNDS."""
    if not expected[FLOAT64].parameters:
        raise ValueError(f"{one}: one process returned no parameters in float64, so none would be compared")
    found = {dtype: compare(of_ranks, expected[dtype]) for dtype, of_ranks in runs.items()}
    routing, quantized = routing_of(runs, expected), quantized_of(runs, expected) if one.in_fp8 else {}
    near = one.in_fp8 or not routing or all(flip[-1] < FLIP_GAP for flip in routing["flips"])
    ok = not routing or (routing["hash"] == routing["one"] and near)
    ok &= not quantized or quantized["hash"] == quantized["one"]
    judged = {dtype: found[dtype] for dtype in found if dtype == FLOAT64 or not one.in_fp8}
    ok &= all(each[key] <= BOUNDS[dtype] for dtype, each in judged.items() for key in ("loss", "norm", "parameters"))
    sizes: Row = {"layout": str(one), "ranks": one.layout.world_size, "microbatches": one.n_microbatches}
    for dtype, each in found.items():
        kept = each if dtype == FLOAT64 else ("loss", "norm", "seconds")
        sizes[dtype] = {key: rounded(each[key]) for key in kept}
    sent = sent_of(one, runs[FLOAT64]) if one.optimizer == "muon" else {}
    ok &= not sent or sent["formula"] is None or sent["sent"] == sent["formula"]
    sections = {"routing": routing, "quantized": quantized, "muon": sent}
    return {**sizes, **{name: section for name, section in sections.items() if section}, "ok": ok}


def routing_of(runs: Mapping[str, Sequence[RankRun]], expected: Mapping[str, RankRun]) -> Row:
    """How a model with experts routed its tokens; {} for other models.

    hash, one: hashes of all decisions in float64, here and in one process; tokens: how many decisions there are;
    flips: the tokens that this layout routes differently from one process in float32 (routing.flips).
    """
    if not expected[FLOAT64].routed:
        return {}
    one = expected[FLOAT64].routed
    double = joined([rank.routed for rank in runs[FLOAT64]])
    tokens = sum(len(routed.experts) for routed in one.values())
    found = []
    if FLOAT32 in runs:
        found = flips(joined([rank.routed for rank in runs[FLOAT32]]), expected[FLOAT32].routed)
    return {"hash": run_hash(double), "one": run_hash(one), "tokens": tokens, "flips": found}


def quantized_of(runs: Mapping[str, Sequence[RankRun]], expected: Mapping[str, RankRun]) -> Row:
    """How a layout in FP8 quantised: the hashes of all blocks in float64, here and in one process, how many blocks a
    run has, and the share of the first step's blocks that float32 makes otherwise than one process."""
    steps, one = joined_steps([rank.quantized for rank in runs[FLOAT64]]), expected[FLOAT64].quantized
    row: Row = {"hash": run_hash_of(steps), "one": run_hash_of(one), "blocks": sum(map(len, one))}
    if FLOAT32 in runs:
        single = joined_steps([rank.quantized for rank in runs[FLOAT32]])
        row["float32"] = rounded(differing(single[0], expected[FLOAT32].quantized[0]))
    return row


def sent_of(one: LayoutCase, ranks: Sequence[RankRun]) -> Row:
    """The elements of matrices that all ranks together send in a step by Muon, and what they should be."""
    steps = len(ranks[0].losses)
    return {
        "sent": all_sent([rank.sent for rank in ranks], steps),
        "formula": formula(one.config(FLOAT64, "", steps, LR)),
    }


def errors(values: Sequence[Sequence[float]], oracle: Sequence[float]) -> list[float]:
    """Largest and RMS difference from float64 over the steps; of several ranks, the worst one's."""
    difference = np.abs(np.array(values) - np.array(oracle))
    return [float(difference.max()), float(np.sqrt(np.square(difference).mean(axis=1)).max())]


def bfloat16_row(one: LayoutCase, ranks: Sequence[RankRun], single: RankRun, oracle: RankRun) -> Row:
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


def plan(
    cases: Sequence[LayoutCase], complete: bool, train: str, low: Sequence[LayoutCase] = ()
) -> dict[int, dict[tuple[str, LayoutCase], RunConfig]]:
    """World size -> its runs, by purpose (a dtype, or a curve's) and layout. ValueError for one that cannot run.

    complete: with the curves. low: those that are trained in bfloat16.
    """
    wanted = {(dtype, one) for dtype in COMPARED for one in cases}
    wanted |= {(dtype, one.alone) for dtype, one in wanted}
    wanted |= {each for one in low for each in ((BFLOAT16, one), (BFLOAT16, one.alone), (FLOAT64, one.alone))}
    if complete:
        wanted |= {(f"curve {dtype}", one) for dtype in BOUNDS for one in CURVES.values()}
    worlds: dict[int, dict[tuple[str, LayoutCase], RunConfig]] = {}
    for purpose, one in sorted(wanted, key=str):
        long = purpose.startswith("curve")
        steps, lr = (CURVE_STEPS, CURVE_LR) if long else (min(STEPS, FP8_STEPS) if one.in_fp8 else STEPS, LR)
        config = one.config(purpose.removeprefix("curve "), train, steps, lr)
        check_config(config)
        worlds.setdefault(one.layout.world_size, {})[purpose, one] = config
    return dict(sorted(worlds.items()))


def train_all(worlds: Mapping[int, Mapping[tuple[str, LayoutCase], RunConfig]]) -> Results:
    """Run everything, one world size after the other."""
    results: Results = {}
    for size, runs in worlds.items():
        print(f"{size} ranks: {len(runs)} runs", flush=True)
        with Ranks(size, 1, setup, {str(key): config for key, config in runs.items()}) as ranks:
            for key in runs:
                results[key] = ranks.call(str(key))
    return results


def write_short_documents(text: Path, tokens: int = 1 << 15) -> None:
    """Write the dataset TEXT_short: the words of the first tokens of a dataset of bytes, each a document."""
    ids = IndexedDataset(text).tokens(0, tokens)
    with IndexedWriter(f"{text}{SHORT}", np.dtype(np.uint16)) as writer:
        for word in np.split(ids, np.flatnonzero(ids == ord(" ")) + 1):
            writer.add_document([*word, END])


def run(options: argparse.Namespace) -> Report:
    """Train in every layout and in one process, and compare."""
    every = {"": CASES, "moe": MOE_CASES, "context": CONTEXT_CASES, "exchange": EXCHANGE_CASES}
    if options.quick:
        every = {"": QUICK_CASES, "moe": QUICK_MOE_CASES, "context": QUICK_CONTEXT_CASES} | {
            "exchange": QUICK_EXCHANGE_CASES
        }
    if options.fp8:
        every = {"fp8": (*FP8_CASES, *FP8_EXPERTS_CASES)}
    if options.muon:
        every = {"muon": QUICK_MUON_CASES if options.quick else MUON_CASES}
    asked = [name for name in every if name and getattr(options, name)]
    quick, part = options.quick, bool(asked)
    cases = [one for name in asked or every for one in every[name]]
    in_low: tuple[LayoutCase, ...] = () if part else (*BFLOAT16_CASES, *BFLOAT16_MOE_CASES)
    in_low = () if quick else BFLOAT16_MUON_CASES if options.muon else in_low
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        text, _ = build_stdlib(Path(directory), quiet=True)
        write_short_documents(text)
        of_gemms = precision_errors(text) if options.fp8 else {}
        trained = train_all(plan(cases, not (quick or part), str(text), in_low))
    rows = []
    for one in cases:
        runs, expected = ({dtype: trained[dtype, each] for dtype in COMPARED} for each in (one, one.alone))
        rows.append(make_row(one, runs, {dtype: single for dtype, (single,) in expected.items()}))
    missed = [row["layout"] for row in rows if not row["ok"]]
    routed = [row for row in rows if "routing" in row]
    quantized, muon = ([row for row in rows if name in row] for name in ("quantized", "muon"))
    tables = [result_table(rows), *([routing_table(routed)] if routed else [])]
    tables += [quantized_table(quantized), scalings_table()] if quantized else []
    tables += [errors_table(of_gemms)] if of_gemms else []
    tables += [sent_table(muon)] if muon else []
    low = [
        bfloat16_row(one, trained[BFLOAT16, one], trained[BFLOAT16, one.alone][0], trained[FLOAT64, one.alone][0])
        for one in in_low
    ]
    missed += [f"{row['layout']} in bfloat16" for row in low if not row["ok"]]
    tables += [bfloat16_table(low)] if low else []
    content = {"bounds": BOUNDS, "rows": rows, "bfloat16": low}
    if not (quick or part):
        content["curves"] = curves_of(trained)
    problem = f"{len(missed)} of {len(rows)} layouts are not the run of one process: {'; '.join(missed)}"
    problems = [*([problem] if missed else []), *(beyond(of_gemms) if of_gemms else [])]
    return Report(tables, content, problems, f"all {len(rows)} layouts are the run of one process")


BENCH = Bench(
    name="layouts",
    description="one run in many layouts, schedules and ZeRO stages against one process; on 8 CPU processes",
    options={
        "--quick": {"action": "store_true", "help": "few layouts on at most 4 processes, nothing written"},
        "--moe": {"action": "store_true", "help": "only the models with experts, nothing written"},
        "--context": {"action": "store_true", "help": "only layouts with context parallelism, nothing written"},
        "--exchange": {"action": "store_true", "help": "only layouts with expert parallelism, nothing written"},
        "--fp8": {"action": "store_true", "help": "only layouts in FP8, which no other option has, nothing written"},
        "--muon": {"action": "store_true", "help": "only layouts by Muon, which no other option has, nothing written"},
    },
    run=run,
    draw=draw,
    note=NOTE,
)
