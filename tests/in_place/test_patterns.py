"""A plan names modules by patterns, and each module gets the style that is right for it or that a user gives it."""

from collections.abc import Callable

import torch
from testing import on_every_rank
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tpformer.distributed import build_mesh
from tpformer.in_place import auto_plan, parallelize, verify
from tpformer.in_place.plan import check_plan

WIDTH = 16


class Doubled(nn.Linear):
    """A linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Gated(nn.Module):
    """An MLP whose gate is in the same weight, or whatever is given."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, h = self.up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * h)


def gated(up: type[nn.Linear] = nn.Linear, width: int = 16) -> Gated:
    return Gated(up(WIDTH, 2 * width), nn.Linear(width, WIDTH))


TOGETHER, ALONE = ("packed_colwise", "rowwise"), ("colwise_gather_output", "colwise_gather_output")
# second block -> how `up` and `down` of the first one are cut beside it
BESIDE: dict[str, tuple[Callable[[], nn.Module], tuple[str, str]]] = {
    "one like it": (gated, TOGETHER),
    "a linear of its own class": (lambda: gated(Doubled), ALONE),
    "too narrow": (lambda: gated(width=1), ALONE),
    "no linear": (lambda: Gated(nn.Identity(), nn.Linear(WIDTH // 2, WIDTH)), ALONE),
    "computed weights": (lambda: Gated(weight_norm(nn.Linear(WIDTH, 32)), nn.Linear(16, WIDTH)), ALONE),
}


@on_every_rank(2)
def test_modules_of_one_pattern_that_differ() -> None:
    """What cannot be cut stays whole, and leaves the module beside it as it is; so does what a user leaves whole."""
    tp, x = build_mesh("cpu", tensor_parallel=2)["tp"], torch.randn(2, 3, WIDTH).double()
    for case, (beside, styles) in BESIDE.items():
        model = nn.Sequential(gated(), beside()).double()
        plan = auto_plan(model, 2, example=x)
        assert (plan.style("0.up"), plan.style("0.down")) == styles, case
        verify(model, lambda whole, plan=plan: parallelize(whole, tp, plan, example=x), x).check()
    model, first = nn.Sequential(gated(), gated()).double(), {"0.up": "packed_colwise", "0.down": "rowwise"}
    both = {"1.up": "replicate", "1.down": "replicate", "*.up": "packed_colwise", "*.down": "rowwise"}
    measured = auto_plan(model, 2, example=x)
    for entries in (first, both):
        assert dict(check_plan(entries, model, measured)) == first
        verify(model, lambda whole, entries=entries: parallelize(whole, tp, entries, example=x), x).check()


class First(nn.Sequential):
    """Runs its first block only, as a mixture may in which one expert gets no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def test_a_module_that_did_not_run_is_cut_as_one_beside_it() -> None:
    model = First(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    assert auto_plan(model, 2, example=torch.randn(2, WIDTH)) == {"*.0": "colwise_gather_output"}
