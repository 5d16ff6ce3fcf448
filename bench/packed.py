"""Do packed activations change a run, and what do they save and cost? Runs on a CPU, a step's peak bytes, its seconds.

Belongs here: the runs, what must hold, tables and picture. Bytes by tensor are those of `memory --pack`; why the packed
form is as it is, docs/memory.md says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from harness.bars import Bar, write_bars
from harness.marks import filled, markdown, table_of, write_page
from harness.provenance import ROOT
from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report
from tpformer.config import RunConfig, build_config
from tpformer.layers import keep
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import local_part
from tpformer.planner.devices import load_device
from tpformer.planner.layer_time import LayerModel
from tpformer.planner.software import OURS
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

from .live import Live

PAGE = ROOT / "docs" / "memory.md"
STEPS, QUICK_STEPS = 300, 3
MODEL = {"vocab_size": 256, "seq_length": 64, "n_layers": 2, "hidden_size": 128, "n_heads": 4}
BATCH, MICROBATCH = 8, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "tensor parallel 2": {"tensor_parallel": 2},
    "pipeline 2": {"pipeline_parallel": 2},
    "ZeRO-3 on 2": {"data_parallel_shard": 2, "zero_stage": 3},
}
RECOMPUTED = ("none", "mlp")
LARGE = GPTConfig(vocab_size=256, seq_length=512, n_layers=8, hidden_size=512, n_heads=8)
SAMPLES = 4  # of 512 tokens
LOWER = 0.15  # at least this share, of the peak of a step
REPEATS = 5
GPU = "h100"
WIDTHS = {4096: (32, 0.04), 8192: (64, 0.02)}  # hidden size: heads, the largest share of a layer's time
PREDICTED = "predicted, not measured"


class Run(NamedTuple):
    """A run of a layout, packed or not."""

    layout: str
    recompute: str
    packs: bool

    @property
    def world(self) -> int:
        """Ranks."""
        return 1 if not LAYOUTS[self.layout] else 2

    def config(self, steps: int) -> RunConfig:
        """The config of a run of this case in bfloat16 on a CPU."""
        parallel = {**LAYOUTS[self.layout], "recompute": self.recompute, "pack_activations": self.packs}
        train = {"steps": steps, "global_batch_size": BATCH, "dtype": "bfloat16", "device": "cpu"}
        ranks = LAYOUTS[self.layout].get("data_parallel_shard", 1)
        train["microbatch_size"] = MICROBATCH // ranks
        return build_config({"model": MODEL, "parallel": parallel, "train": train})


RUNS = [Run(layout, recompute, packs) for layout in LAYOUTS for recompute in RECOMPUTED for packs in (False, True)]


def text_bytes(count: int) -> Tensor:
    """The first bytes of Python's own library, as ids: int64 (count,)."""
    found = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= count:
            break
    return torch.from_numpy(np.frombuffer(found[:count], np.uint8).astype(np.int64))


def digest(model: ModelParts) -> str:
    """Hash the parts of all parameters that this rank holds."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(local_part(parameter.detach()).contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(run: Run, steps: int) -> dict[str, Any]:
    """One rank's part of a run: loss and gradient norm of each step, as exact texts, the parameters, the packing."""
    config = run.config(steps)
    mesh = run_mesh(config, "cpu")
    model = build_model(config, mesh)
    optimizers = build_optimizers(model, config.optimizer)
    length = MODEL["seq_length"] + 1
    text = text_bytes(steps * BATCH * length).view(steps, BATCH, length)
    first, share = model.own_samples(0, BATCH)
    numbers, packing = [], torch.zeros(4, dtype=torch.int64)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rows = text[step - 1, first : first + share]
        options: dict = {"first_sample": (step - 1) * BATCH + first, "lr": 1e-3, "clip_norm": 1.0}
        result = train_step(model, optimizers, rows, **options)
        numbers.append((float(result.loss).hex(), float(result.norm).hex()))
        if result.packing is not None:
            packing += result.packing
    seconds = time.perf_counter() - start
    return {
        "numbers": numbers,
        "parameters": digest(model),
        "packing": packing.tolist(),
        "seconds": seconds,
        "loss": float(result.loss),
    }


def rank_calls(runs: Sequence[Run], steps: int) -> Calls:
    """A rank's calls: train the run of that index."""
    return {str(index): lambda run=run: train(run, steps) for index, run in enumerate(runs)}


def identity_rows(steps: int) -> list[dict[str, Any]]:
    """Each layout and recompute mode, packed and not: whether all bits are the same, and what was packed."""
    found: dict[Run, list[dict[str, Any]]] = {}
    for world in (1, 2):
        runs = [run for run in RUNS if run.world == world]
        with Ranks(world, 1, rank_calls, runs, steps) as ranks:
            found |= {run: ranks.call(str(index)) for index, run in enumerate(runs)}
    return [identity_row(run, found[run._replace(packs=False)], ranks) for run, ranks in found.items() if run.packs]


def identity_row(run: Run, plain: Sequence[dict[str, Any]], packed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came out of a run, by rank, beside the same run as it is."""
    both = list(zip(plain, packed, strict=True))
    values, escapes, left, _ = packed[0]["packing"]
    return {
        "layout": run.layout,
        "recompute": run.recompute,
        "steps": len(packed[0]["numbers"]),
        "same_losses_and_norms": all(a["numbers"] == b["numbers"] for a, b in both),
        "same_parameters": all(a["parameters"] == b["parameters"] for a, b in both),
        "loss": packed[-1]["loss"],
        "packed": values,
        "escapes": escapes,
        "left": left,
        "seconds": [each[0]["seconds"] for each in (plain, packed)],
    }


class Large:
    """A model of 8 layers of 512, and its step on 2,048 tokens."""

    def __init__(self, packs: bool) -> None:
        self.model = keep(GPT(LARGE, dtype=torch.bfloat16), pack_activations=packs).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        length = LARGE.seq_length + 1
        self.text = text_bytes(SAMPLES * length).view(SAMPLES, length)

    def step(self) -> float:
        """Forward, backward, update; the loss."""
        loss = self.model(self.text[:, :-1].contiguous(), targets=self.text[:, 1:].contiguous(), reduction="mean")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def peak(self) -> dict[str, int]:
        """Bytes: of parameters, of optimizer states, and the most that a step has alive beside them."""
        self.step()
        parameters = list(self.model.parameters())
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        with Live([*parameters, *states, self.text]) as live:
            self.step()
        sizes = [sum(x.nbytes for x in some) for some in (parameters, states)]
        return {"parameters": sizes[0], "states": sizes[1], "step": live.peak}


def large_row(repeats: int) -> dict[str, Any]:
    """Peak bytes and seconds of a step, as it is and packed; steps take turns."""
    torch.manual_seed(0)
    both = [Large(packs) for packs in (False, True)]
    peaks = [each.peak() for each in both]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for each, times in zip(both, seconds, strict=True):
            start = time.perf_counter()
            each.step()
            times.append(time.perf_counter() - start)
    return {"peaks": peaks, "seconds": [statistics.median(times) for times in seconds]}


def predicted_rows() -> list[dict[str, float]]:
    """Seconds of a layer on a GPU, and of packing and unpacking in it, by the planner's model: bytes and FLOPs."""
    rows = []
    for hidden, (heads, _) in WIDTHS.items():
        model = {"vocab_size": 50304, "seq_length": 4096, "n_layers": 32, "hidden_size": hidden, "n_heads": heads}
        train = {"global_batch_size": 2, "microbatch_size": 2, "dtype": "bfloat16", "device": "cuda"}
        config = build_config({"model": model, "parallel": {"pack_activations": True}, "train": train})
        work = LayerModel(config, load_device(GPU), OURS).work(False, packs=True)
        packing = work.forward["packing"] + work.inputs["packing"]
        rows.append(
            {
                "hidden": hidden,
                "layer": sum(terms.seconds for terms in work) - packing,
                "forward": work.forward["packing"],
                "backward": work.inputs["packing"],
            }
        )
    return rows


def share(row: dict[str, float]) -> float:
    """What packing adds to a layer's predicted seconds."""
    return (row["forward"] + row["backward"]) / row["layer"]


def lower(row: dict[str, Any], *with_: str) -> float:
    """The share by which packing lowers the peak of a step's bytes, together with those of the named kinds."""
    plain, packed = (sum(peak[name] for name in ("step", *with_)) for peak in row["peaks"])
    return 1 - packed / plain


def problems_of(content: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    for row in content["rows"]:
        where = f"{row['layout']}, recompute {row['recompute']}"
        if not (row["same_losses_and_norms"] and row["same_parameters"]):
            found.append(f"{where}: the packed run has other bits")
        if not row["packed"]:
            found.append(f"{where}: nothing was packed")
    if (saved := lower(content["large"])) < LOWER:
        found.append(f"the peak of a step is {saved:.1%} lower, not {LOWER:.0%}")
    for row in content["predicted"]:
        if share(row) > WIDTHS[row["hidden"]][1]:
            found.append(f"hidden {row['hidden']}: packing is predicted to take {share(row):.1%} of a layer")
    return found


def run_cells(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each pair of runs."""
    cells: list[tuple[str, ...]] = [
        ("layout", "recompute", "steps", "bits", "last loss", "escapes", "left as they are", "s", "s packed")
    ]
    for row in content["rows"]:
        bits = "the same" if row["same_losses_and_norms"] and row["same_parameters"] else "OTHERS"
        escapes = f"{row['escapes'] / max(1, row['packed']):.2e}"
        numbers = str(row["steps"]), bits, f"{row['loss']:.4f}", escapes, str(row["left"])
        cells.append((row["layout"], row["recompute"], *numbers, *(f"{each:.1f}" for each in row["seconds"])))
    return cells


def step_cells(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Peak bytes and seconds of the large model's step."""
    large, (plain, packed) = content["large"], content["large"]["peaks"]
    cells: list[tuple[str, ...]] = [
        ("a step of 8 layers of 512, 2,048 tokens, on a CPU", "as it is", "packed", "lower by")
    ]
    for name, others in {
        "most bytes that it has alive, MB": (),
        "the same and parameters": ("parameters",),
        "the same and AdamW's states": ("parameters", "states"),
    }.items():
        sizes = (f"{sum(each[key] for key in ('step', *others)) / 1e6:.1f}" for each in (plain, packed))
        cells.append((name, *sizes, f"{lower(large, *others):.1%}"))
    seconds = large["seconds"]
    cells.append(("seconds", *(f"{each:.2f}" for each in seconds), f"{1 - seconds[1] / seconds[0]:.1%}"))
    return cells


def gpu_cells(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """A layer's predicted seconds."""
    cells: list[tuple[str, ...]] = [
        (f"hidden size, {GPU}, {PREDICTED}", "layer ms", "packing ms", "unpacking ms", "share")
    ]
    for row in content["predicted"]:
        times = (f"{1e3 * row[name]:.3f}" for name in ("layer", "forward", "backward"))
        cells.append((str(row["hidden"]), *times, f"{share(row):.2%}"))
    return cells


CELLS = {"packed_runs": run_cells, "packed_step": step_cells, "packed_gpu": gpu_cells}


def tables_of(content: dict[str, Any]) -> list[Table | str]:
    """Runs, the large step, the prediction."""
    return [part for cells in CELLS.values() for part in ("", table_of(cells(content)))]


def page(text: str, content: dict[str, Any]) -> str:
    """The text of PAGE with the tables of these results."""
    return filled(text, {name: markdown(cells(content)) for name, cells in CELLS.items()}, "docs/memory.md")


def write_files(folder: Path) -> None:
    """The page of the repository's own results."""
    write_page(folder / "packed.json", PAGE, page)


def run(options: argparse.Namespace) -> Report:
    """Do all of it."""
    content = {
        "rows": identity_rows(QUICK_STEPS if options.quick else STEPS),
        "large": large_row(1 if options.quick else REPEATS),
        "predicted": predicted_rows(),
    }
    outcome = "packed runs have the bits of the others"
    return Report(tables_of(content), content, problems_of(content), outcome, write_files)


def draw(path: Path) -> Path:
    """A step's peak bytes, as it is and packed."""
    large = json.loads(path.read_text())["large"]
    bars = [
        Bar(
            "8 layers of 512, 2,048 tokens",
            label,
            {key: peak[key] / 1e6 for key in ("parameters", "states", "step")},
            "",
        )
        for label, peak in zip(("as it is", "packed"), large["peaks"], strict=True)
    ]
    bars = [bar._replace(value=f"{bar.length:.0f} MB") for bar in bars]
    note = (
        "The most bytes that a step of a bfloat16 GPT has alive on a CPU, by PyTorch's dispatch, beside parameters and "
        "AdamW's states. Packed: activations wait for the backward in 12.1 bits a value."
    )
    return write_bars(path, note, "MB", bars)


BENCH = Bench(
    name="packed",
    description="runs with packed activations beside runs without: bits, a step's peak bytes and seconds; on a CPU",
    run=run,
    draw=draw,
    note=(
        "The runs are of a GPT of 2 layers of 128 in bfloat16, on Python's own library. Losses, gradient norms and all "
        "parameters after the last step are compared bit by bit. Seconds on a GPU are a model of bytes and FLOPs "
        f"(tpformer/planner), {PREDICTED}."
    ),
)
