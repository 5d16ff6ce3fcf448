"""Within keep_blocks a weight is quantised once, and everything is what it is outside, to the bit: after writes, of
parts of a weight, of memory that another weight had, in a step and in the next one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from testing import assert_identical
from torch import Tensor

from tpformer import ops
from tpformer.ops.transports import quantized
from tpformer.ops.transports.interface import REGISTRY
from tpformer.ops.transports.quantized import BLOCKS, keep_blocks, record_blocks
from tpformer.ops.transports.sequential import local

LINEAR = {"transport": local(BLOCKS)}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 128, dtype=torch.float64, generator=GENERATOR)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR).requires_grad_()


def microbatch(*weights: Tensor) -> list[Tensor]:
    """The output of a column linear of these weights, and the gradient of its input."""
    x = X.clone().requires_grad_()
    y = torch.cat(ops.column_linear(x, weights, **LINEAR), 1)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def whole(keeps: bool) -> Iterator[list[Tensor]]:
    """Two microbatches of two weights, of which one is used by another linear, too."""
    first, second = weight(256, 128), weight(128, 128)
    with keep_blocks() if keeps else nullcontext():
        yield microbatch(first, second)
        yield microbatch(second)
        yield microbatch(first, second)


def written(keeps: bool) -> Iterator[list[Tensor]]:
    """Between two uses autograd counts a write."""
    own = weight(128, 128)
    with keep_blocks() if keeps else nullcontext():
        yield microbatch(own)
        with torch.no_grad():
            own.mul_(3)
        yield microbatch(own)


def parts(keeps: bool) -> Iterator[list[Tensor]]:
    """Of one memory the first rows, all rows, and other columns."""
    own = weight(256, 128).detach()
    with keep_blocks() if keeps else nullcontext():
        for part in (own[:128], own, own.view(128, 256)[:, :128], own[128:]):
            yield microbatch(part.requires_grad_())


def memory(keeps: bool) -> Iterator[list[Tensor]]:
    """The memory of a weight is freed, as FSDP2 frees it, and another weight begins where it began."""
    gone, other = weight(128, 128), weight(128, 128)
    with keep_blocks() if keeps else nullcontext():
        yield microbatch(gone)
        with mock.patch.object(Tensor, "data_ptr", lambda x: 0):  # of every tensor
            yield microbatch(gone)
            yield microbatch(other)


def steps(keeps: bool) -> Iterator[list[Tensor]]:
    """An optimizer's kernel writes the weight, and nothing counts it."""
    own = weight(128, 128)
    for _ in range(2):
        with keep_blocks() if keeps else nullcontext():
            yield microbatch(own)
            yield microbatch(own)
        own.data.mul_(-2)


CASES = {each.__name__: each for each in (whole, written, parts, memory, steps)}


def found(case: Callable[[bool], Iterator[list[Tensor]]], keeps: bool) -> list[list[Tensor]]:
    GENERATOR.manual_seed(1)
    return list(case(keeps))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_kept_is_what_would_be_made(case: Callable) -> None:
    assert_identical(found(case, True), found(case, False))
    assert REGISTRY.blocks is None


def test_a_weight_is_quantised_once_within_and_at_each_use_outside() -> None:
    for case, made, fresh in ((whole, 2, 2 * 5), (written, 2, 2 * 2), (steps, 2, 2 * 4)):
        for keeps, times in ((True, made), (False, fresh)):
            with record_blocks() as blocks:
                found(case, keeps)
            assert sum(len(each.values) != len(X) for each in blocks) == times, (case, keeps)


@contextmanager
def never_forgetting() -> Iterator[None]:
    REGISTRY.blocks = REGISTRY.blocks or {}
    yield


MUTANTS: dict[str, tuple[str, tuple[Any, str, Any]]] = {
    "a write is not seen": ("written", (quantized, "versions", lambda *_: [0])),
    "an address alone tells weights apart": ("parts", (Tensor, "is_set_to", lambda *_: True)),
    "memory is taken for a weight": ("memory", (Tensor, "is_set_to", lambda *_: True)),
    "a step's blocks go on to the next one": ("steps", (quantized, "keep_blocks", never_forgetting)),
    "the transposed copy is another weight's": (
        "whole", (quantized, "_both", lambda x: (BOTH(x)[0], BOTH(x.flip(0))[1]))
    ),
}  # fmt: skip
BOTH = quantized._both


@pytest.mark.parametrize("mutant", MUTANTS)
def test_stale_copies_are_noticed(mutant: str) -> None:
    case, change = MUTANTS[mutant]
    wanted = found(CASES[case], False)
    with mock.patch.object(*change), mock.patch.dict(globals(), keep_blocks=quantized.keep_blocks):
        try:
            wrong = found(CASES[case], True)
        except RuntimeError:
            return  # of blocks of another shape
        finally:
            REGISTRY.blocks = None
    assert any(not torch.equal(x, y) for x, y in zip(sum(wrong, []), sum(wanted, []), strict=True))


def test_an_exception_within_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), keep_blocks():
        microbatch(weight(128, 128))
        raise ZeroDivisionError
    assert REGISTRY.blocks is None


def test_contexts_that_overlap_leave_nothing_behind() -> None:
    """Those of two threads. The first one's weight is written once its context is left."""
    own, first, second = weight(128, 128), keep_blocks(), keep_blocks()
    first.__enter__()
    second.__enter__()
    microbatch(own)
    first.__exit__(None, None, None)
    own.data.mul_(3)
    found = microbatch(own)
    second.__exit__(None, None, None)
    assert REGISTRY.blocks is None
    assert_identical(found, microbatch(own))


def test_experts_are_kept_and_their_gradients_alike() -> None:
    def run(keeps: bool) -> list[Tensor]:
        GENERATOR.manual_seed(2)
        matrices = ops.ExpertWeights(weight(2, 256, 128), weight(2, 128, 128))
        routing = ops.Routing(torch.tensor([[0], [1], [1]], dtype=torch.int32), torch.ones(3, 1, dtype=torch.float64))
        results = []
        with keep_blocks() if keeps else nullcontext(), record_blocks() as made:
            for _ in range(2):
                x = X.clone().requires_grad_()
                y, _ = ops.experts(x, matrices, routing=routing, n_experts=2, activation="silu", **LINEAR)
                y.square().sum().backward()
                results += [y.detach(), x.grad]
        assert sum(len(each.values) > len(X) for each in made) == (2 if keeps else 2 * 4)
        return results

    assert_identical(run(True), run(False))
