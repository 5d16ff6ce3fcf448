"""What does this GPU reach at best, where every other number here is a share of it: copies and torch's GEMMs.

Belongs here: the two ceilings, on random data, beside what kernels/cost.py assumes. On zeros a GPU is faster.
"""

from functools import partial

import torch

from harness.ratios import Row, compared, ratio_bench
from harness.timing import FULL, QUICK, Call, copying, measure

from .predict import present_machine

DEVICE, DTYPE = "cuda", torch.bfloat16
COPIED = 2**30  # bytes read, and as many written
SIDES = (4096, 8192)  # of square matrices
MEASURED, ASSUMED = "measured", "kernels/cost.py"


def rows(quick: bool) -> list[Row]:
    effort, machine = QUICK if quick else FULL, present_machine()
    seconds = measure({MEASURED: Call(copying(COPIED, DEVICE))}, effort) | {
        ASSUMED: [2 * COPIED / machine.memory] * effort.rounds
    }
    pair = [(MEASURED, ASSUMED)]
    found = compared("copy", f"{COPIED} bytes", seconds, pair, unit="TB/s", amount=2 * COPIED / 1e12)
    for side in SIDES:
        a, b = (torch.randn(side, side, device=DEVICE, dtype=DTYPE) for _ in range(2))
        flops = 2 * side**3
        seconds = measure({MEASURED: Call(partial(torch.matmul, a, b))}, effort)
        seconds |= {ASSUMED: [flops / machine.flops] * effort.rounds}
        found += compared("torch.matmul", f"{side}^3", seconds, pair, unit="TFLOP/s", amount=flops / 1e12)
    return found


BENCH = ratio_bench(
    rows,
    name="ceilings",
    description="bytes/s of a copy, FLOP/s of large GEMMs in bfloat16, on random data, beside what is assumed (1 GPU)",
    device="cuda",
    note="cold L2; torch.matmul is cuBLAS.",
)
