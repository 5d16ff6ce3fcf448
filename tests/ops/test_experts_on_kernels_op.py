"""experts on the kernels of its passes, in the interpreter, has the results and gradients that it has on references."""

import itertools
from importlib import import_module

import pytest
import torch
from testing import assert_kernel_close, on_every_rank
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.route.reference import Policy
from tpformer.ops.experts import ExpertWeights, experts
from tpformer.ops.implementation import implementation
from tpformer.ops.route import Balance, Router

KERNELS = ("route", "weighted_activation", "combine")
CALLERS = ("tpformer.ops.experts", "tpformer.ops.route", "tpformer.ops.transports.experts")
TOKENS, HIDDEN, FFN, EXPERTS, SAMPLES = 12, 16, 24, 8, 3


def results(policy: Policy, shared: bool, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """(result, balance loss and the gradients of all tensors, tokens of each expert)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).requires_grad_()

    matrices = [draw(EXPERTS, 2 * FFN, HIDDEN), draw(EXPERTS, HIDDEN, FFN)]
    matrices += [draw(FFN, HIDDEN), draw(FFN, HIDDEN), draw(HIDDEN, FFN)] if shared else []
    x, router_weight = draw(TOKENS, HIDDEN), draw(EXPERTS, HIDDEN)
    balance = Balance(0.1, SAMPLES, torch.arange(TOKENS) % SAMPLES)
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    router = Router(policy, torch.linspace(-0.05, 0.05, EXPERTS).to(dtype), load, balance=balance)
    y, loss = experts(
        x, ExpertWeights(*matrices), router_weight=router_weight, router=router, n_experts=EXPERTS, activation="silu",
        residual=x,
    )  # fmt: skip
    assert loss is not None
    tensors = [x, router_weight, *matrices]
    return [y, loss, *torch.autograd.grad((y * draw(TOKENS, HIDDEN).detach()).sum() + loss, tensors)], load


@on_every_rank(1, pool="interpreted")
def test_experts_on_kernels() -> None:
    used = set()

    def chosen(op: str, x: Tensor):
        used.add(op)
        return import_module(f"tpformer.kernels.{op}.kernel") if op in KERNELS else implementation(op, x)

    for score, normalised, shared in itertools.product(("softmax", "sigmoid"), (True, False), (True, False)):
        policy = Policy(3, score, normalised, 1.5, 4, 2 if shared else 4)
        (oracle, load), (baseline, _) = (results(policy, shared, dtype) for dtype in (torch.float64, torch.float32))
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLERS:
                patch.setattr(import_module(name), "implementation", chosen)
            found, own = results(policy, shared)
        assert torch.equal(load, own) and int(load.sum()) == 3 * TOKENS
        for index, x in enumerate(found):
            assert_kernel_close(x, oracle[index], baseline[index], f"{policy} shared={shared} {index}")
    assert used >= set(KERNELS)
