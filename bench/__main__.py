"""The list of benches.

Belongs here: one import and one entry per bench. Everything else is in runner.py or in the bench's own file.
"""

import sys

from . import cpu, fused, matmul, nvlink
from .runner import main

BENCHES = (cpu.BENCH, matmul.BENCH, *fused.BENCHES, nvlink.BENCH)

if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main(sys.argv[1:], BENCHES))
