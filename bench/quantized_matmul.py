"""What do GEMMs of blocks of e4m3 gain over those of bfloat16 on one GPU, also of experts, what does it cost that one
starts while other ranks' blocks arrive, or sends and adds partial sums, and what do the passes that quantise?

Belongs here: sizes, providers, what must agree. More of FP8 is worth its work if torch's product is 1.3 times as fast.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness.accuracy import poisoned, require_accurate
from harness.ratios import Row, compared, mean_row, ratio_bench
from harness.timing import FULL, QUICK, Call, copying, measure
from tpformer.config import FP8
from tpformer.config.transport_table import OPERATIONS
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.quantize.format import BLOCK, VALUES, Blocks
from tpformer.kernels.quantize.reference import dequantize, dequantize_weight, quantize_cost
from tpformer.kernels.quantized_grouped_matmul.reference import quantized_grouped_matmul_cost
from tpformer.kernels.quantized_matmul.reference import quantized_matmul_cost
from tpformer.ops.choice.prediction import times_of_blocks
from tpformer.ops.quantized_product import library_product, served_by_library
from tpformer.ops.transports.products import rows_of

from . import gathered_experts, grouped_matmul
from .channels import local_channel
from .predict import FUSED as PREDICTED
from .predict import SEQUENTIAL, as_if_on, present_machine, share_row
from .shapes import FUSED, PUSHED

DEVICE, DTYPE = "cuda", torch.bfloat16
GROUPED = "tpformer, bfloat16"
BFLOAT16, LIBRARY, OURS, COPY = "torch.matmul", "torch.scaled_mm", "tpformer", "copy"
SCATTERED, REDUCED = "fused reduce-scatter", "fused all-reduce"
RANKS, RANK = 8, 1  # the rank that is served, whose rows are not the first ones
TILE_ROWS = 128
ROWS, SIDES, WIDTHS = 8192, (2048, 4096, 8192), (2048, 4096, 14336)
# FLOP/s, predicted: of ours by K, as tiles begin in turn; cuBLASLt has 1.0e15 in pytorch/ao#2784
EXPECTED = {2048: 715e12, 4096: 885e12, 8192: 975e12}
EXPECTED_OF_LIBRARY = 1000e12
EXPECTED_LIMIT, EXPECTED_HALF = 1070e12, 1017  # through these: the limit of long K, and the K that has half of it
REQUIRED = 1.3  # of bfloat16, geometric mean


def sizes(quick: bool) -> list[tuple[int, int]]:
    """(N, K) of the weights."""
    return [(4096, 4096)] if quick else [(n, k) for n in WIDTHS for k in SIDES]


def operands(n: int, k: int) -> tuple[Tensor, Tensor]:
    """(x, weight) of normal numbers. On zeros a GPU is faster than on data."""
    x, w = torch.randn(ROWS, k, device=DEVICE, dtype=DTYPE), torch.randn(n, k, device=DEVICE, dtype=DTYPE)
    return x, w.mul_(k**-0.5)


def calls_of(n: int, k: int) -> tuple[tuple[Blocks, Blocks], dict[str, Callable[[], Tensor]]]:
    """The blocks, and by provider a product of them, or of the numbers that they are of."""
    from tpformer.kernels.quantize.kernel import quantize_rows, quantize_weight
    from tpformer.kernels.quantized_matmul.kernel import quantized_matmul

    x, w = operands(n, k)
    blocks = quantize_rows(x), quantize_weight(w)
    calls: dict[str, Callable[[], Tensor]] = {
        BFLOAT16: partial(torch.matmul, x, w.t()), OURS: partial(quantized_matmul, *blocks, dtype=DTYPE)
    }  # fmt: skip
    if served_by_library(blocks[0], x):
        product = partial(library_product, *blocks, None, DTYPE)
        if said := refusal(product):
            print(f"({ROWS}, {n}, {k}): {LIBRARY} is left out, as it says: {said}", file=sys.stderr)
        else:
            calls[LIBRARY] = product
    return blocks, calls


def refusal(call: Callable[[], object]) -> str | None:
    """The first line of the error that a call raises; None if it gives a result."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def experts(quick: bool) -> list[grouped_matmul.Grouped]:
    """The forward products of experts on one of several ranks: rows by an index, and side by side. A rehearsal's narrow
    models have no whole blocks."""
    forward = [each for each in grouped_matmul.products(quick) if each.case == grouped_matmul.FORWARD and each.t > 1]
    return [each for each in forward if each.n % BLOCK == each.k % BLOCK == 0]


def expert_calls(
    product: grouped_matmul.Grouped,
) -> tuple[grouped_matmul.Operands, tuple[Blocks, Blocks], dict[str, Callable[[], Tensor]]]:
    """Operands in bfloat16, their blocks, and by provider a product of either."""
    from tpformer.kernels.quantize.kernel import quantize_rows, quantize_weight
    from tpformer.kernels.quantized_grouped_matmul.kernel import quantized_grouped_matmul

    o = grouped_matmul.draw(product)
    a, w = quantize_rows(o.left), quantize_weight(o.right.flatten(0, 1))
    return o, (a, w), {
        GROUPED: partial(grouped_matmul.ours, product.case, o),
        OURS: partial(quantized_grouped_matmul, a, w, o.offsets, o.left_index, dtype=DTYPE),
    }  # fmt: skip


def gathers(a: Blocks, multiply: Callable[..., Tensor]) -> dict[str, Call]:
    """By provider a product of gathered blocks on rank RANK, whose peers' rows have all arrived: both slots hold them.
    multiply: of (this rank's shard, channel, push=)."""
    from tpformer.kernels.all_gather_quantized_matmul.kernel import all_gather_quantized_matmul_space
    from tpformer.kernels.protocol import bump

    every, k = a.values.shape
    rows = every // RANKS
    shards = [packed_shard(rows_of(a, slice(first, first + rows))) for first in range(0, every, rows)]
    channel = local_channel(RANKS, *all_gather_quantized_matmul_space(rows, k, RANKS), torch.device(DEVICE), RANK)
    for slot in channel.slots:
        sent = torch.cat(shards).view(-1)
        slot[: len(sent)] = sent
    return {
        name: Call(partial(multiply, shards[RANK], channel, push=name == PUSHED), partial(bump, channel))
        for name in (FUSED, PUSHED)
    }


def gather_calls(blocks: tuple[Blocks, Blocks]) -> dict[str, Call]:
    """The gathers of one weight's product."""
    from tpformer.kernels.all_gather_quantized_matmul.kernel import all_gather_quantized_matmul

    a, w = blocks
    return gathers(
        a, lambda shard, channel, push: all_gather_quantized_matmul(shard, [w], channel, dtype=DTYPE, push=push)[0]
    )


def expert_gathers(
    product: grouped_matmul.Grouped, o: grouped_matmul.Operands, blocks: tuple[Blocks, Blocks]
) -> dict[str, Call]:
    """The gathers of a product of experts that takes rows by an index; none of one whose rows lie side by side."""
    from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_quantized_grouped_matmul

    if o.left_index is None:
        return {}
    (a, w), places = blocks, (gathered_experts.counts_of(product, o), o.left_index)
    return gathers(
        a,
        lambda shard, channel, push: all_gather_quantized_grouped_matmul(
            shard, w, channel, *places, dtype=DTYPE, push=push
        ),
    )


def reduce_calls(blocks: tuple[Blocks, Blocks]) -> dict[str, Call]:
    """By provider the product of blocks and its reduction on rank RANK, whose peers' partial sums have all arrived, and
    are zero: so its rows of the result are those of the product."""
    from tpformer.kernels.configurations import select_tile
    from tpformer.kernels.matmul_all_reduce.kernel import (
        matmul_all_reduce_space,
        quantized_matmul_all_reduce,
        select_all_reduce_tile,
    )
    from tpformer.kernels.matmul_reduce_scatter.kernel import (
        matmul_reduce_scatter_space,
        quantized_matmul_reduce_scatter,
    )
    from tpformer.kernels.protocol import bump

    (a, w), device = blocks, torch.device(DEVICE)
    n = len(w.values)
    scattered = select_tile(device, VALUES, ROWS // RANKS, n, chunks=RANKS)
    reduced = select_all_reduce_tile(device, VALUES, ROWS, n, RANKS, False)
    kernels: dict[str, tuple[Callable[..., Tensor], tuple[int, int]]] = {
        SCATTERED: (
            partial(quantized_matmul_reduce_scatter, tile=scattered),
            matmul_reduce_scatter_space(ROWS // RANKS, n, RANKS, DTYPE, scattered),
        ),
        REDUCED: (
            partial(quantized_matmul_all_reduce, tile=reduced),
            matmul_all_reduce_space(ROWS, n, RANKS, DTYPE, DTYPE, reduced),
        ),
    }
    calls = {}
    for name, (kernel, space) in kernels.items():
        channel = local_channel(RANKS, *space, device, RANK)
        for slot in channel.slots:
            slot.zero_()
        calls[name] = Call(partial(kernel, [a], [w], channel, dtype=DTYPE), partial(bump, channel))
    return calls


def check(quick: bool) -> None:
    """All products beside float64 of the numbers that the blocks stand for."""
    for product in experts(quick):
        o, (a, w), grouped_calls = expert_calls(product)
        oracle, baseline = (
            grouped_matmul.loop(
                product.case,
                o._replace(left=dequantize(a, dtype), right=dequantize_weight(w, dtype).view(o.right.shape)),
            )
            for dtype in (torch.float64, DTYPE)
        )
        require_accurate(f"{product}", poisoned(grouped_calls[OURS], baseline), oracle, baseline)
        for name, gather in expert_gathers(product, o, (a, w)).items():
            gather.prepare()
            require_accurate(f"{product} {name}", poisoned(gather.run, baseline), oracle, baseline)
    for n, k in sizes(quick):
        (a, b), calls = calls_of(n, k)
        calls.pop(BFLOAT16)
        left, right = dequantize(a, torch.float64), dequantize_weight(b, torch.float64)
        oracle, baseline = left @ right.t(), left.to(DTYPE) @ right.to(DTYPE).t()
        for name, call in calls.items():
            require_accurate(f"({ROWS}, {n}, {k}) {name}", poisoned(call, baseline), oracle, baseline)
        for name, gather in gather_calls((a, b)).items():
            gather.prepare()
            require_accurate(f"({ROWS}, {n}, {k}) {name}", poisoned(gather.run, baseline), oracle, baseline)
        own = slice(RANK * ROWS // RANKS, (RANK + 1) * ROWS // RANKS)
        for name, reduction in reduce_calls((a, b)).items():
            reduction.prepare()
            whole = baseline if name == REDUCED else baseline[own]
            rows = poisoned(reduction.run, whole)
            found = rows[own] if name == REDUCED else rows
            require_accurate(f"({ROWS}, {n}, {k}) {name}", found, oracle[own], baseline[own])


def gemm_rows(n: int, k: int, quick: bool) -> list[Row]:
    """Products beside bfloat16's, without the passes that quantise."""
    blocks, calls = calls_of(n, k)
    fused = gather_calls(blocks) | reduce_calls(blocks)
    seconds = measure({name: Call(call) for name, call in calls.items()} | fused, QUICK if quick else FULL)
    shape, flops = f"{ROWS}x{n}x{k}", quantized_matmul_cost(ROWS, n, k, DTYPE.itemsize).flops
    pairs = [(name, BFLOAT16) for name in calls if name != BFLOAT16]
    tax = [(name, OURS) for name in fused]
    return [
        *compared("product", shape, seconds, pairs, unit="TFLOP/s", amount=flops / 1e12),
        *compared(f"flag tax, rank of {RANKS}", shape, seconds, tax),
    ]


def expert_rows(product: grouped_matmul.Grouped, quick: bool) -> list[Row]:
    """Products of experts beside bfloat16's, by the kernels of this library, and what a gather takes beside them."""
    o, blocks, calls = expert_calls(product)
    fused = expert_gathers(product, o, blocks)
    seconds = measure({name: Call(call) for name, call in calls.items()} | fused, QUICK if quick else FULL)
    flops = quantized_grouped_matmul_cost(o.bounds[-1], product.n, product.k, product.groups, DTYPE.itemsize).flops
    return [
        *compared("experts", product, seconds, [(OURS, GROUPED)], unit="TFLOP/s", amount=flops / 1e12),
        *compared(f"flag tax, rank of {RANKS}", product, seconds, [(name, OURS) for name in fused]),
    ]


def pass_rows(k: int, quick: bool) -> list[Row]:
    """Passes beside a copy of as many bytes."""
    from tpformer.kernels.quantize.kernel import dequantize, quantize_rows, quantize_weight_twice

    (x, _), found = operands(128, k), []
    blocks = quantize_rows(x)
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "quantize_rows": (partial(quantize_rows, x), quantize_cost(ROWS, k, DTYPE.itemsize).bytes),
        "quantize_weight_twice": (
            partial(quantize_weight_twice, x), quantize_cost(ROWS, k, DTYPE.itemsize, 128, 2).bytes
        ),
        "dequantize": (partial(dequantize, blocks, DTYPE), quantize_cost(ROWS, k, DTYPE.itemsize).bytes),
    }  # fmt: skip
    for name, (call, nbytes) in passes.items():
        seconds = measure({OURS: Call(call), COPY: Call(copying(nbytes // 2, DEVICE))}, QUICK if quick else FULL)
        found += compared(name, f"{ROWS}x{k}", seconds, [(OURS, COPY)], unit="TB/s", amount=nbytes / 1e12)
    return found


def rows(quick: bool) -> list[Row]:
    products = [row for n, k in sizes(quick) for row in gemm_rows(n, k, quick)]
    of_experts = [row for product in experts(quick) for row in expert_rows(product, quick)]
    passes = pass_rows(4096, quick)
    means = []
    for provider in (LIBRARY, OURS):
        chosen = [row for row in products if row["case"] == "product" and row["provider"] == provider]
        if chosen:
            bar = REQUIRED if provider == LIBRARY else None
            means.append(mean_row(chosen, shape=f"{len(chosen)} shapes", provider=provider, bar=bar))
    if of_experts:
        chosen = [row for row in of_experts if row["case"] == "experts"]
        means.append(mean_row(chosen, shape=f"experts, {len(chosen)} shapes", provider=OURS))
    return [*products, *of_experts, *passes, *means]


def predictions() -> list[Row]:
    """The tile's cycles on H100 by hand, and published figures of cuBLASLt's product (docs/fp8.md). Of experts the same
    rates, or the bytes, with half a tile of rows more for each. Of gathers and reductions the model of `auto`."""
    found = []
    for n, k in sizes(quick=False):
        flops = quantized_matmul_cost(ROWS, n, k, DTYPE.itemsize).flops
        for provider, rate in ((OURS, EXPECTED[k]), (LIBRARY, EXPECTED_OF_LIBRARY)):
            found.append(share_row("product", f"{ROWS}x{n}x{k}", flops / rate, flops, provider))
        machine = present_machine()
        for op in OPERATIONS:
            with as_if_on(machine) as device:
                times = times_of_blocks(op, (ROWS, n, k), RANKS, device, machine.of_blocks or machine)
            seconds = {PREDICTED: [times["fused"].device], SEQUENTIAL: [times["sequential"].device]}
            label = f"prediction: {op}, {RANKS} {machine.name}"
            found += compared(label, f"{ROWS}x{n}x{k}", seconds, [(PREDICTED, SEQUENTIAL)])
    for product in experts(quick=False):
        widths = product.n, product.k, product.groups, DTYPE.itemsize
        cost = quantized_grouped_matmul_cost(product.rows, *widths)
        whole = quantized_grouped_matmul_cost(product.rows + product.groups * TILE_ROWS // 2, *widths).flops
        rate = EXPECTED_LIMIT * product.k / (product.k + EXPECTED_HALF)
        seconds = max(whole / rate, cost.bytes / present_machine().memory)
        found.append(share_row("experts", product, seconds, cost.flops, OURS))
    return found + gathered_experts.predictions(precision=FP8)


BENCH = ratio_bench(
    rows,
    predictions,
    name="quantized_matmul",
    description="GEMMs of blocks of e4m3, by torch and by our kernels, beside bfloat16's; passes that quantise (1 GPU)",
    device="cuda",
    check=check,
    note="cold L2. Products are without the passes that quantise, which are beside a copy of as many bytes. "
    "A flag tax is of one rank whose peers' blocks, or partial sums, have all arrived; that of a reduction contains "
    "the pass over M x N of them. "
    "Experts are those of bench grouped_matmul, on one of 8 ranks, beside its kernel. "
    "Predictions stand beside the peak of bfloat16.",
)
