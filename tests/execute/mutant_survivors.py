"""The mutants that the executor lets pass, each with the reason.

Belongs here: the list, and what is said where it and an execution disagree. Names are those that Triton 3.7 gives.
"""

from mutant_trials import Verdict
from ptx_mutants import Mutant

REASONS = {
    "counter": "Equivalent: the barrier by which all warps get the counter's value stands between their stores and the "
    "release, and no warp stores into the slot after it.",
    "report": "Equivalent: one thread stores all words of the report, and the same thread releases the first of them.",
    "own round": "Equivalent: it is never run. The compiler makes a round for each of the ranks that the shard goes "
    "to; the last is the own one, where no flag is set.",
    "first use": "Equivalent: a program that waits has not used shared memory before.",
    "prologue": "Equivalent: it stands between copies into two different buffers. The barrier before the first of them "
    "orders both behind the reads of the tile before.",
    "publish": "Equivalent: the barrier of a publication stands between the reads of the tile before and these copies.",
    "drain": "Equivalent: it stands behind the K loop, whose steps have waited for all copies.",
    "one piece": "Equivalent with these shapes: a unit is one piece, so this loop, which does not poll, has one round.",
    "first word": "Equivalent with this layout: the first thread overwrites a word of shared memory that, since the "
    "barrier before, only its own warp has read.",
}
# by case: the mutant's name -> a key of REASONS
SURVIVORS: dict[str, dict[str, str]] = {
    "matmul_reduce_scatter": {
        "wait for one copy fewer, `push_tiles: for _ in range(tl.cdiv(end - begin, programs) * ` #1": "drain",
    },
    "matmul_all_reduce, one shot": {
        "wait falls through, `matmul_all_reduce_kernel: for piece in tl.range(begin, reach` #1": "one piece",
        'barrier deleted, `poll: seen = tl.atomic_add(flag, 0, sem="acquire", scope="sy` #1': "first word",
    },
    "matmul": {
        **dict.fromkeys(
            (
                f"{edit}, `linear_tiles: for _ in range(tl.cdiv(end - begin, programs) ` #1"
                for edit in ("barrier deleted", "wait for copies deleted", "wait for one copy fewer")
            ),
            "drain",
        ),
        "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No` #2": "prologue",
    },
    "matmul_reduce_scatter, finished": {},
    "matmul_all_reduce, two shots": {
        "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No` #1": "publish",
        'barrier deleted, `poll: seen = tl.atomic_add(flag, 0, sem="acquire", scope="sy` #5': "first word",
    },
    "await_gathered": {
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #1': "counter",
        **dict.fromkeys(
            (
                "barrier deleted, `push_rows: tl.debug_barrier()  # so that the count covers al` #3",
                *(
                    f'{edit}, `push_rows: if tl.atomic_add(counter, 1, sem="acq_rel", scope` #3'
                    for edit in (
                        "acq_rel to relaxed",
                        "acq_rel to acquire",
                        "acq_rel to release",
                        "scope gpu to cta",
                        "barrier deleted",
                    )
                ),
                'release to relaxed, `publish: tl.atomic_xchg(flag, epoch, sem="release", scope="s` #3',
                'scope sys to gpu, `publish: tl.atomic_xchg(flag, epoch, sem="release", scope="s` #3',
            ),
            "own round",
        ),
        'barrier deleted, `poll: seen = tl.atomic_add(flag, 0, sem="acquire", scope="sy` #1': "first use",
    },
    "all_gather_matmul": {
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #1': "counter",
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #2': "counter",
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #3': "report",
    },
    "all_gather_matmul, 3 weights": {
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #1': "counter",
        'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, ` #2': "report",
    },
}


def reason_of(name: str, mutant: Mutant) -> str | None:
    """The key of the reason why a mutant is equivalent; None if it is not listed."""
    return SURVIVORS.get(name, {}).get(mutant.name)


def complaint(name: str, mutant: Mutant, verdict: Verdict) -> str | None:
    """A sentence if a mutant survives that is not listed, or one is caught that is."""
    listed = reason_of(name, mutant)
    if verdict.executor and listed:
        return f"{name}: {mutant.name} is listed as {listed}, and the executor finds: {verdict.message}"
    if not verdict.executor and not listed:
        return f"{name}: {mutant.name} ({mutant.where}) survives, and is not listed"
    return None
