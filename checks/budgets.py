"""Real steps under eight memory budgets: `python -m checks.budgets` counts the peak of each beside its prediction.

Belongs here: counting every storage of a step while it lives, and the rules. One process on a CPU trains a small GPT in
float32. Under every budget the counted peak is within it, and within 3 % of the prediction; a smaller one has no larger
peak and no less time; losses and parameters have the same bits; and no way that is the same for all layers and
fits is faster, by the model of time. Measured seconds are printed beside. Then mixes that offload and, in bfloat16,
mixes that pack, each within 3 % of the prediction and with the same bits; and two ranks in
several layouts: each rank's counted peak is within the budget, and within 3 % of the prediction.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
import weakref
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpformer.config import RunConfig, build_config
from tpformer.distributed import initialize
from tpformer.ops import offload
from tpformer.ops.offload import _Storage
from tpformer.planner.devices import Device, load_device
from tpformer.planner.keep_choice import peak
from tpformer.planner.memory_budget import least, uniform, with_budget
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.software import ours
from tpformer.planner.step_time import StepModel
from tpformer.planner.storages import live_storages, local
from tpformer.planner.units import with_keep
from tpformer.processes.launch import run_ranks
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

BUDGETS, BOUND = 8, 0.03
HOST: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # what is offloaded
SHAPE = {
    "vocab_size": 2048, "seq_length": 512, "n_layers": 8, "hidden_size": 256, "n_heads": 8, "ffn_hidden_size": 704,
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
}  # fmt: skip
TRAIN = {"dtype": "float32", "device": "cpu", "global_batch_size": 4, "microbatch_size": 4}


MIXES = {
    "float32": ("offload", "4*offload,4*keep", "2*offload+full,2*offload+mlp,2*mlp,2*keep"),
    "bfloat16": ("keep", "pack", "4*mlp+pack,4*pack", "full+pack", "2*offload+pack,2*offload,2*full+pack,2*pack"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel": 2},
    "ZeRO-2 on 2": {"data_parallel_shard": 2, "zero_stage": 2},
    "ZeRO-3 on 2": {"data_parallel_shard": 2, "zero_stage": 3},
    "pp 2, 1F1B": {"pipeline_parallel": 2},
    "pp 2, Interleaved1F1B": {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"},
    "pp 2, ZBV": {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"},
}


class Alive(TorchDispatchMode):
    """Follows every storage of this process from now on, until it is freed. peak: the most bytes alive at once.

    What an offloaded layer has in host memory does not count, though on a CPU both are alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.now = self.peak = 0
        for storage in live_storages(_counts):
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if storage in HOST:
            self._forget(key)
        if storage in HOST or not storage.resizable():  # what is not resizable is the collectives' shared memory
            return
        if key in self.alive:
            self.now -= self.alive[key][0]
        else:
            weakref.finalize(storage, self._forget, key)
        self.alive[key] = size, weakref.ref(storage)
        self.now += size
        if self.now > self.peak:  # FSDP2 frees what it gathered by a new size, which no operation shows
            known = self.alive.copy()  # at once: storages may end meanwhile
            self.alive = {k: (each.nbytes(), ref) for k, (_, ref) in known.items() if (each := ref()) is not None}
            self.now = sum(size for size, _ in self.alive.values())
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self.alive.pop(key, (0, None))[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((result, args, kwargs)):
            if isinstance(x, Tensor) and _counts(x):
                self._see(x.untyped_storage())
        return result


def _counts(x: Tensor) -> bool:
    return not x.is_meta and type(x) in (Tensor, torch.nn.Parameter)


class OnHost(_Storage):
    """An offloaded storage whose copy in host memory is known as such."""

    def _copy(self, source: Tensor, target: Tensor) -> None:
        HOST.add(self.host.untyped_storage())
        super()._copy(source, target)


class Ran(NamedTuple):
    """Steps of a configuration: the counted peak of the second, the bits of losses and parameters, seconds of one."""

    peak: int
    bits: str
    seconds: float


def run(config: RunConfig, timed: int) -> Ran:
    """Train two steps of a configuration in this process, and `timed` further ones against the clock."""
    model: ModelParts = build_model(config, run_mesh(config, "cpu"))
    optimizers, draw = build_optimizers(model, config.optimizer), torch.Generator().manual_seed(1)
    shape = config.train.global_batch_size, config.model.seq_length + 1
    share = shape[0] // config.parallel.data_parallel
    first = dist.get_rank() % config.parallel.data_parallel * share

    def step() -> Tensor:
        batch = torch.randint(0, config.model.vocab_size or 0, shape, generator=draw)[first : first + share]
        return train_step(model, optimizers, batch, first_sample=first, lr=1e-3, clip_norm=1.0).loss

    losses = [step()]
    with mock.patch.object(offload, "_Storage", OnHost), Alive() as alive:
        losses.append(step())
    bits = hashlib.sha256()
    for x in (*losses, *(local(p.detach()) for p in model.parameters())):
        bits.update(x.contiguous().numpy().tobytes())
    seconds = []
    for _ in range(timed):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Ran(alive.peak, bits.hexdigest()[:12], min(seconds, default=0.0))


def sweep(config: RunConfig, number: int = BUDGETS) -> list[RunConfig]:
    """The configuration under budgets from what it needs with all kept down to the least that works."""
    low, high = 1.02 * least(config)[0], 1.02 * peak(with_keep(config, "keep"))
    found = []
    for n in range(number):
        budget = f"{high + (low - high) * n / (number - 1):.0f}"
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


def by_hand(dtype: str) -> tuple[Table, list[str]]:
    """(a row for each mix of MIXES[dtype], what was broken). On a CPU a budget chooses none of them."""
    table, faults, bits = Table("keep", "predicted", "counted", "off", box=None), list[str](), set[str]()
    for keep in MIXES[dtype]:
        config = with_keep(build_config({"model": SHAPE, "train": {**TRAIN, "dtype": dtype}}), keep)
        ran = run(config, 0)
        faults += _compared(table, keep, peak(config), ran.peak)
        bits.add(ran.bits)
    return table, [*faults, *([f"{dtype}: {len(bits)} different bits"] if len(bits) > 1 else [])]


def _compared(table: Table, what: str, predicted: float, counted: float) -> list[str]:
    off = predicted / counted - 1
    table.add_row(what, f"{predicted / 2**20:.1f}", f"{counted / 2**20:.1f}", f"{off:+.1%}")
    return [] if abs(off) <= BOUND else [f"{what}: predicted {off:+.1%} of the counted peak"]


def of_ranks(name: str, attempt: int = 0) -> None:
    """Run LAYOUTS[name] under three budgets on each of two ranks. Raises AssertionError for what is broken."""
    torch.set_num_threads(1)
    initialize("cpu")
    config = build_config({"model": SHAPE, "train": {**TRAIN, "microbatch_size": 1}, "parallel": LAYOUTS[name]})
    table, faults, bits = Table("keep", "predicted", "counted", "off", box=None), list[str](), set[str]()
    for each in sweep(config, 3):
        ran = run(each, 0)
        stage = dist.get_rank() if config.parallel.pipeline_parallel > 1 else 0
        layout = dataclasses.replace(each.parallel, memory_budget="")
        predicted = predicted_memory(dataclasses.replace(each, parallel=layout), stage).total
        faults += _compared(table, each.parallel.keep, predicted, ran.peak)
        if ran.peak > float(each.parallel.memory_budget):
            faults.append(f"{each.parallel.keep}: {ran.peak} bytes, more than {each.parallel.memory_budget}")
        bits.add(ran.bits)
    Console(width=100).print(f"{name}, rank {dist.get_rank()}", table)
    assert not faults and len(bits) == 1, (name, dist.get_rank(), faults, bits)


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
    for dtype in MIXES:
        table, found = by_hand(dtype)
        console.print(f"by hand, in {dtype}: what is in host memory does not count", table)
        faults += found
    dist.destroy_process_group()
    faults += [f"{name}: a rank failed" for name in LAYOUTS if run_ranks(partial(of_ranks, name), 2)]
    console.print(*(faults or ["every budget holds, with the same bits"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
