"""How near are our grouped GEMMs to torch's, on the experts of published models, with few and with many rows a group?

Belongs here: the models, the six products of a layer of experts, the providers, what must agree.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.accuracy import poisoned, require_accurate
from harness.ratios import Row, compared, mean_row, ratio_bench
from harness.timing import FULL, QUICK, Call, measure
from tpformer.config import preset_config
from tpformer.kernels.grouped_matmul.reference import grouped_matmul_cost

from .predict import ITEMSIZE, as_if_on, present_machine, share_row

DEVICE, DTYPE = "cuda", torch.bfloat16
LIBRARY, LOOP, OURS = "grouped_mm", "loop", "tpformer"
UP, DOWN = "gate+up", "down"
FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"
MODELS = {
    name: preset_config(preset)
    for name, preset in (("Mixtral", "mixtral-8x7b"), ("30B", "qwen3-30b-a3b"), ("235B", "qwen3-235b-a22b"))
}
RANKS = (1, 8)  # that the experts are divided over
TOKENS = (2048, 8192)  # of all ranks, which a rank has gathered


class Grouped(NamedTuple):
    """One product of a layer of experts, on one of t ranks. Rows of tokens have an index, the experts' own have not."""

    case: str
    model: str
    layer: str
    tokens: int
    t: int

    def __str__(self) -> str:
        return f"{self.model} {self.layer} {self.groups} x {self.n} x {self.k} {self.tokens}"

    @property
    def groups(self) -> int:
        """Experts of this rank."""
        return MODELS[self.model].n_experts // self.t

    @property
    def n(self) -> int:
        config = MODELS[self.model]
        return 2 * config.expert_size if self.layer == UP else config.hidden_size

    @property
    def k(self) -> int:
        config = MODELS[self.model]
        return config.hidden_size if self.layer == UP else config.expert_size

    @property
    def rows(self) -> int:
        """Rows of this rank if all experts get equally many."""
        return self.tokens * MODELS[self.model].experts_per_token // self.t


class Operands(NamedTuple):
    """What a product takes, and for the library the sizes of the groups on the host."""

    left: Tensor
    right: Tensor
    offsets: Tensor
    left_index: Tensor | None
    right_index: Tensor | None
    bounds: list[int]


def draw(grouped: Grouped) -> Operands:
    """Normal numbers, scaled so that products are of order 1; experts as a router that knows nothing picks them.

    Each call has the same picks, on every machine: how many rows there are decides which tile a kernel takes.
    """
    config, (groups, n, k) = MODELS[grouped.model], (grouped.groups, grouped.n, grouped.k)
    scores = np.random.default_rng(0).random((grouped.tokens, config.n_experts))
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, scores.argsort(1)[:, : config.experts_per_token], True, axis=1)
    of_rank = chosen[:, :groups].T  # by expert, then by token
    bounds = [0, *of_rank.sum(1).cumsum().tolist()]
    index, offsets = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (of_rank.nonzero()[1], bounds))
    x_index, dy_index = (index, None) if grouped.layer == UP else (None, index)

    def rows(width: int, given: Tensor | None) -> Tensor:
        return torch.randn(bounds[-1] if given is None else grouped.tokens, width, device=DEVICE, dtype=DTYPE)

    if grouped.case == WGRAD:
        x = rows(k, x_index) * max(1, bounds[-1] // groups) ** -0.5
        return Operands(rows(n, dy_index), x, offsets, dy_index, x_index, bounds)
    left_index, width = (x_index, k) if grouped.case == FORWARD else (dy_index, n)
    weights = torch.randn(groups, n, k, device=DEVICE, dtype=DTYPE) * width**-0.5
    return Operands(rows(width, left_index), weights, offsets, left_index, None, bounds)


def taken(x: Tensor, index: Tensor | None) -> Tensor:
    """The rows side by side, which the library needs."""
    return x if index is None else x[index]


def library(case: str, o: Operands) -> Tensor:
    """torch's grouped GEMM, after a copy of the rows that an index names."""
    left, ends = taken(o.left, o.left_index), o.offsets[1:]
    if case == WGRAD:
        return F.grouped_mm(left.t(), taken(o.right, o.right_index), offs=ends)
    return F.grouped_mm(left, o.right if case == DGRAD else o.right.transpose(1, 2), offs=ends)


def loop(case: str, o: Operands) -> Tensor:
    """A GEMM for each group, whose sizes the host knows."""
    left = taken(o.left, o.left_index)
    parts = [slice(first, end) for first, end in zip(o.bounds[:-1], o.bounds[1:], strict=True)]
    if case == WGRAD:
        right = taken(o.right, o.right_index)
        return torch.stack([left[part].t() @ right[part] for part in parts])
    return torch.cat([left[part] @ (w if case == DGRAD else w.t()) for part, w in zip(parts, o.right, strict=True)])


def ours(case: str, o: Operands, **options: Any) -> Tensor:
    """The result by our kernel; options: of kernels/grouped_matmul."""
    from tpformer.kernels.grouped_matmul.kernel import grouped_matmul, grouped_weight_gradient

    if case == WGRAD:
        return grouped_weight_gradient(o.left, o.right, o.offsets, o.left_index, o.right_index, **options)
    return grouped_matmul(o.left, o.right, o.offsets, o.left_index, transposed=case == DGRAD, **options)


def products(quick: bool) -> list[Grouped]:
    """The forward and both gradients of both layers, for all models, ranks and numbers of tokens; quick: of one."""
    return [
        Grouped(case, model, layer, tokens, t)
        for case in (FORWARD, DGRAD, WGRAD)
        for model in (["30B"] if quick else MODELS)
        for t in (RANKS[-1:] if quick else RANKS)
        for layer in (UP, DOWN)
        for tokens in (TOKENS[:1] if quick else TOKENS)
    ]


def tiles(grouped: Grouped, rows: int) -> tuple[str, list[str]]:
    """(the name of the tile that the kernel takes for so many rows, all names of this GPU)."""
    from tpformer.kernels.configurations import TILES, select_grouped_tile, select_tile, tile_names

    device = torch.device(DEVICE)
    major, minor = torch.cuda.get_device_capability(device)
    names = tile_names(10 * major + minor, DTYPE.itemsize)
    if grouped.case == WGRAD:
        picked = select_tile(device, DTYPE, grouped.n, grouped.k, chunks=grouped.groups)
    else:
        columns = grouped.k if grouped.case == DGRAD else grouped.n
        picked = select_grouped_tile(device, DTYPE, rows, grouped.groups, columns)
    return next(name for name in names if TILES[name] == picked), list(names)


def calls_of(grouped: Grouped) -> tuple[Operands, dict[str, Callable[[], Tensor]]]:
    """Operands, and by provider what is called: torch's, a loop, the tile that is picked, the other ones."""
    from tpformer.kernels.configurations import TILES

    operands = draw(grouped)
    calls = {name: partial(call, grouped.case, operands) for name, call in ((LIBRARY, library), (LOOP, loop))}
    picked, names = tiles(grouped, operands.bounds[-1])
    every = {f"{OURS} ({picked})": picked, **{name: name for name in names if name != picked}}
    return operands, calls | {
        name: partial(ours, grouped.case, operands, tile=TILES[tile]) for name, tile in every.items()
    }


def check(quick: bool) -> None:
    for grouped in products(quick):
        check_product(grouped)


def check_product(grouped: Grouped) -> None:
    """Every provider against float64; a function of its own, so that its operands are freed."""
    operands, calls = calls_of(grouped)
    baseline = calls.pop(LOOP)()
    for name, call in calls.items():
        check_groups(f"{grouped.case} {grouped} {name}", grouped.case, operands, poisoned(call, baseline), baseline)


def check_groups(what: str, case: str, o: Operands, actual: Tensor, baseline: Tensor) -> None:
    """Each group against float64; one group's is all that a GPU has memory for beside the operands."""
    left = taken(o.left, o.left_index)
    right = taken(o.right, o.right_index) if case == WGRAD else o.right
    for group, (first, end) in enumerate(zip(o.bounds[:-1], o.bounds[1:], strict=True)):
        factors = left[first:end].double(), (right[first:end] if case == WGRAD else right[group]).double()
        if case == WGRAD:
            oracle, found = factors[0].t() @ factors[1], [x[group] for x in (actual, baseline)]
        else:
            oracle = factors[0] @ (factors[1] if case == DGRAD else factors[1].t())
            found = [x[first:end] for x in (actual, baseline)]
        if oracle.numel():
            require_accurate(f"{what}, group {group}", found[0], oracle, found[1])


def product_rows(grouped: Grouped, quick: bool) -> list[Row]:
    """The row of the tile that is picked, then those of the other tiles and of the loop."""
    operands, calls = calls_of(grouped)
    seconds = measure({name: Call(call) for name, call in calls.items()}, QUICK if quick else FULL)
    names = [name for name in calls if name not in (LIBRARY, LOOP)]
    amount = 2 * operands.bounds[-1] * grouped.n * grouped.k / 1e12
    pairs = [(name, LIBRARY) for name in (*names, LOOP)]
    return compared(grouped.case, grouped, seconds, pairs, unit="TFLOP/s", amount=amount)


def rows(quick: bool) -> list[Row]:
    by_product = [product_rows(grouped, quick) for grouped in products(quick)]
    picked = [found[0] for found in by_product]
    best = [max(found[:-1], key=lambda row: row["ratio"]) for found in by_product]
    means = [
        mean_row([row for row in picked if row["case"] == case], shape=f"{case}, all shapes", provider=OURS)
        for case in (FORWARD, DGRAD, WGRAD)
    ]
    whole = [mean_row(chosen, shape="all", provider=name) for name, chosen in (("best tile", best), (OURS, picked))]
    return [*(row for found in by_product for row in found), *means, *whole]


def predictions() -> list[Row]:
    """The longer of FLOPs and bytes. A group's last row block, or in a gradient its last step, is half empty."""
    from tpformer.kernels.configurations import TILES

    machine, found = present_machine(), []
    with as_if_on(machine):
        for grouped in [each for each in products(quick=False) if each.case != DGRAD]:
            sizes = (grouped.n, grouped.k, grouped.groups, ITEMSIZE)
            tile = TILES[tiles(grouped, grouped.rows)[0]]
            block = tile.k if grouped.case == WGRAD else tile.m
            flops = grouped_matmul_cost(grouped.rows + grouped.groups * block // 2, *sizes).flops
            cost = grouped_matmul_cost(grouped.rows, *sizes)
            seconds = max(flops / machine.flops, cost.bytes / machine.memory)
            found.append(share_row(grouped.case, grouped, seconds, cost.flops))
    return found


BENCH = ratio_bench(
    rows,
    predictions,
    name="grouped_matmul",
    description="the Triton grouped GEMM against torch's in bfloat16, cold L2: forward, gradients; every tile (1 GPU)",
    device="cuda",
    check=check,
    note="A shape is groups x N x K, then the tokens of all ranks. torch's grouped_mm and the loop copy the rows that "
    "an index names, which our kernel does not; the loop's host knows the sizes of the groups. The model: max(FLOPs / "
    "F, bytes / memory bandwidth), half a block of rows more for each group, and each matrix read once.",
)
