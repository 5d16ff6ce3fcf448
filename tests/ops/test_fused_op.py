"""The fused transport equals float64 plain torch, whoever is late, and names a peer that does not come: in Triton's
interpreter, on one GPU that several processes share, and between GPUs with one rank on each (`make nvlink`).

Processes on one GPU take turns, so every wait for a peer may cost whole time slices. Shapes are small, and kernels have
few programs, which leave room for every rank's where they do run together. Only several GPUs can show gathers by copy
engines, and one result for fused, pipelined and sequential over NCCL.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from opened import opened

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from linears import Column, Row
from shards import Case, Here, check, on_device, on_transport
from testing import assert_identical
from torch import Tensor
from turns import in_turns

from tpformer import ops
from tpformer.distributed import HangError, build_mesh, check_all, close, set_timeout
from tpformer.layers import MLP, TensorParallel, linear_plans
from tpformer.ops.choice import choose

TIMEOUT = 150  # seconds of one run: the first one compiles


class Place(NamedTuple):
    """Ranks with their device, as in `on_device`; the number of steps, which a GPU takes without waiting between."""

    ranks: Any
    t: int
    device: str
    dtype: torch.dtype
    steps: int

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks(self.t).run(on_device, self.device, function, *args, timeout=TIMEOUT)


POOLS = {
    "interpreted": ("cpu", torch.float32, 3),  # the third step uses the first one's slots again
    "one_gpu": ("cuda:0", torch.bfloat16, 40),
    "gpus": ("cuda", torch.bfloat16, 200),
}


@pytest.fixture
def place(request) -> Place:
    pool, t = request.param
    found = Place(request.getfixturevalue(pool), t, *POOLS[pool])
    if pool != "interpreted":
        found.run(forget)
    return found


def forget() -> None:
    """Drop the state of earlier tests, such as a group that one of them poisoned."""
    assert dist.group.WORLD is not None
    close(dist.group.WORLD)
    set_timeout(dist.group.WORLD, 60)


def places(interpreted: Sequence[int] = (), one_gpu: Sequence[int] = (), proof: Sequence[int] = ()) -> Any:
    """Run the test with so many ranks on a CPU, in the proofs too, on one GPU, and on every number of GPUs."""
    params = [pytest.param(("interpreted", t), id=str(t)) for t in interpreted]
    params += in_turns((("interpreted", t),) for t in proof)
    params += [pytest.param(("one_gpu", t), id=f"{t} on a GPU", marks=pytest.mark.gpu) for t in one_gpu]
    params += [pytest.param(("gpus", t), id=f"{t} GPUs", marks=pytest.mark.nvlink) for t in (2, 3, 4, 8)]
    return pytest.mark.parametrize("place", params, indirect=True)


def cases(t: int, sequence_parallel: bool, on_gpu: bool) -> list[Case]:
    """From one of everything to primes, more than three weights, and more than a tile, of 16 in the interpreter."""
    several = [Column(t, 3, 5, (7, 2, 3), ("layernorm", True)), Row(t, 3, 5, 7, ("gelu_tanh", False))]
    if t != 3 or on_gpu:  # three ranks show only who comes after whom
        several += [Column(t, 1, 1, (1,), bias=False), Column(t, 17, 11, (13,), ("rmsnorm", False))]
        several += [
            Column(t, 2, 8, (1, 2, 3, 4), bias=False),
            Row(t, 2, 13, 3, ("gelu", False), bias=False, drop=False),
        ]
        several += [Row(t, 1, 1, 1, bias=False, residual=False, drop=False)]
        several += [Row(t, 17, 3, 11, ("silu", True), drop=False)]
    if on_gpu:
        several += [Column(t, 37, 24, (8, 13), ("layernorm", True)), Column(t, 160, 136, (264,), ("rmsnorm", False))]
        several += [Row(t, 5, 24, 40, ("gelu_tanh", False)), Row(t, 160, 72, 264, ("silu", True), drop=False)]
    return [replace(case, sequence_parallel=sequence_parallel) for case in several]


@pytest.mark.parametrize("sequence_parallel", [True, False])
@places(interpreted=[2], proof=[3, 4], one_gpu=[2, 4])
def test_equals_plain_torch(place, sequence_parallel):
    run = partial(place.run, on_transport, "fused")
    check(run, cases(place.t, sequence_parallel, place.device != "cpu"), place.dtype)


def sent_by(copies: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with the copy engines' path for every gather, or with none."""
    from tpformer.ops.transports import fused

    with mock.patch.object(fused, "send_by_copies", lambda *_: copies):
        return function(*args)


@places(interpreted=[3])
def test_gathers_by_copies_equal_plain_torch(place):
    """Of more than three weights the later ones read own rows from the slot, too."""
    several = [Column(place.t, 3, 6, (2, 3), ("layernorm", True)), Column(place.t, 2, 8, (1, 2, 3, 4), bias=False)]
    several += [Row(place.t, 3, 3, 7, ("silu", True))]
    check(partial(place.run, sent_by, True, on_transport, "fused"), several, place.dtype)


def zeros_and_ones(step: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's tensors, and what plain torch makes of all ranks' in float64: its part of the results.

    With up to 8 ranks every sum is a whole number below 257, which bfloat16 holds exactly, so every transport gives the
    same bits in whatever order it adds.
    """
    t, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(step)
    shapes = {"x": (3 * t, 4), "gate": (4 * t, 4), "up": (4 * t, 4), "down": (3, 4 * t), "dy": (3 * t, 3)}
    whole = {name: torch.randint(0, 2, shape, generator=generator).double() for name, shape in shapes.items()}
    inputs = {name: x.requires_grad_() for name, x in whole.items() if name != "dy"}
    y = (inputs["x"] @ inputs["gate"].t() + inputs["x"] @ inputs["up"].t()) @ inputs["down"].t()
    y.backward(whole["dy"])
    wanted = {"y": y} | {f"d{name}": x.grad for name, x in inputs.items()}

    def part(name: str, x: Tensor) -> Tensor:
        return x.detach().chunk(t, 1 if name in ("down", "ddown") else 0)[rank].to(dtype)

    own = {name: part(name, x).to(Here.device) for name, x in whole.items()}
    return own, {name: part(name, x) for name, x in wanted.items()}


def stall(chance: random.Random) -> None:
    """Delay this rank at random: its host, and on a GPU its stream."""
    if chance.random() < 0.3:
        time.sleep(0.003 * chance.random())
    if Here.device.type == "cuda":
        torch.cuda._sleep(chance.randrange(1, 1_000_000))


def both_linears(values: dict[str, Tensor], group: Any, transport: str, between: Callable = lambda: None) -> Tensor:
    carrier = opened(group, values["x"], transport=transport)
    gate, up = ops.column_linear(values["x"], [values["gate"], values["up"]], transport=carrier)
    between()
    return ops.row_linear(gate + up, values["down"], transport=carrier)


def late_ranks(transport: str, dtype: torch.dtype, steps: int, backend: str | None = None) -> None:
    """Run many forwards and backwards without synchronisation between them, each rank late in its own way.

    backend: make a group with this backend; None takes the world.
    """
    late, results = partial(stall, random.Random(dist.get_rank())), []
    group = dist.group.WORLD if backend is None else dist.new_group(backend=backend)
    steps_of = [zeros_and_ones(step, dtype) for step in range(steps)]
    for values, _ in steps_of:
        leaves = {name: x.requires_grad_() for name, x in values.items() if name != "dy"}
        late()
        y = both_linears(leaves, group, transport, late)
        late()
        y.backward(values["dy"])
        results.append({"y": y} | {f"d{name}": x.grad for name, x in leaves.items()})
    for step, result in enumerate(results):
        found = {name: x.cpu() for name, x in result.items()}
        assert_identical(found, steps_of[step][1], f"rank {dist.get_rank()}, step {step}")
    check_all()


@places(interpreted=[3], one_gpu=[2, 4])
def test_late_ranks(place):
    place.run(sent_by, False, late_ranks, "fused", place.dtype, place.steps)


@places()
def test_late_ranks_whose_rows_are_copied(place):
    place.run(sent_by, True, late_ranks, "fused", place.dtype, place.steps)


@pytest.mark.parametrize("transport", ["sequential", "pipelined", "fused"])
@places()
def test_transports_agree_over_nccl(place, transport):
    """They have the bits of plain torch in float64, because all numbers are small and whole."""
    place.run(late_ranks, transport, place.dtype, 20, "nccl")


def replays(count: int) -> None:
    """Capture one epoch of each workspace in a CUDA graph, and replay it with new inputs: parities alternate."""
    chance, group, results = random.Random(dist.get_rank()), dist.group.WORLD, []
    steps = [zeros_and_ones(step, torch.bfloat16) for step in range(count + 1)]
    static = {name: x.clone() for name, x in steps[count][0].items()}
    with torch.no_grad():
        both_linears(static, group, "fused")  # makes the workspaces and compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = both_linears(static, group, "fused")
    for values, _ in steps[:count]:
        for name, x in static.items():
            x.copy_(values[name])
        stall(chance)
        graph.replay()
        results.append(out.clone())
    assert_identical([y.cpu() for y in results], [wanted["y"] for _, wanted in steps[:count]], f"{dist.get_rank()}")
    check_all()


@places(one_gpu=[2])
def test_graph_replays(place):
    place.run(replays, 40)


def absent_peer(timeout: float) -> None:
    """The last rank never begins the second operation. On the others an error names it."""
    group, rank, message = dist.new_group(list(range(dist.get_world_size()))), dist.get_rank(), ""
    set_timeout(group, 60)  # the first operation compiles, on one rank perhaps a second later than on the other
    x, weight = torch.ones(2, 4, device=Here.device), torch.ones(6, 4, device=Here.device)
    for present in (True, rank < group.size() - 1):
        try:
            if present:
                ops.column_linear(x, weight, transport=opened(group, x, transport="fused"))
            if Here.device.type == "cuda":
                torch.cuda.synchronize()
            check_all()
            set_timeout(group, timeout)
        except HangError as error:
            message = str(error)
        dist.barrier()  # a rank that left early would be a peer that died
    parts = "waited in vain", f"for rank {group.size() - 1}", f"rank {rank}", "all_gather_matmul", Path(__file__).name
    assert all(part in message for part in parts) if present else message == "", message
    close(group)


@places(interpreted=[2], one_gpu=[2])
def test_a_peer_that_never_arrives_is_named(place):
    """The timeout is counted in polls, which take longer beside other work."""
    place.run(absent_peer, 0.3 if place.device == "cpu" else 1.0)


def left(way: str) -> None:
    """Every rank leaves an operation by an error, or begins a gather for which it never waits."""
    from tpformer.ops.transports import fused

    group, weight = dist.new_group(list(range(dist.get_world_size()))), torch.ones(3, 4)

    def gather(rows: int) -> Tensor:
        x = torch.ones(rows, 4)
        return ops.column_linear(x, weight, transport=opened(group, x, transport="fused"))

    if way == "no rows":  # is seen before anything is begun
        with pytest.raises(ValueError, match="at least one row"):
            gather(0)
        assert (gather(2) == 4).all()
        return
    if way == "no memory":
        with (
            mock.patch.object(fused, "all_gather_matmul", side_effect=torch.OutOfMemoryError),
            pytest.raises(torch.OutOfMemoryError),
        ):
            gather(2)
    else:
        fused.Fused(group).start_gather(torch.ones(2, 4))
    with pytest.raises(HangError, match=f"rank {dist.get_rank()} .* at {__file__}.* and has not ended it"):
        gather(2)
    close(group)


@pytest.mark.parametrize("way", ["no rows", "no memory", "a gather alone"])
@places(interpreted=[2])
def test_an_operation_that_was_begun_ends_or_is_the_last_one(place, way):
    place.run(left, way)


def automatic() -> None:
    """Auto takes the fused transport for an MLP of many rows, in the plans and in what runs."""
    mesh = build_mesh(Here.device.type, tensor_parallel=dist.get_world_size())["tp"]
    options = {"tp": TensorParallel(mesh), "device": Here.device, "dtype": torch.bfloat16}
    mlp, x = MLP(256, ffn_hidden_size=4608, **options), torch.ones(512, 256, device=Here.device).bfloat16()
    with mock.patch.object(choose, "device_name", lambda _: "a GPU"):  # of which there is no model
        for plan in linear_plans(mlp, 512 * mesh.size()):
            assert plan.decision.transport == "fused", plan
        with ops.record_transports() as ran:
            mlp(x.requires_grad_()).sum().backward()
    assert [name for _, name in ran] == ["fused"] * 4


@places(one_gpu=[2])
def test_auto_takes_the_fused_kernels_for_many_rows(place):
    place.run(automatic)
