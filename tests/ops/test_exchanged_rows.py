"""Rows that travel to their experts, through any module, and back give what one process gives, with every gradient,
however many tokens a rank has; what is sent is as promised, and mistakes on either way are seen."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from testing import assert_same, differ_on_a_rank, on_every_rank
from torch import Tensor

from tpformer.distributed import record_collectives
from tpformer.ops import exchanged_rows
from tpformer.ops.exchanged_rows import Decision, bring_home, send_rows
from tpformer.ops.route import Routing
from tpformer.ops.row_exchange import RowExchange

HIDDEN, EXPERTS, CHOSEN = 5, 6, 3
TOKENS = {2: ((3, 4), (0, 5), (1, 0)), 3: ((0, 5, 2),)}  # of each rank


def drawn(tokens: int, best: bool) -> dict[str, Tensor]:
    """Rows, weights, what comes back, and a matrix and a bias for each expert. best: all tokens go to the
    first; else every third lacks an expert, and the last one has none: numbers that no expert has."""
    seed = torch.Generator().manual_seed(tokens)
    shapes = {"x": (tokens, HIDDEN), "weights": (tokens, CHOSEN), "dy": (tokens, HIDDEN)}
    shapes |= {"matrix": (EXPERTS, HIDDEN, HIDDEN), "bias": (EXPERTS, HIDDEN), "score": (tokens, EXPERTS)}
    made = {name: torch.randn(shape, generator=seed, dtype=torch.float64) for name, shape in shapes.items()}
    chosen = made.pop("score").argsort(1)[:, :CHOSEN]
    chosen[::3, 1], chosen[-1] = -1, EXPERTS
    return made | {"experts": torch.arange(CHOSEN).expand_as(chosen) if best else chosen}


def layer(rows: Tensor, experts: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(rows[:, None] @ matrix[experts])[:, 0] + bias[experts]


def has_one(chosen: Tensor) -> Tensor:
    return (chosen >= 0) & (chosen < EXPERTS)


def whole(of: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in of.items() if name not in ("dy", "experts")}
    y = sum(
        layer(leaves["x"], chosen % EXPERTS, leaves["matrix"], leaves["bias"])
        * torch.where(has_one(chosen), leaves["weights"][:, j], 0)[:, None]
        for j, chosen in enumerate(of["experts"].T)
    )
    y.backward(of["dy"])
    return {"y": y.detach()} | {name: x.grad for name, x in leaves.items()}


def exchanged(of: dict[str, Tensor], tokens: tuple[int, ...], share: float) -> dict[str, Tensor]:
    """This rank's results, of its own tokens and of its own experts."""
    rank, own = dist.get_rank(), EXPERTS // len(tokens)
    mine, held = slice(sum(tokens[:rank]), sum(tokens[: rank + 1])), slice(rank * own, (rank + 1) * own)
    part = {name: x[held if name in ("matrix", "bias") else mine] for name, x in of.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in part.items() if name not in ("dy", "experts")}
    held_here = [leaves["matrix"], leaves["bias"]]
    routing, options = Routing(part["experts"], leaves["weights"]), {"n_experts": EXPERTS, "share": share}
    visit = send_rows(leaves["x"], routing, held_here, Decision(routing.experts), group=dist.group.WORLD, **options)
    y = layer(visit.rows, visit.experts, *visit.own) * visit.weights[:, None] if len(visit.rows) else visit.rows
    y = bring_home(y, visit)
    y.backward(part["dy"])
    return {"y": y.detach()} | {name: x.grad for name, x in leaves.items()}


def expected(of: dict[str, Tensor], tokens: tuple[int, ...], share: float) -> dict[str, Tensor]:
    rank, own = dist.get_rank(), EXPERTS // len(tokens)
    mine, held = slice(sum(tokens[:rank]), sum(tokens[: rank + 1])), slice(rank * own, (rank + 1) * own)
    found = whole(of)
    return {name: x[held] * share if name in ("matrix", "bias") else x[mine] for name, x in found.items()}


def sent(of: dict[str, Tensor], tokens: tuple[int, ...]) -> list[tuple[str, int]]:
    """The all-to-alls of this rank: numbers, experts with weights, rows out and back; out, back, and weights back."""
    rank, own = dist.get_rank(), EXPERTS // len(tokens)
    to = [(each[has_one(each)] // own).unique() for each in of["experts"]]
    starts = [sum(tokens[:each]) for each in range(len(tokens) + 1)]
    leave = sum(len(each) for each in to[starts[rank] : starts[rank + 1]])
    come = sum(int((each == rank).any()) for each in to)
    slots, row = int((of["experts"] // own == rank).sum()), HIDDEN * 8
    told = int(has_one(of["experts"][starts[rank] : starts[rank + 1]]).sum())
    sizes = [16 * len(tokens), 16 * told, leave * row, come * row, leave * row, come * row, slots * 8]
    return [("all_to_all", size) for size in sizes]


def rolled(way: Callable) -> Callable:
    """A way whose result is in another order."""
    return lambda *args: way(*args).roll(1, 0)


MISTAKES = {
    "rows go home in another order": (RowExchange, "home", rolled(RowExchange.home)),
    "weights' gradients go home in another order": (RowExchange, "weights_home", rolled(RowExchange.weights_home)),
    "a rank's experts are not added up": (
        exchanged_rows, "_summed", lambda rows, exchange: rows[exchange.arrived.positions.max(1).values.long()],
    ),
}  # fmt: skip


@on_every_rank(2, 3)
def test_rows_travel_as_in_one_process() -> None:
    for tokens in TOKENS[dist.get_world_size()]:
        for best in (False, True):
            of, what = drawn(sum(tokens), best), f"{tokens} {best}"
            with record_collectives() as record:
                found = exchanged(of, tokens, 0.5)
            assert_same(found, expected(of, tokens, 0.5), what)
            assert [(name, size) for name, size in record] == sent(of, tokens), what


@on_every_rank(2)
def test_mistakes_are_seen() -> None:
    tokens = (3, 4)
    of = drawn(sum(tokens), False)
    right = expected(of, tokens, 0.5)
    for what, (holder, name, wrong) in MISTAKES.items():
        with mock.patch.object(holder, name, wrong):
            assert differ_on_a_rank(exchanged(of, tokens, 0.5), right), what
    assert differ_on_a_rank(exchanged(of, tokens, 1.0), right), "the share is left out"
