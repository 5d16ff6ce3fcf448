"""The list of benches, and of the checks that have a table and a picture of their own.

Belongs here: one import and one entry for each. Everything else is in runner.py or in the bench's own file.
"""

import sys

from checks import faults, host, layouts, observe, replicas, zero
from harness.runner import Bench, main

from . import (
    bubbles,
    ceilings,
    constants,
    cpu,
    fused,
    gathered_experts,
    grouped_matmul,
    in_place,
    layer,
    matmul,
    matmul_trials,
    memory,
    nvlink,
    optimizers,
    planner,
    pretrain,
    protocol,
    quantized_matmul,
    rounds,
    two_sites,
)
from .data_parallel import bench as data_parallel
from .families import matrix as families
from .gates import gates
from .gpu import command
from .memory_bound import benches as memory_bound

KERNELS: tuple[Bench, ...] = (
    matmul.BENCH,
    grouped_matmul.BENCH,
    *fused.BENCHES,
    gathered_experts.BENCH,
    quantized_matmul.BENCH,
    *memory_bound.BENCHES,
    layer.BENCH,
)
BENCHES: tuple[Bench, ...] = (
    *(
        cpu.BENCH,
        memory.BENCH,
        pretrain.BENCH,
        bubbles.BENCH,
        data_parallel.BENCH,
        layouts.BENCH,
        replicas.BENCH,
        zero.BENCH,
    ),
    *(
        families.BENCH,
        in_place.BENCH,
        planner.BENCH,
        faults.BENCH,
        observe.BENCH,
        optimizers.BENCH,
        rounds.BENCH,
        two_sites.BENCH,
        protocol.BENCH,
        host.BENCH,
    ),
    *(ceilings.BENCH, constants.BENCH, matmul_trials.BENCH, gates(KERNELS), *KERNELS, nvlink.BENCH),
)

if __name__ == "__main__":  # worker processes import this module again
    if sys.argv[1:2] == ["gpu"]:
        sys.exit(command.main(sys.argv[2:]))
    sys.exit(main(sys.argv[1:], BENCHES))
