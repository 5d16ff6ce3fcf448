"""How long does the host take to call a kernel, with its launches and TMA descriptors, before a GPU has anything to do?

Belongs here: the calls that are timed, and what stands in for the other ranks. Triton's launcher runs over the driver
of checks/driver, which is built without its notes: what is timed is Python, Triton's launcher and its encoder. What a
GPU's driver takes for a launch or a copy is not in it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from checks.driver.stub import VARIABLE, Stub, build, missing
from harness.ratios import compared, draw_ratios, ratios
from harness.runner import Bench, Report, columns
from harness.timing import interleave

if TYPE_CHECKING:
    from tpformer.ops.transports.fused import Fused

ROOT = Path(__file__).parents[1]
OURS, TRITONS = "from plans", "in Triton's way"
REQUIRED = 1.5  # of Triton's way, for every call of one operation
WORLD, CAPABILITY = 8, 90
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
ROUNDS, CALLS, BLOCK_CALLS = 7, 200, 20
BLOCK: dict[str, Any] = {"hidden_size": 128, "n_heads": 8, "ffn_hidden_size": 512}
BLOCKS: dict[str, dict] = {
    "GPT": {},
    "Llama": {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "rope_base": 1e4},
}
NOTE = (
    "CPU time of one process, which believes that it is rank 0 of 8 on H100s; no kernel runs, and a GPU's driver would "
    "take some microseconds more for each launch. Sizes are small, so that torch's allocator and what it computes on a "
    "CPU take little. A host does the same for large ones. launches, maps: kernels that are launched, and TMA "
    "descriptors that are encoded, by a call whose weights were used before. A block is that of rank 0, with sequence "
    "parallelism; its time contains torch's own operations on a CPU, weight gradients and attention among them."
)


class LocalMemory:
    """Symmetric memory of a group whose other ranks do not exist."""

    def __init__(self, nbytes: int) -> None:
        self.rank, self.size, self.nbytes, self.timeout, self.copied_flags = 0, WORLD, nbytes, 1.0, None
        self.regions = torch.zeros(WORLD, nbytes, dtype=torch.uint8)
        self.pointers = torch.tensor([region.data_ptr() for region in self.regions])
        self.words: dict[tuple[int, int], torch.Tensor] = {}

    def peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, byte_offset: int = 0) -> torch.Tensor:
        """A view of a rank's region."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.regions[rank][byte_offset : byte_offset + nbytes].view(dtype).view(shape)

    def set_flag(self, rank: int, byte_offset: int, value: int, source: torch.Tensor) -> None:
        """Store a word in a rank's region, by one operation of torch as on a GPU."""
        if (rank, byte_offset) not in self.words:
            self.words[rank, byte_offset] = self.peer(rank, (1,), torch.int32, byte_offset)
        self.words[rank, byte_offset].fill_(value)

    def barrier(self) -> None:
        """There is nobody to meet."""

    def close(self) -> None:
        """There is nothing to give back."""


def pretend(stack: ExitStack) -> Any:
    """A group of which this process believes that its kernels run here."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tpformer.distributed import kernel_workspace
    from tpformer.distributed.groups import kernel_state
    from tpformer.kernels import operands
    from tpformer.ops import implementation

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    kernel_state(dist.group.WORLD).reasons[CPU] = None
    stand_ins: dict = {
        (kernel_workspace, "allocate"): lambda nbytes, *_: LocalMemory(nbytes),
        (kernel_workspace, "gather_objects"): lambda value, _: [value] * WORLD,
        (implementation, "_module"): lambda op, _: importlib.import_module(f"tpformer.kernels.{op}.kernel"),
        (operands, "readable"): lambda _: False,  # as on a GPU
    }
    for (module, name), stand_in in stand_ins.items():
        stack.enter_context(mock.patch.object(module, name, stand_in))
    return dist.group.WORLD


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


def operations(fused: Fused) -> dict[str, Callable[[], object]]:
    """What is called, by name: one operation each."""
    from tpformer.kernels.matmul.kernel import matmul

    shard, weights = zeros(16, 512), [zeros(64, 512) for _ in range(3)]
    x, row_weight, other = zeros(128, 64), zeros(128, 64), zeros(512, 64)

    def reduce(scatter: bool) -> Callable[[], object]:
        carrier = type(fused)(fused.group, scatter)
        return lambda: carrier.matmul_reduce([x], [row_weight], transposed=True)

    return {
        "GEMM": lambda: matmul(shard, weights[:1]),
        "GEMM, three weights": lambda: matmul(shard, weights),
        "gather + GEMM": lambda: fused.gather_matmul(shard, weights[:1], [None]),
        "gather + GEMM, three weights": lambda: fused.gather_matmul(shard, weights, [None] * 3),
        "gather + GEMM, derivative": lambda: fused.gather_matmul_derivative(shard, other, x, None, "gelu"),
        "gather": lambda: fused.start_gather(shard)(),
        "GEMM + reduce-scatter": reduce(True),
        "GEMM + all-reduce": reduce(False),
    }


def copies(fused: Fused) -> dict[str, Callable[[], object]]:
    """The same of gathers that copy engines do."""
    shard, weight = zeros(16, 512), zeros(64, 512)

    def prepare() -> None:
        _, workspace, _ = fused._begin_gather("all_gather", shard, None, keep=True)
        workspace.end()

    return {
        "gather by copies + GEMM": lambda: fused.gather_matmul(shard, [weight], [None]),
        "gather by copies, preparation": prepare,
    }


def blocks(group: Any) -> dict[str, Callable[[], object]]:
    """Forward and backward of transformer blocks."""
    from torch.distributed.device_mesh import DeviceMesh

    from tpformer.layers import Positions, transformer_block
    from tpformer.layers.tensor_parallel import TensorParallel

    tp = TensorParallel(DeviceMesh.from_group(group, "cpu"), True, "fused")
    found: dict[str, Callable[[], object]] = {}
    for name, options in BLOCKS.items():
        block = transformer_block(**BLOCK, tp=tp, dtype=DTYPE, **options)
        x, dy = zeros(8, BLOCK["hidden_size"]).requires_grad_(), zeros(8, BLOCK["hidden_size"])
        positions, inputs = Positions(1, 8 * WORLD), [x, *block.parameters()]

        def forward(block: Any = block, x: torch.Tensor = x, positions: Any = positions) -> torch.Tensor:
            return block(x, positions=positions)

        def both(forward: Any = forward, inputs: list = inputs, dy: torch.Tensor = dy) -> object:
            return torch.autograd.grad(forward(), inputs, dy)

        found |= {f"{name} block, forward": forward, f"{name} block, forward and backward": both}
    return found


def timed(call: Callable[[], object], calls: int, ours: bool) -> Callable[[], float]:
    """A sample: CPU seconds of one call, the mean of many."""
    from tpformer.kernels import replay

    def sample() -> float:
        with ExitStack() as stack:
            if not ours:
                stack.enter_context(mock.patch.object(replay, "driver_of_launches", lambda: None))
            call()
            start = time.process_time()
            for _ in range(calls):
                call()
            return (time.process_time() - start) / calls

    return sample


def measure(path: Path, rounds: int) -> dict[str, dict]:
    """CPU seconds of each round in both ways, and what one call brings to the driver, by call."""
    stub = Stub(path, CAPABILITY, quiet=True)
    launches, maps = (ctypes.c_long.in_dll(stub.library, name) for name in ("launches", "maps"))
    torch.set_num_threads(1)
    found = {}
    with ExitStack() as stack:
        group = pretend(stack)
        from tpformer.ops.transports import fused

        transport = fused.Fused(group)
        for copied, calls in ((False, operations(transport)), (True, copies(transport)), (False, blocks(group))):
            with mock.patch.object(fused, "send_by_copies", lambda *_, copied=copied: copied):
                for name, call in calls.items():
                    for _ in range(3):
                        call()
                    before = launches.value, maps.value
                    call()
                    counts = launches.value - before[0], maps.value - before[1]
                    repetitions = BLOCK_CALLS if "block" in name else CALLS
                    samples = {way: timed(call, repetitions, way == OURS) for way in (OURS, TRITONS)}
                    found[name] = {"seconds": interleave(samples, rounds), "counts": counts}
    return found


def measured(rounds: int) -> dict[str, dict]:
    """`measure` in a process of its own, as Triton looks for its driver once."""
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), "-DQUIET")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {VARIABLE: folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "checks.host", str(path), str(rounds)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def run(options: argparse.Namespace) -> Report:
    """The times of all calls, and their counts."""
    found = measured(2 if options.quick else ROUNDS)
    counts, rows = columns(("call",), ("launches", "maps")), []
    for name, one in found.items():
        counts.add_row(name, *map(str, one["counts"]))
        bar = () if "block" in name or "copies" in name else (REQUIRED,)
        rows += compared("host", name, one["seconds"], [(OURS, TRITONS, *bar)])
    report = ratios(lambda quick: rows)(options)
    content = {**report.content, "counts": {name: one["counts"] for name, one in found.items()}}
    return report._replace(tables=[*report.tables, counts], content=content)


BENCH = Bench(
    name="host",
    description="host time of calls: Triton's launcher over a driver without a GPU, from plans and without",
    obstacle=missing,
    run=run,
    draw=draw_ratios,
    note=NOTE,
)

if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
