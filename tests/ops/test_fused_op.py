"""The fused transport in Triton's interpreter equals float64 plain torch, by the tests of the two linears. Its own
tests: copies instead of pushes, more than three weights, late ranks, and a peer that does not come."""

from unittest import mock

import pytest

pytest.importorskip("triton")

import test_column_linear_op as column
import test_fused_gpu as on_gpu
import test_row_linear_op as row
import torch
import torch.distributed as dist
from pool import RankFailure
from shards import OnTransport

from tpformer import ops

# with the sizes that they take: two ranks all, three those above one of everything
RANKS = [(2, slice(None)), (3, slice(1, 3)), pytest.param(4, slice(None), marks=pytest.mark.proof)]
# (tokens per rank, K, widths per rank, norm, bias), from one of everything to primes, more than a tile of 16, weights
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


@pytest.mark.parametrize("t, taken", RANKS, ids=[2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_equals_plain_torch(interpreted, t, taken, sequence_parallel):
    fused = OnTransport(interpreted, "fused")
    on_gpu.check_columns(fused, t, sequence_parallel, torch.float32, COLUMNS[taken])
    on_gpu.check_rows(fused, t, sequence_parallel, torch.float32, ROWS[taken])


def copies(case: dict):
    """`on_rank`, with the copy engines' path for every gather."""
    from tpformer.ops.transports import fused

    with mock.patch.object(fused, "send_by_copies", lambda *_: True):
        return (column if "widths" in case else row).on_rank(case, torch.float32)


class ByCopies(OnTransport):
    def __call__(self, size):
        world = super().__call__(size)
        run = world.run
        world.run = lambda function, case, dtype: run(copies, case)
        return world


def test_gathers_by_copies_equal_plain_torch(interpreted):
    column.check(ByCopies(interpreted, "fused"), 3, column.case(9, 6, (6, 9), "layernorm", True), torch.float32)
    row.check(ByCopies(interpreted, "fused"), 3, row.case(9, 9, 7, "silu", True), torch.float32)


def own_rows_of_a_gather_by_copies() -> list[bool]:
    """Whether the own rows are in the slot, too, by number of weights of a linear, and of a gather without a GEMM."""
    from tpformer.distributed.groups import kernel_workspace
    from tpformer.ops.transports import fused

    assert dist.group.WORLD is not None
    transport, x = fused.Fused(dist.group.WORLD), torch.ones(3, 4)
    workspace = kernel_workspace(dist.group.WORLD, "gather", x.device)
    found = []
    with mock.patch.object(fused, "send_by_copies", lambda *_: True):
        for weights in (3, 4, 0):
            channel = workspace.begin("poisoned", 3 * x.nbytes, 1)
            for slot in channel.slots:
                slot.fill_(0xFF)
            dist.barrier()
            if weights:
                transport.gather_matmul(x, [torch.ones(2, 4)] * weights, [None] * weights)
            else:
                transport.start_gather(x)()
            rows = channel.gathered(workspace.epoch & 1, x).chunk(dist.get_world_size())
            assert all(torch.equal(rows[rank], x) for rank in range(len(rows)) if rank != dist.get_rank())
            found.append(torch.equal(rows[dist.get_rank()], x))
            dist.barrier()
    return found


def test_copies_leave_own_rows_that_nobody_reads(interpreted):
    assert interpreted(2).run(own_rows_of_a_gather_by_copies) == [[False, True, True]] * 2


def test_late_ranks(interpreted):
    """The third step uses the first one's slots again."""
    interpreted(3).run(on_gpu.late_ranks, "fused", torch.float32, 3)


def test_a_peer_that_never_arrives_is_named(interpreted):
    on_gpu.check_hang(interpreted(2).run(on_gpu.absent_peer, 0.3), within=30)


def refused():
    x, w = torch.ones(2, 4, dtype=torch.float64), torch.ones(6, 4, dtype=torch.float64)
    ops.column_linear(x, w, group=dist.group.WORLD, transport="fused")


def test_what_cannot_run_is_refused_with_the_reason(interpreted, ranks):
    with pytest.raises(RankFailure, match="float64.*bfloat16, float16 and float32"):
        interpreted(2).run(refused)
    with pytest.raises(RankFailure, match="on CPU Triton has only its interpreter"):
        ranks(2).run(refused)
