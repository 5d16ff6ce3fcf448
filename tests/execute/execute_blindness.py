"""What Triton's interpreter passes and the executor finds: kernels without a barrier, a release or an acquire, loads
that the compiler moves to before a wait, and bfloat16, in which the interpreter is wrong and raises nothing.

Both run the same mutated kernels. The interpreter runs them on processes, also in the schedule in which the receiver
reads as early as its waits allow. `make execute` names this file; `make test` does not collect it.
"""

import importlib
import itertools
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import execution
import pytest
import torch
from execution import PLAIN, SCHEDULES, TILE, executing, group
from pool import WorkerPool
from testing import assert_kernel_close
from torch import Tensor

pytest.importorskip("triton")

import schedules
from mutations import KERNELS, Edit, mutated_packages, replace

from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul.reference import matmul_reference

ROWS = 40  # 320 elements, which two pushers store, the first of them with all of its warps
IN_FLIGHT = 1024
DEVICE = SimpleNamespace(multi_processor_count=4, shared_memory_per_multiprocessor=4096)  # of four programs two push

# Waits do not acquire. Each step of the K loop does, before its loads, which is right in the order of the source. The K
# loop is in a loop over tiles here: the compiler moves no loads of a loop with all steps of all tiles and an acquire.
ACQUIRE_IN_K_LOOP: dict[str, list[Edit]] = {
    "protocol.py": [replace('sem="acquire"', 'sem="relaxed"')],
    "all_gather_matmul/kernel.py": [
        replace("linear_tiles(problem, a,", "linear_tiles((problem, own_flags + me.rank * me.writer_flags), a,"),
        replace("linear_tiles(problem, slot,", "linear_tiles((problem, own_flags + chunk * me.writer_flags), slot,"),
    ],
    "tile.py": [
        replace("    k, steps = problem.k,", "    problem, flags = problem\n    k, steps = problem.k,"),
        replace(
            "    for i in range(tl.cdiv(end - begin, programs) * steps):\n"
            "        # All that the next loads need stands before the product, or they would not run ahead of it.\n"
            "        step += 1\n        if step == steps:\n"
            "            tile, step = tile + programs, 0\n            right",
            "    for tile in range(begin, end, programs):\n      right",
        ),
        replace(
            "        result, part = multiply_step(\n",
            "      for step in range(steps):\n"
            '        seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")\n'
            "        result += (seen == -77).to(tl.float32)  # no epoch here; unused loads are left out\n"
            "        result, part = multiply_step(\n",
        ),
        replace("        if i == last:\n", "      if True:\n"),
    ],
}
ROUNDED = "a sum that is rounded in each step"
HOISTED = "loads that the compiler moves to before the acquire"
MUTATIONS: dict[str, dict[str, list[Edit]]] = {
    "no barrier before the release": {
        "protocol.py": [replace("bar.sync 0; ", ""), replace("tl.debug_barrier()", "pass")]
    },
    "no release": {"protocol.py": [replace('sem="release"', 'sem="relaxed"')]},
    "a release for its own GPU": {"protocol.py": [replace('sem="release", scope="sys"', 'sem="release", scope="gpu"')]},
    "no fence": {"protocol.py": [replace("fence.acq_rel.sys; ", "")]},
    "no acquire": {"protocol.py": [replace('sem="acquire"', 'sem="relaxed"')]},
    HOISTED: ACQUIRE_IN_K_LOOP,
    ROUNDED: {
        "tile.py": [
            replace(
                "accumulator = tl.dot(left, right, accumulator)",
                "accumulator = tl.dot(left, right, accumulator).to(left.dtype).to(tl.float32)",
            )
        ]
    },
}

# operation -> (file and text of the line that stores what a peer reads, and of the line that reads it)
PUSHED = ("all_gather_matmul/kernel.py", "tl.store(target + first")
TILE_LOADS = ("tile.py", "block = tl.load(source")
PACKED, ADDED = ("tile.py", "tl.store(target + offsets"), ("tile.py", "return tl.load(source + offsets")
LINES = {
    "await_gathered": (PUSHED, ("all_gather_matmul/kernel.py", "tl.store(out + at, tl.load(slot + at")),
    "all_gather_matmul": (PUSHED, TILE_LOADS),
    "matmul_reduce_scatter": (PACKED, ADDED),
    "matmul_all_reduce, one shot": (PACKED, ADDED),
    "matmul_all_reduce, two shots": (PACKED, ADDED),
}
RACES = [
    # where programs count before one of them releases, the count's own barriers stand behind the stores, too
    ("no barrier before the release", {"matmul_all_reduce, two shots"}),
    ("no release", {"await_gathered", "matmul_reduce_scatter", "matmul_all_reduce, two shots"}),
    ("a release for its own GPU", {"await_gathered"}),
    ("no fence", {"matmul_all_reduce, one shot", "matmul_all_reduce, two shots"}),
    ("no acquire", {"await_gathered"}),
    (HOISTED, {"all_gather_matmul"}),
]


packages = mutated_packages("blindness", MUTATIONS)


def interpreted_verdicts(package: str, names: list[str]) -> set[str]:
    """What the interpreter says of these operations on this rank, in an adverse schedule and in none."""
    return {
        verdict
        for name in names
        for verdict in (schedules.late(package, name), schedules.run(schedules.join(package), name, rows=ROWS))
    }


def execute(package: str, name: str, schedule, tile: Tile = TILE) -> tuple[list[str], list[bool]]:
    """(the executor's reports on an operation of two ranks, whether each one's result is right)."""
    inputs = schedules.make_inputs(0, 2, ROWS)
    outputs = []
    with (
        mock.patch.multiple(schedules, TILE=tile, IN_FLIGHT=IN_FLIGHT),
        mock.patch.object(execution, "DEVICE", DEVICE),
        executing(schedule, clean=False) as run,
    ):
        channels = group(2)
        run.memory.add(*channels[0].slots)
        for rank, channel in enumerate(channels):
            with run.on(rank):
                importlib.import_module(f"{package}.protocol").bump(channel)
                side = schedules.Side(package, cast(Any, None), channel)
                outputs.append(schedules.OPERATIONS[name].launch(side, inputs[rank]))
        run.run()
    expected = schedules.OPERATIONS[name].expected
    return run.log.reports, [torch.equal(out, expected(inputs, rank)) for rank, out in enumerate(outputs)]


def line(mutation: str, file: str, beginning: str) -> str:
    """file.py:12 of the one line of a mutated file that begins with a text."""
    source = (KERNELS / file).read_text()
    for edit in MUTATIONS[mutation].get(file, []):
        source = edit(source)
    found = [number for number, text in enumerate(source.splitlines(), 1) if text.strip().startswith(beginning)]
    assert len(found) == 1, (file, beginning, found)
    return f"{file.rpartition('/')[2]}:{found[0]}"


@pytest.mark.parametrize("mutation, names", RACES, ids=[mutation for mutation, _ in RACES])
def test_the_executor_names_both_lines_of_a_race_that_the_interpreter_passes(
    interpreted: WorkerPool, packages: dict[str, str], mutation: str, names: set[str]
) -> None:
    assert interpreted(2).run(interpreted_verdicts, packages[mutation], sorted(names)) == [{"right"}] * 2
    for name, schedule in itertools.product(names, SCHEDULES):
        stored, read = (line(mutation, *place) for place in LINES[name])
        reports, _ = execute(packages[mutation], name, schedule)
        assert any(f"{stored} (" in report and f"{read} (" in report for report in reports), (name, reports)


def test_nothing_is_found_in_kernels_as_they_are() -> None:
    for name in LINES:
        assert execute("tpformer.kernels", name, PLAIN) == ([], [True, True]), name


def test_without_a_pipeline_no_load_is_moved(packages: dict[str, str]) -> None:
    """So it is the compiler that makes the race, in code whose source is right."""
    assert execute(packages[HOISTED], "all_gather_matmul", PLAIN, TILE._replace(stages=1)) == ([], [True, True])


def product(package: str, dtype: torch.dtype, tile: Tile, steps: int) -> Tensor:
    """A product whose K is so many steps of 16 long. Each step adds 1 to the sum."""
    a, w = (torch.full((rows, 16 * steps), 0.25, dtype=dtype) for rows in (3, 5))
    return importlib.import_module(f"{package}.matmul.kernel").matmul(a, [w], tile=tile)[0]


def check_product(y: Tensor, steps: int) -> None:
    a, w = (torch.full((rows, 16 * steps), 0.25, dtype=y.dtype) for rows in (3, 5))
    assert_kernel_close(y, matmul_reference(a.double(), w.double()), matmul_reference(a, w), f"product in {y.dtype}")


def test_bfloat16_is_wrong_in_the_interpreter_and_right_in_the_executor(interpreted: WorkerPool) -> None:
    (y,) = interpreted(1).run(product, "tpformer.kernels", torch.bfloat16, schedules.TILE, 2)
    with pytest.raises(AssertionError, match="exceeds|not finite"):
        check_product(y, 2)
    with executing():
        check_product(product("tpformer.kernels", torch.bfloat16, TILE, 2), 2)


def test_a_defect_of_bfloat16_alone(interpreted: WorkerPool, packages: dict[str, str]) -> None:
    """A sum of bfloat16 stays at 256 when 1 is added. The interpreter has only float32 and float16, which go on."""
    for dtype in (torch.float32, torch.float16):
        (y,) = interpreted(1).run(product, packages[ROUNDED], dtype, schedules.TILE, 300)
        check_product(y, 300)
    with executing():
        check_product(product("tpformer.kernels", torch.bfloat16, TILE, 300), 300)
        y = product(packages[ROUNDED], torch.bfloat16, TILE, 300)
    with pytest.raises(AssertionError, match="exceeds"):
        check_product(y, 300)
