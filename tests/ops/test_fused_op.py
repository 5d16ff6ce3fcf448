"""The fused transport, its kernels in the interpreter, against float64 plain torch, by the linears' own tests.

Also what is its own: copies instead of pushes, more than three weights, exact sums, and a peer that does not come.
"""

import time

import pytest

pytest.importorskip("triton")

import test_column_linear_op as column
import test_row_linear_op as row
import torch
import torch.distributed as dist
from pool import RankFailure
from shards import OnTransport, make

from tpformer import ops
from tpformer.distributed import HangError, set_timeout

RANKS = [2, 3, pytest.param(4, marks=pytest.mark.proof)]
# (tokens per rank, K, widths per rank, norm, bias): one of everything, primes, more than a tile of 16, several weights
COLUMNS = [
    (1, 1, (1,), (None, False), False),
    (3, 5, (7, 2, 3), ("layernorm", True), True),
    (17, 11, (13,), ("rmsnorm", False), True),
    (2, 8, (1, 2, 3, 4), (None, False), False),
]
# (tokens per rank, K per rank, N, (activation, gated), (bias, residual, dropout))
ROWS = [
    (1, 1, 1, (None, False), (False, False, False)),
    (3, 5, 7, ("gelu_tanh", False), (True, True, True)),
    (17, 3, 11, ("silu", True), (True, True, False)),
    (2, 13, 3, ("gelu", False), (False, True, False)),
]


@pytest.mark.parametrize("t", RANKS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_column(interpreted, t, sequence_parallel):
    for tokens, k, widths, norm, bias in COLUMNS:
        case = column.case(tokens * t, k, tuple(n * t for n in widths), *norm, bias, sequence_parallel)
        column.check(OnTransport(interpreted, "fused"), t, case, torch.float32)


@pytest.mark.parametrize("t", RANKS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_row(interpreted, t, sequence_parallel):
    for tokens, k, n, activation, switches in ROWS:
        case = row.case(tokens * t, k * t, n, *activation, *switches, sequence_parallel)
        row.check(OnTransport(interpreted, "fused"), t, case, torch.float32)


def copies(case: dict):
    """As `on_rank`, with every gather by the copy engines' path."""
    from tpformer.ops.transports import fused

    before, fused.COPY_ENGINE_BYTES = fused.COPY_ENGINE_BYTES, 0
    try:
        return (column if "widths" in case else row).on_rank(case, torch.float32)
    finally:
        fused.COPY_ENGINE_BYTES = before


class ByCopies(OnTransport):
    def __call__(self, size):
        world = super().__call__(size)
        run = world.run
        world.run = lambda function, case, dtype: run(copies, case)
        return world


def test_gathers_by_copies(interpreted):
    column.check(ByCopies(interpreted, "fused"), 3, column.case(9, 6, (6, 9), "layernorm", True), torch.float32)
    row.check(ByCopies(interpreted, "fused"), 3, row.case(9, 9, 7, "silu", True), torch.float32)


def whole_numbers(transport: str) -> list[torch.Tensor]:
    """Zeros and ones: every sum is exact, so every transport gives the same bits. Several steps reuse the slots."""
    group, results = dist.group.WORLD, []
    for step in range(3):  # the third reuses the first one's slots
        if step % dist.get_world_size() == dist.get_rank():
            time.sleep(0.02)
        values = make(10 * step + dist.get_rank(), torch.float32, x=(3, 8), w=(6, 8), v=(6, 8), down=(5, 6))
        x, w, v, down = ((value > 0).float().requires_grad_() for value in values.values())
        gate, up = ops.column_linear(x, [w, v], group=group, transport=transport)
        y = ops.row_linear(gate + up, down, group=group, transport=transport)
        y.backward(y.detach() % 2)
        results += [y.detach(), x.grad, w.grad, v.grad, down.grad]
    return results


@pytest.mark.parametrize("t", [2, 3])
def test_whole_numbers_are_exact(interpreted, t):
    for fused, sequential in zip(
        interpreted(t).run(whole_numbers, "fused"), interpreted(t).run(whole_numbers, "sequential"), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(fused, sequential, strict=True))
        assert any(x.abs().max() > 1 for x in fused)


def absent_peer() -> str:
    group = dist.new_group(list(range(dist.get_world_size())))
    set_timeout(group, 0.3)
    x, w = torch.ones(2, 4), torch.ones(6, 4)
    ops.column_linear(x, w, group=group, transport="fused")
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    messages = []
    for _ in range(2):
        with pytest.raises(HangError) as caught:
            ops.column_linear(x, w, group=group, transport="fused")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_a_peer_that_never_arrives_is_named(interpreted):
    message, _ = interpreted(2).run(absent_peer)
    for part in ("all_gather_matmul", "rank 0", "rank 1", "test_fused_op.py"):
        assert part in message, message


def refused():
    x, w = torch.ones(2, 4, dtype=torch.float64), torch.ones(6, 4, dtype=torch.float64)
    ops.column_linear(x, w, group=dist.group.WORLD, transport="fused")


def test_what_cannot_run_is_refused_with_the_reason(interpreted, ranks):
    with pytest.raises(RankFailure, match="float64.*bfloat16, float16 and float32"):
        interpreted(2).run(refused)
    with pytest.raises(RankFailure, match="on CPU Triton has only its interpreter"):
        ranks(2).run(refused)
