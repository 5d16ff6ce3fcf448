"""The mutants that the executor lets pass, each with the reason.

Belongs here: the list, and what is said where it and an execution disagree. Names are those that Triton 3.7 gives.
"""

from mutant_trials import Verdict
from ptx_mutants import Mutant

REASONS = {
    "counter": "Equivalent: the barrier by which all warps get the counter's value stands between their stores and the "
    "release, and no warp stores into the slot after it.",
    "report": "Equivalent: one thread stores all words of the report, and the same thread releases the first of them.",
    "own": "Equivalent: it is the own rank's flag. Readers are on the same GPU, or are a later launch of the stream.",
    "prologue": "Equivalent: it stands between copies into two different buffers. The barrier before the first of them "
    "orders both behind the reads of the tile before.",
    "publish": "Equivalent: the barrier of a publication stands between the reads of the tile before and these copies.",
    "first word": "Equivalent with this layout: the first thread overwrites a word of shared memory that, since the "
    "barrier before, only its own warp has read.",
}
# by case: the mutant's name -> a key of REASONS
SURVIVORS: dict[str, dict[str, str]] = {
    "matmul_reduce_scatter": {
        "barrier deleted, `publish: tl.debug_barrier()` #1": "counter",
        "barrier deleted, `publish: tl.debug_barrier()` #2": "report",
        "barrier deleted, `publish: tl.debug_barrier()` #3": "report",
    },
    "matmul_all_reduce, one shot": {
        'scope sys to gpu, `publish: tl.atomic_xchg(flag, epoch, sem="release", scope="s` #2': "own",
        "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No` #1": "publish",
        'barrier deleted, `poll: seen = tl.atomic_add(flag, 0, sem="acquire", scope="sy` #1': "first word",
        "barrier deleted, `publish: tl.debug_barrier()` #3": "report",
        "barrier deleted, `publish: tl.debug_barrier()` #4": "report",
    },
    "matmul": {
        "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No` #2": "prologue",
    },
    "matmul_reduce_scatter, finished": {
        "barrier deleted, `publish: tl.debug_barrier()` #1": "counter",
        "barrier deleted, `publish: tl.debug_barrier()` #2": "report",
    },
    "matmul_all_reduce, two shots": {
        "barrier deleted, `publish: tl.debug_barrier()` #2": "report",
        'barrier deleted, `poll: seen = tl.atomic_add(flag, 0, sem="acquire", scope="sy` #5': "first word",
        "barrier deleted, `publish: tl.debug_barrier()` #5": "report",
    },
    "await_gathered": {
        "barrier deleted, `publish: tl.debug_barrier()` #1": "own",
        'release to relaxed, `publish: tl.atomic_xchg(flag, epoch, sem="release", scope="s` #1': "own",
        'scope sys to gpu, `publish: tl.atomic_xchg(flag, epoch, sem="release", scope="s` #1': "own",
        "barrier deleted, `publish: tl.debug_barrier()` #4": "report",
        "barrier deleted, `publish: tl.debug_barrier()` #5": "report",
    },
    "all_gather_matmul": {
        "barrier deleted, `publish: tl.debug_barrier()` #3": "report",
    },
    "all_gather_matmul, 3 weights": {
        "barrier deleted, `publish: tl.debug_barrier()` #2": "report",
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
