"""What ranks hold at each moment of a ZeRO step, and FSDP2's collectives in it, are what docs/zero.md says. A pipeline
frees its messages."""

import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import WorkerPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository is not installed as a whole

from bench import zero  # noqa: E402
from bench.held import WHOLE_GRADIENTS  # noqa: E402
from bench.zero_formulas import FORWARD  # noqa: E402
from tpformer.config import build_config, check_config  # noqa: E402
from tpformer.training.setup import build_model, run_mesh  # noqa: E402

SMALL = {**zero.MODEL, "vocab_size": 250, "hidden_size": 64, "n_layers": 4}
# these lose most easily: a reduction for each microbatch, no needless gather in a part without root, one all-reduce
CHOSEN = (
    ("ZeRO 3 2x2", "bfloat16"),
    ("PP2 1F1B ZeRO 2 x2", "float32"),
    ("PP2 Interleaved1F1B ZeRO 3 x2", "bfloat16"),
    ("PP2 ZBVZeroBubble ZeRO 1 x2", "bfloat16"),
)
OTHERS = [each for each in itertools.product(zero.CASES, zero.DTYPES) if each not in CHOSEN]


def problems(case: str, dtype: str, parallel: dict[str, Any], measured: list[zero.Measured]) -> list[Any]:
    rows = [row for rank, each in enumerate(measured) for row in zero.zero_rows(case, dtype, rank, each)]
    assert len(rows) == 5 * len(measured)
    moved = [zero.collective_row(case, dtype, rank, parallel, each) for rank, each in enumerate(measured)]
    return [row for row in (*rows, *moved) if not row["ok"]]


def measure(parallel: dict[str, Any], dtype: str) -> zero.Measured:
    return zero.measure(parallel, dtype, SMALL)


@pytest.mark.parametrize(
    "case, dtype",
    [*CHOSEN, *(pytest.param(*each, marks=pytest.mark.proof) for each in OTHERS)],
)
def test_bytes_and_collectives(ranks: WorkerPool, case: str, dtype: str) -> None:
    measured = ranks(4).run(measure, zero.CASES[case], dtype)
    wrong = problems(case, dtype, zero.CASES[case], measured)
    assert not wrong, wrong


def test_reduction_in_16_bits(ranks: WorkerPool) -> None:
    """Microbatches add up in bfloat16 only where FSDP2 can do nothing else: before its reduction, below stage 2."""
    parallel = {"data_parallel_shard": 2, "data_parallel_replicate": 2, "reduce_dtype": "bfloat16"}
    second, first = (ranks(4).run(measure, {**parallel, "zero_stage": stage}, "bfloat16") for stage in (2, 1))
    units = 5
    assert second[0].collectives.number("all_reduce") == units * zero.MICROBATCHES
    assert second[0].collectives.number("reduce_scatter") == units * zero.MICROBATCHES
    assert first[0].collectives.number("all_reduce") == units
    total = sum(part.total for part in first[0].parts)
    assert first[0].moments[FORWARD][WHOLE_GRADIENTS] == 2 * total
    assert second[0].moments[FORWARD][WHOLE_GRADIENTS] == 0


def boundary_tensors(schedule: str, n_microbatches: int) -> tuple[int, int]:
    """Count the storages of the size of what passes between stages, a size that no parameter has. Returns the most at
    the end of a part's forward, and those after a step."""
    model = {"vocab_size": 250, "seq_length": 24, "position": "rope", "n_layers": 4, "hidden_size": 32, "n_heads": 2}
    config = build_config(
        {
            "model": model,
            "data": {"train": ["unused"]},
            "parallel": {"pipeline_parallel": 2, "pipeline_schedule": schedule},
            "train": {"steps": 1, "global_batch_size": n_microbatches, "microbatch_size": 1},
        }
    )
    check_config(config)
    parallel = build_model(config, run_mesh(config, "cpu"))
    size, largest = 24 * 32 * 4, 0

    def count() -> int:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
        storages = {each.untyped_storage() for each in tensors}
        return sum(storage.nbytes() == size for storage in storages)

    def look(*_: Any) -> None:
        nonlocal largest
        largest = max(largest, count())

    batch = torch.randint(250, (n_microbatches, 25))
    gc.collect()
    before = count()
    for step in (1, 2):
        for part in parallel.parts if step == 2 else ():
            part.register_forward_hook(look)
        parallel.gradients(batch, first_sample=0, step=step)
    gc.collect()
    return largest - before, count() - before


def test_messages_do_not_outlive_their_microbatch(ranks: WorkerPool) -> None:
    """torch's stages would keep for good what all microbatches received, and its gradients."""
    few, many = (ranks(2).run(boundary_tensors, "1F1B", n) for n in (4, 8))
    assert [after for _, after in (*few, *many)] == [0] * 4
    assert [largest for largest, _ in few] == [largest for largest, _ in many]
    # with several stages on a rank the engine keeps what was sent to the end of the step, and frees it there
    assert [after for _, after in ranks(2).run(boundary_tensors, "ZBVZeroBubble", 4)] == [0, 0]
