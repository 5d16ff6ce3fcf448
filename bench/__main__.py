"""The list of benches.

Belongs here: one import and one entry per bench. Everything else is in runner.py or in the bench's own file.
"""

import sys

from . import bubbles, cpu, fused, layer, layouts, matmul, memory, nvlink, pretrain, zero
from .memory_bound import benches as memory_bound
from .runner import Bench, main

BENCHES: tuple[Bench, ...] = (
    *(cpu.BENCH, memory.BENCH, pretrain.BENCH, bubbles.BENCH, layouts.BENCH, zero.BENCH),
    *(matmul.BENCH, *fused.BENCHES, *memory_bound.BENCHES, layer.BENCH, nvlink.BENCH),
)

if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main(sys.argv[1:], BENCHES))
