"""Queued weight gradients have the bits, collectives and GEMMs of the ordinary backward, but later, by microbatch. On 1
and 2 ranks, with DTensor parameters, several microbatches in flight, and each transport that runs on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from shards import Seen, make, mine
from testing import assert_identical, on_every_rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer import ops
from tpformer.distributed import build_mesh, record_collectives
from tpformer.layers import ColumnParallelLinear, Positions, RowParallelLinear, TensorParallel, transformer_block
from tpformer.ops import WeightGradientQueue, active_queue
from tpformer.parallel import reduce_partial_gradients

HIDDEN, BATCH, SEQ, MICROBATCHES = 24, 2, 4, 3


class Blocks(nn.Module):
    """A grouped-query block, whose keys and values every one of 2 ranks has (used_rows), and a gated block."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        llama = {"norm": "rmsnorm", "qk_norm": True, "activation": "swiglu", "rope_base": 1e4, "bias": False}
        self.blocks = nn.ModuleList(
            transformer_block(HIDDEN, 4, **each, **options) for each in ({"n_kv_heads": 1}, llama)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, positions=Positions(BATCH, SEQ))
        return x


def gradients(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    found = {f"x{i}": x.grad for i, x in enumerate(inputs)}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.shape == parameter.shape
        found[f"{name} {parameter.grad.placements}"] = parameter.grad.to_local()
    return found


def backward(y: Tensor) -> None:
    y.square().sum().backward()


def step(transport: str, sequence_parallel: bool, queued: bool) -> tuple[dict, list, int]:
    """The gradients of all microbatches, and the collectives and the GEMMs of their backwards."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    model = Blocks(tp=TensorParallel(mesh, sequence_parallel, transport))
    whole = make(1, torch.float32, **{f"x{i}": (BATCH * SEQ, HIDDEN) for i in range(MICROBATCHES)})
    inputs = [mine(x, 0 if sequence_parallel else "equal").requires_grad_() for x in whole.values()]
    queues, outputs = [WeightGradientQueue() for _ in inputs], []
    for x, queue in zip(inputs, queues, strict=True):
        with queue.collect() if queued else nullcontext():
            outputs.append(model(x))
    with record_collectives() as calls, Seen() as seen:
        # two microbatches' backwards pass before the first weight gradients
        for index, queue in enumerate(queues):
            backward(outputs[index])
            assert len(queue) == (8 if queued else 0)  # 4 linear operations in each block
            if index:
                queues[index - 1].run()
        weights = [p for p in model.parameters() if p.ndim == 2]
        before = [None if p.grad is None else p.grad.to_local().clone() for p in weights]
        in_backward = list(calls)
        queues[-1].run()
    assert not any(map(len, queues)) and active_queue() is None
    later = [b is None or not torch.equal(b, p.grad.to_local()) for b, p in zip(before, weights, strict=True)]
    assert later == [queued] * len(weights)
    if queued and sequence_parallel and dist.get_world_size() > 1:
        # the second gather of a column's input, and nothing else, waits with its weight gradients
        assert [name for name, _ in calls[len(in_backward) :]] == ["all_gather"] * 4
    return gradients(model, inputs), sorted(calls), seen.gemms


@on_every_rank(1, 2)
def test_equals_the_ordinary_backward() -> None:
    several = [("sequential", True), ("pipelined", True), ("sequential", False)]
    for how in several if dist.get_world_size() > 1 else several[:1]:
        expected, actual = (step(*how, queued) for queued in (False, True))
        assert_identical(actual, expected, str(how))
        assert expected[2] > 0


def plain_pair(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(ColumnParallelLinear(6, 8, **options), RowParallelLinear(8, 6, activation="silu", **options))


def test_plain_parameters_and_one_queue_for_a_stage():
    """torch.distributed.pipelining's dw_builder calls `take` after each microbatch's backward."""
    ours, theirs, queue = plain_pair(), plain_pair(), WeightGradientQueue()
    xs, runners = torch.randn(3, 5, 6), []
    with queue.collect():
        outputs = [ours(x) for x in xs]
    for y in outputs:
        backward(y)
        runners.append(queue.take())
    assert ours[0].weight.grad is None and ours[0].bias.grad is not None and len(queue) == 0
    for run, x in zip(runners, xs, strict=True):
        run()
        backward(theirs(x))
        for index in (0, 1):
            assert torch.equal(ours[index].weight.grad, theirs[index].weight.grad)


def test_the_queue_is_the_forwards():
    """A backward finds the queue of its forward, also in another thread; other forwards do not."""
    model, queue, thread = plain_pair(), WeightGradientQueue(), ThreadPoolExecutor(1)
    with queue.collect():
        y = model(torch.randn(5, 6))
        assert thread.submit(active_queue).result() is None
        inner = WeightGradientQueue()
        with pytest.raises(ZeroDivisionError), inner.collect():
            assert active_queue() is inner
            raise ZeroDivisionError
        assert active_queue() is queue
    assert active_queue() is None
    thread.submit(backward, y).result()
    assert len(queue) == 2
    backward(model(torch.randn(5, 6)))
    assert len(queue) == 2 and model[0].weight.grad is not None


def test_of_several_weights_only_those_that_want_it():
    x, a, b = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True), torch.randn(5, 4)
    queue, got = WeightGradientQueue(), {}
    sinks = [lambda dw: got.update(a=dw), lambda dw: got.update(b=dw)]
    ya, yb = ops.column_linear(x, [a, b], deferred=ops.Deferred(queue, sinks))
    (ya.sum() + yb.sum()).backward()
    queue.run()
    assert a.grad is None and got.keys() == {"a"}
    assert torch.equal(got["a"], torch.ones(3, 2).t() @ x)
    for operation in (ops.column_linear, ops.row_linear):
        operation(x, b, deferred=ops.Deferred(queue, sinks[1:])).sum().backward()
        assert len(queue) == 0


def test_a_parameter_laid_out_anew_is_refused():
    model, queue = plain_pair(), WeightGradientQueue()
    with queue.collect():
        y = model(torch.randn(5, 6))
    backward(y)
    model[0].weight = nn.Parameter(model[0].weight[:4].detach().clone())
    words = r"weight is \(4, 6\) torch.float32 on this rank, its gradient \(8, 6\) torch.float32: keep .*unshar"
    with pytest.raises(RuntimeError, match=words):
        queue.run()


@on_every_rank(2)
def test_what_is_added_to_a_gradient_that_was_summed_over_ranks_is_summed_too() -> None:
    """As by an ordinary backward, so that the ranks' gradients stay equal."""
    found = []
    for queued in (False, True):
        torch.manual_seed(0)
        rows = slice(dist.get_rank(), dist.get_rank() + 2)  # of which the ranks share one
        layer = ColumnParallelLinear(4, 3, used_rows=rows, tp=build_mesh("cpu", tensor_parallel=2)["tp"])
        for step in range(3):
            queue = WeightGradientQueue()
            with queue.collect() if queued else nullcontext():
                y = layer(torch.full((2, 4), step + 1.0))
            backward(y)
            queue.run()
            reduce_partial_gradients(layer)
        found.append(layer.weight.grad.to_local())
    assert_identical(found[1], found[0])
