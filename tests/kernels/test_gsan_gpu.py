"""GSan, Triton's race sanitizer for global memory, finds no race in the fused GEMMs, and does find a planted one.

All virtual ranks run in one launch on one GPU, with fewer programs than SMs, because GSan takes an SM for a thread. It
sees a program read what another wrote without a release and an acquire between. It does not look inside a program, and
on one GPU it cannot see a scope that is too narrow (the compile check can). A race ends the CUDA context, so each run
is a process: this file, started with a kernel's name.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import test_virtual_ranks_gpu as virtual
import triton
import triton.language as tl
from channels import virtual_channel
from gemms import cast, stacked

from tpformer.kernels.protocol import bump

TESTS = Path(__file__).parent.parent
PATIENCE = 170  # seconds of a run: instrumented kernels are large and slow
LIMIT = 10**6  # polls
SHAPE = (66, 136, 64)  # rows per rank, N, K: two tiles each way
RACE, CLEAN = "race detected", "no race"


@triton.jit
def relaxed_wait(me, flag, first, limit, PEERS: tl.constexpr = 1):
    """protocol.wait without its acquire."""
    for step in range(PEERS):
        each = flag + (first + step) % me.world * me.writer_flags
        seen = tl.atomic_add(each, 0, sem="relaxed", scope="sys")
        polls = 0
        while (seen - me.epoch < 0) & (polls < limit):
            seen = tl.atomic_add(each, 0, sem="relaxed", scope="sys")
            polls += 1
    return limit


def missing() -> str | None:
    if importlib.util.find_spec("triton.experimental.gsan") is None:
        return f"triton {triton.__version__} has no GSan, which came with 3.8"
    return None


def run_sanitized(name: str, world: int, planted: bool) -> None:
    """Run one operation in each parity, each with a workspace of its own. In one workspace, polls of a flag that was
    once released would fill a buffer that GSan needs for real releases."""
    from triton.experimental import gsan

    if planted:
        kernel = name.removesuffix("_one_shot").removesuffix("_two_shot")
        importlib.import_module(f"tpformer.kernels.{kernel}.kernel").wait = relaxed_wait
    triton.knobs.compilation.instrumentation_mode = "gsan"
    gemm, kept = virtual.LATE[name], []
    with torch.cuda.use_mem_pool(gsan.create_mem_pool()):
        for epoch in (0, 1):
            channel = virtual_channel(world, 1 << 20, 256, epoch=epoch, limit=LIMIT, device="cuda")
            exact = virtual.whole_numbers(gemm, world, SHAPE, epoch, "cuda")
            inputs = stacked(cast(exact, torch.bfloat16, "cuda"))
            bump(channel)
            outputs = gemm.launch(inputs, channel, virtual.smallest_tile("cuda", torch.bfloat16, SHAPE[1]))
            torch.cuda.synchronize()
            assert not channel.error.any(), channel.error
            for rank, wide in enumerate(gemm.reference(exact)):
                for y, expected in zip(outputs, wide, strict=True):
                    assert torch.equal(y.chunk(world)[rank], expected.bfloat16()), (name, epoch, rank)
            kept.append((channel, inputs, outputs))
    print(CLEAN)


@pytest.mark.gpu
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("planted", [False, True], ids=["as shipped", "planted race"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", virtual.LATE)
def test_races(name: str, world: int, planted: bool) -> None:
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths + [p for p in sys.path if p])}
    command = [sys.executable, __file__, name, str(world), str(int(planted))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if planted:
        assert CLEAN not in result.stdout and RACE in result.stderr, result.stderr[-4000:]
    else:
        assert CLEAN in result.stdout and RACE not in result.stderr, result.stderr[-4000:]


if __name__ == "__main__":
    run_sanitized(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])))
