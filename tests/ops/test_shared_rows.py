"""Gradients of features that several ranks compute: the sum is on the lowest rank that has them, and nowhere else."""

import torch
import torch.distributed as dist
from shards import make
from testing import assert_same, on_every_rank

from tpformer import ops
from tpformer.distributed import record_collectives

# rows of two weights that each of three ranks uses: overlapping, all of the others', none of them
USED = ((slice(0, 4), slice(2, 6), slice(5, 6)), (slice(0, 1), slice(0, 1), slice(0, 1)))
TOTALS = (6, 1)
TOKENS = 3


@on_every_rank(3)
def test_the_lowest_rank_has_the_sum() -> None:
    rank = dist.get_rank()
    shared, ys, wanted = [], [], []
    for weight, (used, total) in enumerate(zip(USED, TOTALS, strict=True)):
        lower = max((each.stop for each in used[:rank]), default=0)
        shared.append(ops.SharedRows(used[rank], lower, total))
        dys = [make(weight + 9 * r, torch.float64, dy=(TOKENS, total))["dy"] for r in range(3)]
        whole = torch.zeros(TOKENS, total, dtype=torch.float64)
        for each, dy in zip(used, dys, strict=True):
            whole[:, each] += dy[:, each]
        own = whole[:, used[rank]].clone()
        own[:, : max(0, lower - used[rank].start)] = 0
        y = torch.ones(TOKENS, used[rank].stop - used[rank].start, dtype=torch.float64, requires_grad=True)
        ys.append((y, dys[rank][:, used[rank]]))
        wanted.append(own)
    with record_collectives() as forward:
        found = ops.shared_rows([y for y, _ in ys], shared, dist.group.WORLD)
    assert not forward and all(torch.equal(y, x) for y, (x, _) in zip(found, ys, strict=True))
    with record_collectives() as backward:
        torch.autograd.backward(found, [dy for _, dy in ys])
    assert backward == [("all_reduce", TOKENS * sum(TOTALS) * 8)]
    assert_same([y.grad for y, _ in ys], wanted)
    everywhere = [torch.zeros(TOKENS, total, dtype=torch.float64) for total in TOTALS]
    for sums, (y, _), each in zip(everywhere, ys, shared, strict=True):
        sums[:, each.used] = y.grad
        dist.all_reduce(sums)
    assert sum(int((each == 0).any()) for each in everywhere) == 0, "no feature is left out"
