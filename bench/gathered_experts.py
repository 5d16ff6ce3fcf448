"""What does it cost that experts start while tokens arrive, as far as one GPU can say it?

Belongs here: one of t ranks whose peers have all arrived, what it must give, what it is timed beside, and predictions
for t GPUs. The products are those of grouped_matmul.py whose rows are gathered.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from harness.accuracy import poisoned
from harness.ratios import Row, compared, means, ratio_bench
from harness.timing import FULL, QUICK, Call, measure
from tpformer.ops.choice import Grouped, column_request, predicted_times

from . import grouped_matmul
from .channels import local_channel
from .grouped_matmul import DGRAD, DOWN, FORWARD, MODELS, UP, Operands, check_groups, draw, ours
from .predict import FUSED as PREDICTED
from .predict import MODEL, SEQUENTIAL, as_if_on, present_machine

if TYPE_CHECKING:
    from tpformer.kernels.protocol import Channel

BARE, FUSED, PUSHED, BUMPED = "grouped_matmul", "fused", "fused, SM push", "fused, with bump"
RANKS, RANK = 8, 1  # the rank that is served, whose rows are not the first ones
TOKENS = (8192, 32768)  # of all ranks


class Gathered(NamedTuple):
    """A product on rank RANK: operands with all ranks' rows, and what the fused kernel takes in place of them."""

    product: grouped_matmul.Grouped
    operands: Operands
    shard: Tensor
    counts: Tensor
    channel: Channel


def products(quick: bool) -> list[grouped_matmul.Grouped]:
    """Gate and up of each model, and the gradient of down's rows; quick: of one, with few tokens."""
    return [
        grouped_matmul.Grouped(case, model, layer, tokens, RANKS)
        for model in (["30B"] if quick else grouped_matmul.MODELS)
        for case, layer in ((FORWARD, UP), (DGRAD, DOWN))
        for tokens in (TOKENS[:1] if quick else TOKENS)
    ]


def build(product: grouped_matmul.Grouped) -> Gathered:
    """The operands that `draw` gives, with every rank's rows in both slots, and the flags of the peers set."""
    from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul_space

    o, rows = draw(product), product.tokens // product.t
    assert o.left_index is not None
    shard = o.left.chunk(product.t)[RANK].clone()
    space = all_gather_matmul_space(rows, shard.shape[1], product.t, shard.element_size())
    channel = local_channel(product.t, *space, shard.device, RANK)
    for parity in (0, 1):
        channel.gathered(parity, shard).copy_(o.left)
    return Gathered(product, o, shard, counts_of(product, o), channel)


def counts_of(product: grouped_matmul.Grouped, o: Operands) -> Tensor:
    """(t, groups) int32: the rows of each of this rank's experts from each rank's tokens."""
    assert o.left_index is not None
    sizes = torch.tensor(o.bounds, device=o.left_index.device).diff()
    expert = torch.repeat_interleave(torch.arange(product.groups, device=sizes.device), sizes)
    place = o.left_index.long() // (product.tokens // product.t) * product.groups + expert
    counts = torch.bincount(place, minlength=product.t * product.groups)
    return counts.to(torch.int32).view(product.t, product.groups)


def launch(found: Gathered, *, push: bool, programs: int | None = None) -> Tensor:
    """The fused kernel, at the epoch that `bump` has begun."""
    from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul

    o, transposed = found.operands, found.product.case == DGRAD
    return all_gather_grouped_matmul(
        found.shard, o.right, found.channel, found.counts, o.left_index,
        transposed=transposed, push=push, programs=programs,
    )  # fmt: skip


def check_gathered(found: Gathered) -> None:
    """AssertionError unless both ways to send the shard give each group's product, with no wait expired."""
    from tpformer.kernels.protocol import bump

    baseline = grouped_matmul.loop(found.product.case, found.operands)
    for push in (False, True):
        bump(found.channel)
        actual = poisoned(partial(launch, found, push=push), baseline)
        what = f"{found.product.case} {found.product}, push={push}"
        check_groups(what, found.product.case, found.operands, actual, baseline)
        assert not found.channel.error.any(), f"{what}: a wait expired: {found.channel.error.tolist()}"


def check(quick: bool) -> None:
    for product in products(quick):
        check_gathered(build(product))


def tax_rows(product: grouped_matmul.Grouped, quick: bool) -> list[Row]:
    """The fused kernel, whose peers have all arrived, against the GEMM of rows that have been gathered."""
    from tpformer.kernels.protocol import bump

    found = build(product)
    begin = partial(bump, found.channel)
    calls = {
        BARE: Call(partial(ours, product.case, found.operands)),
        FUSED: Call(partial(launch, found, push=False), begin),
        BUMPED: Call(lambda: (begin(), launch(found, push=False))),
        PUSHED: Call(partial(launch, found, push=True), begin),
    }
    pairs = [(name, BARE) for name in (FUSED, BUMPED, PUSHED)]
    return compared(f"tax, rank of {RANKS}", product, measure(calls, QUICK if quick else FULL), pairs)


def rows(quick: bool) -> list[Row]:
    measured = [row for product in products(quick) for row in tax_rows(product, quick)]
    return [*measured, *predictions(quick), *means(measured)]


def predictions(quick: bool = False, precision: str = "16") -> list[Row]:
    """The gather fused with the experts' GEMM beside the collective and the GEMM, as "auto" compares them.

    precision: of the GEMM, as a Request has it.
    """
    machine, found = present_machine(), []
    for product in products(quick):
        n, k = (product.k, product.n) if product.case == DGRAD else (product.n, product.k)
        grouped = Grouped(MODELS[product.model].experts_per_token, product.groups, n)
        group = SimpleNamespace(size=lambda: RANKS)
        with as_if_on(machine) as device:
            request = column_request(
                product.tokens // RANKS, k, grouped.width(RANKS), torch.bfloat16, device, group, True, "auto",
                grouped,
            )  # fmt: skip
            times = predicted_times(request._replace(precision=precision), machine, spare=0)
        seconds = {PREDICTED: [times["fused"].device], SEQUENTIAL: [times["sequential"].device]}
        label = f"prediction: {product.case}, {RANKS} {machine.name}"
        found += compared(label, product, seconds, [(PREDICTED, SEQUENTIAL)])
    return found


BENCH = ratio_bench(
    rows,
    predictions,
    name="all_gather_grouped_matmul",
    description="experts' GEMM fused with its all-gather on 1 GPU: its tax; and predictions for 8 GPUs",
    device="cuda",
    check=check,
    note=f"{MODEL} A shape is experts of a rank x N x K, then the tokens of all ranks. Tax: rank {RANK} of {RANKS} "
    "alone, its peers' flags set and their rows in its slot, against the grouped GEMM of rows that have been gathered. "
    "It contains that row blocks end with each rank's rows, and that every matrix is read once for each rank's rows. "
    "SM push: programs first store the shard 7 times, here to memory. with bump: and the kernel that moves the epoch.",
)
