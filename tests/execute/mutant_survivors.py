"""The mutants that the executor lets pass, each with the reason.

Belongs here: the list, and what is said where it and an execution disagree. Names are those that Triton 3.7 gives.
"""

from collections.abc import Iterable

from mutant_trials import Verdict
from ptx_mutants import Mutant

LIST = "tests/execute/mutant_survivors.py"
REASONS = {
    "counter": "Equivalent: the barrier by which all warps get the counter's value stands between their stores and the "
    "release, and no warp stores into the slot after it.",
    "report": "Equivalent: one thread stores all words of the report, and the same thread releases the first of them.",
    "first use": "Equivalent: the program has not used shared memory before.",
    "end": "Equivalent: it stands behind the K loop, and the program ends there.",
    "answer": "Equivalent with this layout: a barrier stands behind the last reads of shared memory, and of the copies "
    "of zeros behind that one the same thread makes the one to the word in which the next poll puts its answer.",
    "next barrier": "Equivalent: behind it stands a wait, which has a barrier before it uses shared memory.",
    "last group": "Equivalent with this layout: the copies of the last group bring zeros to the second operand's "
    "buffer, in which nothing is put after the K loop.",
}
BARRIER = 'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, `'
LOAD = "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No`"
POLL = 'barrier deleted, `poll: seen = tl.atomic_add(flags, 0, sem="acquire", scope="s`'
PUSH_ROWS = "for `push_rows(me, shard, reach(limit, WORLD), program, pushers, `"
PUSH_TILES = "for `push_tiles(problem, (a0, a1, a2), (b0, b1, b2), me, program,`"
LINEAR_TILES = "for `linear_tiles(problem, a, b0, b1, b2, 0, 0, tl.program_id(0),`"
OWN_TILES = "for `linear_tiles(problem, a, b0, b1, b2, virtual * rows, me.rank`"
GATHERED_TILES = "for `linear_tiles(problem, slot, b0, b1, b2, first, chunk, start,`"
WAIT, WAIT_ALL = (
    "for `limit = wait(me, own_flags, chunk, limit)`",
    "for `limit = wait(me, own_flags + row_block, 0, limit, WORLD)`",
)
WAIT_TILE = "for `limit = wait(me, own_flags + tile, 0, limit, WORLD)`"
WAIT_SUM = "for `limit = wait(me, own_flags + tiles + summed, owner, limit)`"
K_LOOP = "for i in range(tl.cdiv(end - begin, programs) "
SCATTER = {
    f"{BARRIER} {PUSH_TILES} in 1 loop #2": "counter",
    f"barrier deleted, `push_tiles: {K_LOOP}* ` {PUSH_TILES} #1": "next barrier",
    f"wait for one copy fewer, `push_tiles: {K_LOOP}* ` {PUSH_TILES} #1": "last group",
    f"{BARRIER} {WAIT_ALL} in 1 loop #1": "report",
}
# by case: the mutant's name -> a key of REASONS
SURVIVORS: dict[str, dict[str, str]] = {
    "matmul": {
        f"{LOAD} {LINEAR_TILES} #1": "first use",
        **{
            f"{edit}, `linear_tiles: {K_LOOP}` {LINEAR_TILES} #1": "end"
            for edit in ("barrier deleted", "wait for copies deleted", "wait for one copy fewer")
        },
    },
    "matmul_reduce_scatter": SCATTER,
    "matmul_reduce_scatter, finished": SCATTER,
    "await_gathered": {
        f"{BARRIER} {PUSH_ROWS} #1": "counter",
        f"{BARRIER} {PUSH_ROWS} #2": "counter",
        f"{BARRIER} {WAIT} #1": "report",
        f"{BARRIER} {WAIT} #2": "report",
        f"{POLL} {WAIT} #1": "first use",
    },
    "all_gather_matmul": {
        f"{BARRIER} {PUSH_ROWS} #1": "counter",
        f"{BARRIER} {PUSH_ROWS} #2": "counter",
        f"{BARRIER} {WAIT} in 1 loop #1": "report",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {OWN_TILES} #1": "answer",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {GATHERED_TILES} in 1 loop #1": "answer",
    },
    "all_gather_matmul, 3 weights": {
        f"{BARRIER} {PUSH_ROWS} #1": "counter",
        f"{BARRIER} {WAIT} #1": "report",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {OWN_TILES} #1": "answer",
        **{
            f"{edit}, `linear_tiles: {K_LOOP}` {GATHERED_TILES} #1": "end"
            for edit in ("barrier deleted", "wait for copies deleted", "wait for one copy fewer")
        },
    },
    "matmul_all_reduce, one shot": {f"{BARRIER} {WAIT_TILE} in 2 loops #1": "report"},
    "matmul_all_reduce, two shots": {
        f"{BARRIER} {WAIT_TILE} in 2 loops #1": "report",
        f"{BARRIER} {WAIT_SUM} in 2 loops #1": "report",
    },
}


def reason_of(name: str, mutant: Mutant) -> str | None:
    """The key of the reason why a mutant is equivalent; None if it is not listed."""
    return SURVIVORS.get(name, {}).get(mutant.name)


def complaint(name: str, mutant: Mutant, verdict: Verdict) -> str | None:
    """A sentence if a mutant survives that is not listed, or one is caught that is: what it is, and what to do."""
    listed = reason_of(name, mutant)
    if verdict.executor and listed:
        return (
            f"{name}: {mutant.name} ({mutant.where}) is listed as {listed!r}, and the executor finds: "
            f"{verdict.message}. Remove it from SURVIVORS in {LIST}"
        )
    if not verdict.executor and not listed:
        return (
            f"{name}: {mutant.name} ({mutant.where}) survives, and is not listed. Find out why: either let CASES or "
            f"TRIES in mutant_trials.py take a path that shows it, or, if it computes the same on every path, add its "
            f"name with that reason to SURVIVORS in {LIST}"
        )
    return None


def stale(name: str, mutants: Iterable[Mutant]) -> list[str]:
    """A sentence for each name that is listed, and that none of the case's mutants has."""
    missing = SURVIVORS.get(name, {}).keys() - {mutant.name for mutant in mutants}
    return [
        f"{name}: {each} is listed, and there is no such mutant: rename or remove it in SURVIVORS in {LIST}"
        for each in sorted(missing)
    ]
