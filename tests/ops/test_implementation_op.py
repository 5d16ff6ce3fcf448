"""Device and dtype alone choose kernel or reference, and both are called in the same way."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tpformer.ops.implementation import implementation

OPS = ("activation", "combine", "cross_entropy", "dropout", "norm", "rope", "route", "weighted_activation")
ROOT = Path(__file__).resolve().parents[2]


def called(op: str) -> set[str]:
    """The functions that tpformer calls through implementation(op, ...), directly or by a name for the module."""
    names = set()
    for path in (ROOT / "tpformer").rglob("*.py"):
        text = path.read_text()
        if f'implementation("{op}"' in text:
            names |= set(re.findall(rf'implementation\("{op}", [^)]*\)\.(\w+)', text))
            if op == "cross_entropy":
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
    assert (reference.__name__, kernel.__name__) == tuple(
        f"tpformer.kernels.{op}.{module}" for module in ("reference", "kernel")
    )
    assert implementation(op, tensor("cuda:0", torch.float64)) is reference
    assert called(op)
    for name in called(op):
        theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (reference, kernel))
        # a kernel may have more keywords: block sizes and numbers of programs
        assert list(ours)[: len(theirs)] == list(theirs), name
        assert all(ours[extra].kind == inspect.Parameter.KEYWORD_ONLY for extra in list(ours)[len(theirs) :]), name


def test_another_gpu_than_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"norm of a tensor on cuda:1, but .* is cuda:0: .*set_device\(1\) first"):
        implementation("norm", tensor("cuda:1", torch.float32))
