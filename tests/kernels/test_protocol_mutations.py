"""Each way to break the protocol gives wrong values or an error on real ranks, in a schedule that the protocol
survives.

schedules.py arranges the order of events, so that no result depends on timing. The interpreter runs in order, so it
does not see barriers, releases, fences and the place of waits: tests/checks/test_compile_mutations.py checks those in
compiled code, and tests/execute/execute_mutants.py executes them.
"""

import pytest
from pool import WorkerPool

pytest.importorskip("triton")

from mutations import Edit, move, mutated_packages, replace
from schedules import BEFORE, OPERATIONS, TWO_PHASES, run_all

NAMES = set(OPERATIONS)
REPORT = [1, 2, BEFORE, BEFORE + 1]  # expired, peer, epoch seen, epoch wanted

Mutation = dict[str, list[Edit]]  # by file
MUTATIONS: dict[str, Mutation] = {
    # matmul_reduce_scatter then sets a flag with the first tile of a block of rows instead of the last
    "flags before the payload": {
        "all_gather_matmul/kernel.py": [
            replace("if step > 1:", "if step < WORLD:"),
            replace("last = (me.rank + WORLD + 1 - step) % WORLD", "last = peer"),
        ],
        "matmul_reduce_scatter/kernel.py": [replace("== tiles_n - 1", "== 0")],
        "matmul_all_reduce/kernel.py": [
            move("for peer in tl.static_range(WORLD // CHUNKS)", "if ONE_SHOT:\n                announce("),
        ],
    },
    "slot 0 in both parities": {
        "protocol.py": [replace("(me.epoch & 1).to(tl.int64)", "(me.epoch & 0).to(tl.int64)")],
        "all_gather_matmul/kernel.py": [replace("& 1) == 1", "& 0) == 1")],
        "all_gather_grouped_matmul/kernel.py": [replace("& 1) == 1", "& 0) == 1")],
    },
    "waits accept the epoch before": {
        "protocol.py": [
            replace("(seen - epoch, PEERS) < 0", "(seen - epoch, PEERS) < -1"),
            replace("(seen - me.epoch, PEERS) < 0", "(seen - me.epoch, PEERS) < -1"),
        ]
    },
    "waits compare without wrap": {
        "protocol.py": [
            replace("least(seen - epoch, PEERS) < 0", "least(seen, PEERS) < epoch"),
            replace("least(seen - me.epoch, PEERS) < 0", "least(seen, PEERS) < me.epoch"),
        ]
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


# (mutation, schedule, operations in which the watched rank then finds something else, what it finds)
CAUGHT: list[tuple[str, str, set[str], object]] = [
    ("slot 0 in both parities", "ahead", NAMES, "wrong"),
    ("waits accept the epoch before", "late", NAMES, "wrong"),
    ("waits accept the epoch before", "absent", NAMES, [0, 0, 0, 0]),
    ("waits compare without wrap", "late", NAMES, "wrong"),
    ("waits compare without wrap", "ahead", NAMES, "error"),
    ("flags before the payload", "late", NAMES, "wrong"),
    ("the last rank is not awaited", "absent", NAMES, [0, 0, 0, 0]),
]
WORLD = {"late": 2, "ahead": 2, "absent": 3}
WATCHED = {"late": 1, "ahead": 1, "absent": 0}
UNMUTATED = {"late": "right", "ahead": "right", "absent": REPORT}


packages = mutated_packages("mutated", MUTATIONS)


@pytest.mark.parametrize("schedule", WATCHED)
def test_the_protocol_stands_every_schedule(interpreted: WorkerPool, schedule: str) -> None:
    results = interpreted(WORLD[schedule]).run(run_all, schedule, "tpformer.kernels", sorted(NAMES))
    for rank in (0, 1) if schedule != "absent" else (0,):
        assert results[rank] == dict.fromkeys(NAMES, UNMUTATED[schedule])


@pytest.mark.proof
@pytest.mark.parametrize("mutation, schedule, operations, found", CAUGHT, ids=[", ".join(row[:2]) for row in CAUGHT])
def test_a_mutation_is_caught(
    interpreted: WorkerPool, packages: dict[str, str], mutation: str, schedule: str, operations: set[str], found: object
) -> None:
    results = interpreted(WORLD[schedule]).run(run_all, schedule, packages[mutation], sorted(operations))
    assert results[WATCHED[schedule]] == dict.fromkeys(operations, found)


def test_a_rank_that_gave_up_leaves_its_peers_alone(interpreted: WorkerPool) -> None:
    """Its peers have its part of the operation. If they need its sums, of what it did not receive, they report that
    these are missing."""
    results = interpreted(2).run(run_all, "gave up", "tpformer.kernels", sorted(NAMES))
    for name in NAMES:
        assert [result[name] for result in results] == [
            ("error", True),
            ("error" if name in TWO_PHASES else "right", True),
        ], name


@pytest.mark.proof
@pytest.mark.parametrize(
    "mutation, wrong",
    [
        ("a rank that gave up still pushes", NAMES),
        ("a rank forgets that it gave up", NAMES - TWO_PHASES),  # whose second phase still knows
    ],
    ids=["it still pushes", "it forgets"],
)
def test_a_rank_that_gave_up_and_goes_on_is_caught(
    interpreted: WorkerPool, packages: dict[str, str], mutation: str, wrong: set[str]
) -> None:
    gave_up, healthy = interpreted(2).run(run_all, "gave up", packages[mutation], sorted(NAMES))
    assert gave_up == dict.fromkeys(NAMES, ("error", False))
    assert {name for name, (verdict, _) in healthy.items() if verdict == "wrong"} == wrong
