"""Each way to break the protocol gives wrong values or an error on real ranks, in a schedule that the protocol
survives.

schedules.py arranges the order of events, so that no result depends on timing. The interpreter runs in order, so it
does not see barriers, releases, fences and the place of waits: tests/checks/test_compile_mutations.py checks those in
compiled code, and tests/execute/execute_mutants.py executes them.
"""

import pytest
from mutations import Edit, move, mutated_packages, replace
from pool import WorkerPool
from schedules import BEFORE, NAMES, SCHEDULES, TWO_PHASES, run_all
from turns import in_turns

REPORT = [1, 2, BEFORE, BEFORE + 1]  # expired, peer, epoch seen, epoch wanted

MUTATIONS: dict[str, dict[str, list[Edit]]] = {  # by file
    # matmul_reduce_scatter then sets a flag with the first tile of a block of rows instead of the last
    "flags before the payload": {
        "all_gather_matmul/kernel.py": [
            replace("if step > 1:", "if step < WORLD:"),
            replace("last = (me.rank + WORLD + 1 - step) % WORLD", "last = peer"),
        ],
        "matmul_reduce_scatter/kernel.py": [replace("== tiles_n - 1", "== 0")],
        "matmul_all_reduce/kernel.py": [
            move("for peer in tl.static_range(WORLD // CHUNKS)", "if ONE_SHOT:\n                announce(")
        ],
    },
    "slot 0 in both parities": {
        "protocol.py": [replace("(me.epoch & 1).to(tl.int64)", "(me.epoch & 0).to(tl.int64)")],
        "all_gather_matmul/kernel.py": [replace("& 1) == 1", "& 0) == 1")],
        "all_gather_grouped_matmul/kernel.py": [replace("& 1) == 1", "& 0) == 1")],
    },
    "waits accept the epoch before": {
        "protocol.py": [replace(f"- {epoch}, PEERS) < 0", f"- {epoch}, PEERS) < -1") for epoch in ("epoch", "me.epoch")]
    },
    "waits compare without wrap": {
        "protocol.py": [replace(f" - {epoch}, PEERS) < 0", f", PEERS) < {epoch}") for epoch in ("epoch", "me.epoch")]
    },
    "the last rank is not awaited": {
        "all_gather_matmul/kernel.py": [
            replace("in range(second, WORLD):", "in range(second, WORLD - 1):"),
            replace("in range(1, WORLD):", "in range(1, WORLD - 1):"),
        ],
        "all_gather_grouped_matmul/kernel.py": [replace("in range(second, WORLD):", "in range(second, WORLD - 1):")],
        "matmul_reduce_scatter/kernel.py": [replace("0, limit, WORLD)", "0, limit, WORLD - 1)")],
        "matmul_all_reduce/kernel.py": [
            replace("0, limit, WORLD)", "0, limit, WORLD - 1)"),
            replace("copy % PEERS)", "copy % (PEERS - 1))"),  # nor are its sums
        ],
    },
    "a rank that gave up still pushes": {"protocol.py": [replace("tl.where(limit > 0, WORLD, 0)", "WORLD")]},
    "a rank forgets that it gave up": {
        "protocol.py": [replace("tl.where(tl.load(stopped + 1) == 0, links.limit, 0)", "links.limit")]
    },
}


# (mutation, schedule, a rank, operations in which it then finds something else, what it finds)
CAUGHT: list[tuple[str, str, int, set[str], object]] = [
    ("slot 0 in both parities", "ahead", 1, NAMES, "wrong"),
    ("waits accept the epoch before", "late", 1, NAMES, "wrong"),
    ("waits accept the epoch before", "absent", 0, NAMES, [0, 0, 0, 0]),
    ("waits compare without wrap", "late", 1, NAMES, "wrong"),
    ("waits compare without wrap", "ahead", 1, NAMES, "error"),
    ("flags before the payload", "late", 1, NAMES, "wrong"),
    ("the last rank is not awaited", "absent", 0, NAMES, [0, 0, 0, 0]),
    ("a rank that gave up still pushes", "gave up", 0, NAMES, ("error", False)),
    ("a rank that gave up still pushes", "gave up", 1, NAMES, ("wrong", True)),
    ("a rank forgets that it gave up", "gave up", 0, NAMES, ("error", False)),
    ("a rank forgets that it gave up", "gave up", 1, NAMES - TWO_PHASES, ("wrong", True)),  # its second phase knows
]
# what ranks 0 and 1 find. The peer of a rank that gave up has its part of an operation. If it needs that rank's sums of
# what it did not receive, it reports that these are missing.
FOUND = {
    "late": [dict.fromkeys(NAMES, "right")] * 2,
    "ahead": [dict.fromkeys(NAMES, "right")] * 2,
    "absent": [dict.fromkeys(NAMES, REPORT)] * 2,
    "gave up": [
        dict.fromkeys(NAMES, ("error", True)),
        {name: ("error" if name in TWO_PHASES else "right", True) for name in NAMES},
    ],
}
WORLD = {name: 3 if name == "absent" else 2 for name in SCHEDULES}

packages = mutated_packages("mutated", MUTATIONS)


@pytest.mark.parametrize("schedule", ["late", "gave up", *in_turns(["ahead", "absent"], first=0)])
def test_the_protocol_stands_every_schedule(interpreted: WorkerPool, schedule: str) -> None:
    results = interpreted(WORLD[schedule]).run(run_all, schedule, "tpformer.kernels", NAMES)
    assert results[:2] == FOUND[schedule]


@pytest.mark.parametrize("case", in_turns((each,) for each in CAUGHT), ids=lambda case: ", ".join(map(str, case[:3])))
def test_a_mutation_is_caught(interpreted: WorkerPool, packages: dict[str, str], case: tuple) -> None:
    mutation, schedule, rank, names, found = case
    results = interpreted(WORLD[schedule]).run(run_all, schedule, packages[mutation], names)
    assert results[rank] == dict.fromkeys(names, found)
