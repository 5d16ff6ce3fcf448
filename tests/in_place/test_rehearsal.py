"""What a trial of one block would cut, but what is not right in the whole model, stays whole with the reason."""

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tpformer.distributed import build_mesh
from tpformer.in_place import auto_plan, parallelize, verify

WIDTH = 16
norm = functools.partial(nn.functional.normalize, dim=-1)


class Between(nn.Module):
    """Two linears, and a function of (module, hidden) between them."""

    def __init__(self, middle: Callable[..., Tensor] = lambda _, h: h.relu(), after: Callable = lambda _, y: y) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Parameter(torch.ones(1))
        self.middle, self.after, self.num_heads = middle, after, 4

    def forward(self, x: Tensor, **options: bool) -> Tensor:
        return self.after(self, self.down(self.middle(self, self.up(x), **options)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Between(lambda _, h, coupled=False: norm(h) if coupled else h.relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x), coupled=True)


def keeps_mean(module: nn.Module, h: Tensor) -> Tensor:
    module.mean = h.detach().mean()
    return h.relu()


def by_heads(module: nn.Module, h: Tensor) -> Tensor:
    return h.unflatten(-1, (module.num_heads, 8)).softmax(-1).flatten(-2)


def hooked() -> nn.Module:
    model = Between()
    model.up.register_forward_hook(lambda module, args, output: norm(output))
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def replaced() -> nn.Module:
    model = Between()
    model.up.forward = lambda x, forward=model.up.forward: norm(forward(x))
    return model


WHOLE = {
    "a detached mean": (lambda: Between(keeps_mean, lambda module, y: y * module.mean), "is also used elsewhere"),
    "a kept mean": (lambda: Between(keeps_mean), "is also used elsewhere"),
    "another layer": (
        lambda: nn.Sequential(Between(), Between(lambda _, h: norm(h))),
        "1.down does not get that rank's part",
    ),
    "another call": (Twice, "inner.down does not get that rank's part in its call 2"),
    "training": (lambda: Between(lambda m, h: norm(h) if m.training else h.relu()), "in training mode"),
    "an integer": (lambda: Between(by_heads, lambda module, y: y / module.num_heads), "integer .* also used elsewhere"),
    "a parameter": (lambda: Between(lambda m, h: h * m.scale, lambda m, y: y * m.scale), "parameter .* also elsewhere"),
    "the input": (lambda: Between(lambda m, h: h * m.x.mean()), "reaches down also around up"),
    "a hook": (hooked, "up has a hook"),
    "a tie": (tied, "is tied to another module"),
    "a forward": (replaced, "no other linear's output reaches it"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_not_right_in_the_whole_model_stays_whole(case):
    torch.manual_seed(0)
    make, reason = WHOLE[case]
    model, x = make(), torch.randn(2, 6, WIDTH)
    model.register_forward_pre_hook(lambda module, args: vars(module).__setitem__("x", args[0]))
    plan = auto_plan(model, 2, example=x)
    assert not plan and any(re.search(reason, said) for said in plan.kept.values()), str(plan)


class InPlace(nn.Module):
    """Activations that write into what parallel linears returned; the gradient of PReLU's slope is summed."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), relu, nn.Linear(32, WIDTH), relu, nn.Linear(WIDTH, 32))
        self.slope, self.last = nn.PReLU(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slope(self.layers(x)))


def in_place_on_rank() -> tuple[dict[str, str], str]:
    torch.manual_seed(0)
    tp, model, x = build_mesh("cpu", tensor_parallel=2)["tp"], InPlace().double(), torch.randn(2, 6, WIDTH).double()
    report = verify(model, lambda whole: parallelize(whole, tp, example=x), x)
    report.check()
    return dict(auto_plan(model, 2, example=x)), report.sentence


def test_outputs_of_linears_may_be_written_in_place(ranks):
    plan, said = ranks(2).run(in_place_on_rank)[0]
    assert plan["layers.2"] == "rowwise" and plan["slope"] == "replicated_with_grad_allreduce" and "are those" in said
