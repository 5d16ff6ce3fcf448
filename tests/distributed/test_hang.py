"""The report of an expired wait finds the operation in the ring, and says who waited, for whom, and from which line."""

from collections import defaultdict
from dataclasses import replace

import pytest

from tpformer.distributed import hang
from tpformer.distributed.hang import RING_SIZE, Expired, Operation, Ring, describe, user_line

EXPIRED = Expired(kind="reduce", rank=1, peer=2, seen=41, wanted=42, limit=5000, timeout=5.0)
OPERATION = Operation(12, "reduce", "matmul_reduce_scatter", 42, "/home/me/train.py", 33, began=100.0)
LATER = Operation(12, "gather", "all_gather_matmul", 57, "/home/me/train.py", 34, began=101.0)


def ring(*operations: Operation) -> Ring:
    result = Ring()
    result.operations.extend(operations)
    return result


def test_ring_keeps_the_last_operations_of_all_kinds_and_finds_the_newest() -> None:
    """An epoch comes again after int32 has wrapped, or in a new workspace."""
    result = Ring()
    assert result.last is None
    for epoch in range(100):
        result.note(epoch // 10, "gather" if epoch % 2 else "reduce", f"operation {epoch}", epoch)
    assert len(result.operations) == RING_SIZE == 64
    assert result.last is not None and result.last.name == "operation 99" and result.last.step == 9
    found = [result.find(kind, epoch) for kind, epoch in (("gather", 37), ("reduce", 37), ("gather", 35))]
    assert [operation and operation.name for operation in found] == ["operation 37", None, None]
    twice = ring(OPERATION, OPERATION._replace(name="newer"), LATER)
    assert twice.find("reduce", 42).name == "newer"  # type: ignore[union-attr]


def called_from(file: str, namespace: dict) -> tuple[str, int]:
    """What user_line() returns when a function in that file calls it."""
    exec(compile("\n\ndef call(function):\n    return function()", file, "exec"), namespace)
    return namespace["call"](user_line)


def test_line_is_the_nearest_outside_of_tpformer_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    line = called_from.__code__.co_firstlineno + 3
    assert called_from(hang.PACKAGE + "layers/linear.py", {}) == (__file__, line)
    assert called_from(hang.LIBRARIES[1] + "nn/modules/module.py", {}) == (__file__, line)
    assert called_from("/home/me/train.py", {}) == ("/home/me/train.py", 4)
    assert called_from("<ipython-input-1>", {}) == ("<ipython-input-1>", 4)
    assert called_from(hang.PACKAGE.rstrip("/") + "_user/train.py", {})[1] == 4
    # CUDA's backward runs in a thread of torch's, so the outermost line of tpformer is all there is
    everything = defaultdict(lambda: hang.TORCH, {hang.PACKAGE + "ops/row_linear.py": hang.PACKAGE})
    monkeypatch.setattr(hang, "OWNERS", everything)
    assert called_from(hang.PACKAGE + "ops/row_linear.py", {}) == (hang.PACKAGE + "ops/row_linear.py", 4)


def test_report() -> None:
    text = describe(EXPIRED, ring(OPERATION, LATER), (8, 9, 10, 11), now=106.04)
    table = """
rank 1 (global rank 9) waited in vain for rank 2 (global rank 10) in matmul_reduce_scatter
  rank            1 of 4 (global rank 9)
  step            12
  operation       matmul_reduce_scatter, workspace reduce
  epoch           seen 41, wanted 42
  waiting for     rank 2 (global rank 10)
  time            begun 6.0 s ago, gave up after 5000 polls (timeout 5 s)
  called at       /home/me/train.py:33
  last operation  all_gather_matmul, workspace gather, epoch 57, at /home/me/train.py:34
Look at the output of rank 2 (global rank 10): it died, hangs, or called its operations in another order"""
    assert text.startswith(table.strip())
    assert text.endswith("The group's fused operations cannot go on: restart from the last checkpoint.")
    # the last operation is named once
    text = describe(EXPIRED, ring(OPERATION._replace(step=None)), (0, 1, 2), now=101.0)
    assert "last operation" not in text and "step         unknown" in text
    # an unknown one has left the ring, or a CUDA graph replayed it; a damaged error word does not hide the report
    text = describe(replace(EXPIRED, peer=-7), ring(LATER._replace(epoch=None)), (0, 1, 2))
    assert "an operation that is not among the last ones (a replayed CUDA graph?)" in text
    assert "waiting for     rank -7" in text and "last operation  all_gather_matmul, workspace gather, at" in text
    assert "last operation" not in describe(EXPIRED, Ring(), (0, 1, 2))
