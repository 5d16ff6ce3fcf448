"""Device and dtype alone choose kernel or reference; both are called in the same way, and experts on kernels, in the
interpreter, have the results and gradients that they have on references."""

import inspect
import itertools
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT
from shards import leaves, make
from testing import assert_kernel_close, on_every_rank
from torch import Tensor

from tpformer.kernels.route.reference import Policy
from tpformer.ops.experts import ExpertWeights, experts
from tpformer.ops.implementation import implementation
from tpformer.ops.route import Balance, Router

OPS = ("activation", "combine", "cross_entropy", "dropout", "norm", "rope", "route", "update", "weighted_activation")
KERNELS = ("route", "weighted_activation", "combine")
CALLERS = ("tpformer.ops.experts", "tpformer.ops.route", "tpformer.ops.transports.experts")
TOKENS, HIDDEN, FFN, EXPERTS, SAMPLES = 12, 16, 24, 8, 3


def called(op: str) -> set[str]:
    """The functions that tpformer calls through implementation(op, ...), directly or by a name for the module."""
    names = set()
    for path in (ROOT / "tpformer").rglob("*.py"):
        text = path.read_text()
        if f'implementation("{op}"' in text:
            names |= set(re.findall(rf'implementation\("{op}", [^)]*\)\.(\w+)', text))
            if op in ("cross_entropy", "update"):
                names |= set(re.findall(r"kernels\.(\w+)\(", text))
    return names


def tensor(device: str, dtype: torch.dtype) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=device.startswith("cuda"), dtype=dtype, device=torch.device(device))


@pytest.mark.parametrize("op", OPS)
def test_both_modules_have_what_is_called(op, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    reference = implementation(op, tensor("cpu", torch.float32))
    kernel = implementation(op, tensor("cuda:0", torch.bfloat16))
    folder = f"tpformer.kernels.{op}"
    assert (reference.__name__, kernel.__name__) == (f"{folder}.reference", f"{folder}.kernel")
    assert implementation(op, tensor("cuda:0", torch.float64)) is reference
    assert called(op)
    for name in called(op):
        theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (reference, kernel))
        # a kernel may have more keywords: block sizes and numbers of programs
        assert list(ours)[: len(theirs)] == list(theirs), name
        assert all(ours[extra].kind == inspect.Parameter.KEYWORD_ONLY for extra in list(ours)[len(theirs) :]), name
    with pytest.raises(ValueError, match=rf"{op} of a tensor on cuda:1, but .* is cuda:0: .*set_device\(1\) first"):
        implementation(op, tensor("cuda:1", torch.float32))


def results(policy: Policy, shared: bool, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """(result, balance loss and the gradients of all tensors, tokens of each expert)."""
    shapes = {"x": (TOKENS, HIDDEN), "router": (EXPERTS, HIDDEN)}
    shapes |= {"fc1": (EXPERTS, 2 * FFN, HIDDEN), "fc2": (EXPERTS, HIDDEN, FFN)}
    shapes |= {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)} if shared else {}
    drawn = make(0, torch.float32, **shapes, dy=(TOKENS, HIDDEN))
    *tensors, dy = leaves({name: x.to(dtype) / x.shape[-1] ** 0.5 for name, x in drawn.items()}).values()
    x, router_weight, *matrices = tensors
    balance = Balance(0.1, SAMPLES, torch.arange(TOKENS) % SAMPLES)
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    router = Router(policy, torch.linspace(-0.05, 0.05, EXPERTS).to(dtype), load, balance=balance)
    y, loss = experts(
        x, ExpertWeights(*matrices), router_weight=router_weight, router=router, n_experts=EXPERTS, activation="silu",
        residual=x,
    )  # fmt: skip
    assert loss is not None
    return [y, loss, *torch.autograd.grad((y * dy.detach()).sum() + loss, tensors)], load


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
