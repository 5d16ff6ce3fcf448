"""`python -m bench packing`: how many values escape from packed activations, in which form, and beside which choice?

Belongs here: one question after the other, what must hold, and the picture beside the results. How each is measured is
in the other files of this folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer.distributed import build_mesh, close
from tpformer.kernels.pack.format import BLOCK, GROUP, HEADROOM, SLOTS
from tpformer.training.data import build_stdlib, read_sidecar
from tpformer.training.setup import join_ranks

from .. import memory
from ..bars import Bar, write_bars
from ..layer_memory import Layer, forward_flops
from ..marks import table_of
from ..runner import QUICK, Bench, Report
from . import outliers
from .forms import SIGN_AND_MANTISSA, Form, Tally, add_all, compared, grouped, statistics, tallied
from .page import BITS, TRAINED, all_cells, forms_of, write_files
from .training import SHAPES, Size, Tensors, layer_of, missing, recorded_steps

QUICK_SIZE = Size(steps=12, samples=1)
LEARNED = 0.8  # a run's last loss must be below this share of the best loss without context
GPT = "GPT"  # the shape whose tensors get outliers
FORMAT = {"block": BLOCK, "group": GROUP, "slots": SLOTS, "headroom": HEADROOM, "bits": BITS}
QKV_KEPT = 14  # sbh/t of a layer that makes q, k and v again: 6 less than one that recomputes nothing
PARTS = ("sign and mantissa", "codes", "bases", "slots")
NOTE = (
    f"Bits of a packed value by the bits of a code and the values of a block, over the tensors of all recorded steps, "
    f"and over a Gaussian tensor in which 0.1 % of the channels are 1,000 times as large. Slots: as many as the worst "
    f"group of {GROUP:,} values needs, rounded up to a power of two; red: with room for the mean number of escapes. "
    f"The form that ships has codes of 4 bits, blocks of {BLOCK} and {SLOTS} slots: {BITS:.2f} bits. A byte "
    f"tells 256 slots apart, so a form that needs more cannot be built in this way."
)
Row = dict[str, Any]


def recompute_rows() -> list[Row]:
    """sbh/t that a GPT layer keeps in each mode, "qkv" included, which does not exist, and the GEMM FLOPs that its
    backward repeats, as a share of forward and backward."""
    flops = forward_flops(memory.GPT, 1)
    step = 3 * sum(flops.values())
    repeated = {"none": (), "qkv": ("qkv",), "mlp": ("fc1",), "full": ("qkv", "o", "fc1")}
    kept = {**memory.PROMISED, "qkv": QKV_KEPT}
    return [
        {"recompute": mode, "kept": kept[mode], "gemms": sum(flops[name] for name in names) / step}
        for mode, names in repeated.items()
    ]


class Counts:
    """What is counted of all runs: rows by shape, step and tensor; tallies of rules and forms; the worst groups."""

    def __init__(self) -> None:
        self.steps: list[Row] = []
        self.rows: list[Row] = []
        self.problems: list[str] = []
        tried = {"rules": outliers.RULES, "forms": compared()}
        self.tallies = {name: [Tally(form) for form in forms] for name, forms in tried.items()}
        self.worst: dict[tuple[str, Form], list[tuple[int, str]]] = {}  # by shape: of each watched step, and where

    def watch(self, name: str, tensors: Tensors) -> None:
        """Look for the worst group of a step, and which tensor of those with its name it is in."""
        of_form: dict[Form, list[tuple[int, str]]] = {form: [] for form in grouped()}
        for key, of_name in tensors.items():
            for index, x in enumerate(of_name):
                for form, row in zip(of_form, tallied([x], of_form), strict=True):
                    of_form[form].append((row["worst"], f"{key}, {index}"))
        for form, found in of_form.items():
            self.worst.setdefault((name, form), []).append(max(found))

    def record(self, layer: Layer, step: int, loss: float, tensors: Tensors) -> None:
        """Count a step's tensors in every form."""
        name = layer.model
        print(f"{name}, step {step}: loss {loss:.4f}", flush=True)
        self.steps.append({"shape": name, "step": step, "loss": round(loss, 4)})
        self.rows += [{"shape": name, "step": step, "tensor": key, **statistics(x)} for key, x in tensors.items()]
        self.problems += missing(layer, tensors)
        add_all(chain(*self.tallies.values()), (x for of_name in tensors.values() for x in of_name))

    def content(self) -> Row:
        """For the results file."""
        found = {
            name: [{"distribution": TRAINED, **tally.row()} for tally in tallies]
            for name, tallies in self.tallies.items()
        }
        watched = [
            {"shape": name, "block": form.block, "group": form.group, "worst": list(worst), "where": list(where)}
            for (name, form), found in self.worst.items()
            for worst, where in [zip(*found, strict=True)]
        ]
        return {"steps_recorded": self.steps, "rows": self.rows, "watched": watched, "groups": [], **found}


def trained(size: Size, data: tuple[Path, Path], mesh: DeviceMesh) -> tuple[Counts, list[list[Tensor]]]:
    """(what was counted of all runs, the GPT's last tensors as matrices, for each name one for each layer)."""
    counts = Counts()
    last: Tensors = {}
    for name, config in SHAPES.items():
        layer = layer_of(name, config, size.samples)
        for step, loss, tensors in recorded_steps(name, config, size, data, mesh):
            if step in size.watched:
                counts.watch(name, tensors)
            if step in size.recorded:
                counts.record(layer, step, loss, tensors)
            last = tensors if name == GPT else last
    tokens = size.samples * SHAPES[GPT].seq_length
    return counts, [[x.view(tokens, -1) for x in of_name] for of_name in last.values()]


def measure(size: Size) -> tuple[Row, list[str]]:
    """(the content of the results file, what was not kept as it should be)."""
    join_ranks("cpu")
    mesh = build_mesh("cpu", tensor_parallel=1)
    try:
        with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
            data = build_stdlib(Path(directory), quiet=True)
            counts, matrices = trained(size, data, mesh)
            best = read_sidecar(data[0])["entropy_nats_per_token"]  # type: ignore[index]
    finally:
        close(mesh.get_group("tp"))
        dist.destroy_process_group()
    content = counts.content()
    for name, rows in outliers.measure(matrices).items():
        content[name] += rows
    parameters = {name: config.n_parameters for name, config in SHAPES.items()}
    tokens = size.steps * size.samples * SHAPES[GPT].seq_length
    head = {"parameters": parameters, **size._asdict(), "tokens": tokens, "unigram_entropy": best}
    return {**head, "format": FORMAT, **content, "recompute": recompute_rows()}, counts.problems


def problems_of(content: Row) -> list[str]:
    """The runs that did not learn from context, so that their tensors are not those of a trained model."""
    bar = LEARNED * content["unigram_entropy"]
    return [
        f"{each['shape']} ends at a loss of {each['loss']:.4f}, not below {bar:.4f}: it did not learn"
        for each in content["steps_recorded"]
        if each["step"] == content["steps"] and each["loss"] >= bar
    ]


def run(options: argparse.Namespace) -> Report:
    """Train, and count; --quick trains a few steps."""
    content, problems = measure(QUICK_SIZE if options.quick else Size())
    tables = [table_of(cells) for cells in all_cells(content).values()]
    problems += [] if options.quick else problems_of(content)
    outcome = "what layers keep is what docs/memory.md says, and the runs learned"
    return Report(tables, content, problems, outcome, write_files)


def bars_of(rows: Sequence[Mapping[str, Any]], group: str) -> list[Bar]:
    """A bar of bits for each form."""
    bars = []
    for row in rows:
        slots = row["bits_of_slots"] - SIGN_AND_MANTISSA - row["bits"] - 8 / row["block"]
        parts = dict(zip(PARTS, (SIGN_AND_MANTISSA, row["bits"], 8 / row["block"], slots), strict=True))
        label = f"{row['bits']} bits, blocks of {row['block']}"
        bars.append(Bar(group, label, parts, f"{row['bits_of_slots']:.2f}", row["bits_of_rate"]))
    return bars


def draw(path: Path) -> Path:
    """A bar of bits a value for each form: trained tensors, then the made ones."""
    result = json.loads(path.read_text())
    bars = [bar for name in (TRAINED, outliers.OUTLIERS) for bar in bars_of(forms_of(result, name), name)]
    return write_bars(path, NOTE, "bits a value", bars)


BENCH = Bench(
    name="packing",
    description="escapes and entropy of activations that bfloat16 runs save, and forms of packing compared; on a CPU",
    options=QUICK,
    run=run,
    draw=draw,
    note=NOTE,
)
