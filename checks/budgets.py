"""Real steps under eight memory budgets: `python -m checks.budgets` counts the peak of each beside its prediction.

Belongs here: counting every storage of a step while it lives, and the rules. One process on a CPU trains a small GPT in
float32. Under every budget the counted peak is within it, and within 3 % of the prediction; a smaller budget has no
larger peak and no less time; losses and parameters have the same bits; and no way that is the same for all layers and
fits is faster, by the model of time. Measured seconds are printed beside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpformer.config import RunConfig, build_config
from tpformer.planner.devices import Device, load_device
from tpformer.planner.keep_choice import peak
from tpformer.planner.memory_budget import least, uniform, with_budget
from tpformer.planner.software import ours
from tpformer.planner.step_time import StepModel
from tpformer.planner.units import with_keep
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

BUDGETS, BOUND = 8, 0.03
SHAPE = {
    "vocab_size": 2048, "seq_length": 512, "n_layers": 8, "hidden_size": 256, "n_heads": 8, "ffn_hidden_size": 704,
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
}  # fmt: skip
TRAIN = {"dtype": "float32", "device": "cpu", "global_batch_size": 4, "microbatch_size": 4}


class Alive(TorchDispatchMode):
    """Follows every storage that an operation makes, until it is freed, and those that are given. peak: the most bytes
    that were alive at once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for x in tensors:
            self._see(x)

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and storage.resizable() and key not in self.sizes:  # not the memory that ranks share
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter):
                self._see(x)
        return result


class Ran(NamedTuple):
    """Steps of a configuration: the counted peak of the second, the bits of losses and parameters, seconds of one."""

    peak: int
    bits: str
    seconds: float


def run(config: RunConfig, timed: int) -> Ran:
    """Train two steps of a configuration in this process, and `timed` further ones against the clock."""
    model: ModelParts = build_model(config, run_mesh(config, "cpu"))
    optimizers, draw = build_optimizers(model, config.optimizer), torch.Generator().manual_seed(1)
    size, length = config.train.global_batch_size, config.model.seq_length + 1

    def step() -> Tensor:
        batch = torch.randint(0, config.model.vocab_size or 0, (size, length), generator=draw)
        return train_step(model, optimizers, batch, first_sample=0, lr=1e-3, clip_norm=1.0).loss

    losses = [step()]
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    with Alive([*(p.detach() for p in model.parameters()), *states]) as alive:
        losses.append(step())
    bits = hashlib.sha256()
    for x in (*losses, *(p.detach() for p in model.parameters())):
        bits.update(x.contiguous().numpy().tobytes())
    seconds = []
    for _ in range(timed):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Ran(alive.peak, bits.hexdigest()[:12], min(seconds, default=0.0))


def sweep(config: RunConfig) -> list[RunConfig]:
    """The configuration under budgets from what it needs with all kept down to the least that works."""
    low, high = 1.02 * least(config)[0], 1.02 * peak(with_keep(config, "keep"))
    found = []
    for n in range(BUDGETS):
        budget = f"{high + (low - high) * n / (BUDGETS - 1):.0f}"
        layout = dataclasses.replace(config.parallel, memory_budget=budget)
        found.append(with_budget(dataclasses.replace(config, parallel=layout))[0])
    return found


def modelled(config: RunConfig, device: Device) -> float:
    """Seconds of a step by the model of time."""
    return StepModel(config, device, ours(config.parallel, device)).step().seconds


def check(config: RunConfig, timed: int = 0) -> tuple[Table, list[str]]:
    """(a row for each budget, what was broken). timed: steps against the clock."""
    device = load_device("cpu")
    device, faults = device.scaled(device.factor), list[str]()
    table = Table("budget MiB", "keep", "predicted", "counted", "off", "model s", "s", "one way for all", box=None)
    last: tuple[float, float, float] | None = None
    bits: set[str] = set()
    alone: dict[str, float] = {}
    for each in sweep(config):
        budget, keep = float(each.parallel.memory_budget), each.parallel.keep
        ran, predicted, seconds = run(each, timed), peak(each), modelled(each, device)
        best = uniform(config, device, 0.99 * budget)
        if best is not None and timed and best.keep not in alone:
            alone[best.keep] = run(with_keep(config, best.keep), timed).seconds
        other = "-" if best is None else f"{best.keep}: {best.seconds:.3f}, {alone.get(best.keep, 0.0):.3f} s"
        off = predicted / ran.peak - 1
        row = [budget / 2**20, predicted / 2**20, ran.peak / 2**20]
        cells = [f"{x:.1f}" for x in row]
        table.add_row(cells[0], keep, *cells[1:], f"{off:+.1%}", f"{seconds:.3f}", f"{ran.seconds:.3f}", other)
        rules = {
            f"counted {cells[2]} MiB": ran.peak <= budget,
            f"predicted {off:+.1%} of the counted": abs(off) <= BOUND,
            "one way for all layers is faster": best is None or seconds <= best.seconds * (1 + 1e-9),
            "a smaller budget has a larger peak, or less time": last is None
            or (ran.peak <= last[0] and predicted <= last[1] and seconds >= last[2] * (1 - 1e-9)),
        }
        faults += [f"budget {cells[0]} MiB, keep {keep}: {rule}" for rule, holds in rules.items() if not holds]
        last = ran.peak, predicted, seconds
        bits.add(ran.bits)
    if len(bits) > 1:
        faults.append(f"losses and parameters have {len(bits)} different bits")
    return table, faults


def main() -> int:
    """The table of one microbatch a step, and of two. Exit code 1 if a rule is broken."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    console, faults = Console(width=150), list[str]()
    for samples in (4, 2):
        config = build_config({"model": SHAPE, "train": {**TRAIN, "microbatch_size": samples}})
        table, found = check(config, timed=3)
        console.print(f"{4 // samples} microbatches of {samples} samples", table)
        faults += found
    dist.destroy_process_group()
    console.print(*(faults or ["every budget holds, with the same bits"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
