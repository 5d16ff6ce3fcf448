"""A kernel that stores and releases in turns, as programs of the fused kernels do; imports triton.

Belongs here: what bench constants launches.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpformer.kernels.protocol import barrier

FENCES = ("none", "sys", "gpu")  # after each turn's stores


@triton.jit
def release_kernel(place, flags, turns, COUNT: tl.constexpr, FENCE: tl.constexpr):
    """Each program stores COUNT elements and sets its flag, which has a cache line of its own, so many times."""
    program = tl.program_id(0)
    for turn in range(turns):
        if COUNT > 0:
            offsets = tl.arange(0, COUNT)
            tl.store(place + program.to(tl.int64) * COUNT + offsets, (offsets + turn).to(tl.bfloat16))
        if FENCE == "none":
            tl.debug_barrier()
        else:
            barrier()
            tl.atomic_xchg(flags + program * 32, turn, sem="release", scope=FENCE)


def release(place: Tensor, flags: Tensor, turns: int, nbytes: int, programs: int, fence: str) -> None:
    """place: bfloat16, room for nbytes of each program; flags (programs or more, 32) int32."""
    release_kernel[(programs,)](place, flags, turns, nbytes // place.element_size(), fence, num_warps=8)
