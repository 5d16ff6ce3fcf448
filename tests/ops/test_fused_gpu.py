"""The fused transport on one GPU that several processes share: bfloat16 against float64, late ranks, graphs, a hang.

Processes on one device take turns, so every wait for a peer may cost whole time slices. Shapes are small, and kernels
have few programs, which leave room for every rank's where they do run together. The device is that of shards.Here:
test_nvlink.py runs the same with one GPU per rank, test_fused_op.py some of it in the interpreter.
"""

import random
import time

import pytest

pytest.importorskip("triton")

import test_column_linear_op as column
import test_row_linear_op as row
import torch
import torch.distributed as dist
from shards import Here, OnTransport, on_device
from torch import Tensor

from tpformer import ops
from tpformer.distributed import HangError, build_mesh, check_all, close, set_timeout
from tpformer.layers import MLP, TensorParallel, explain, init_weights, linear_plans

TIMEOUT = 150  # seconds of one run: the first one compiles
# (tokens per rank, K, widths per rank, norm, bias), from one of everything to padded rows, several tiles and weights
COLUMNS = [
    (1, 1, (1,), (None, False), False),
    (37, 24, (8, 13), ("layernorm", True), True),
    (160, 136, (264,), ("rmsnorm", False), True),
    (16, 40, (1, 2, 3, 4), (None, False), False),
]
# (tokens per rank, K per rank, N, (activation, gated), (bias, residual, dropout))
ROWS = [
    (1, 1, 1, (None, False), (False, False, False)),
    (5, 24, 40, ("gelu_tanh", False), (True, True, True)),
    (160, 72, 264, ("silu", True), (True, True, False)),
    (16, 13, 3, ("gelu", False), (False, True, False)),
]
STEPS, REPLAYS = 40, 40


def on_fused(pool, device: str) -> OnTransport:
    return OnTransport(pool, "fused", device, TIMEOUT)


def check_columns(ranks, t: int, sequence_parallel: bool, dtype=torch.bfloat16, sizes=COLUMNS) -> None:
    for tokens, k, widths, norm, bias in sizes:
        case = column.case(tokens * t, k, tuple(n * t for n in widths), *norm, bias, sequence_parallel)
        column.check(ranks, t, case, dtype)


def check_rows(ranks, t: int, sequence_parallel: bool, dtype=torch.bfloat16, sizes=ROWS) -> None:
    for tokens, k, n, activation, switches in sizes:
        if switches[2]:  # the dropout of these cases knows 6 samples
            tokens = min(tokens, 6 * row.SEQ // t)
        case = row.case(tokens * t, k * t, n, *activation, *switches, sequence_parallel)
        row.check(ranks, t, case, dtype)


def forget() -> None:
    """Drop the state of earlier tests, such as a group that one of them poisoned."""
    assert dist.group.WORLD is not None
    close(dist.group.WORLD)
    set_timeout(dist.group.WORLD, 60)


def zeros_and_ones(step: int) -> list[dict[str, Tensor]]:
    """Return every rank's tensors, on the CPU. With up to 8 ranks every sum is a whole number below 257, which bfloat16
    holds exactly, so every transport gives the same bits in whatever order it adds."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"x": (3, 4), "gate": (4, 4), "up": (4, 4), "down": (3, 4), "dy": (3, 3)}
    return [
        {name: torch.randint(0, 2, shape, generator=generator).double() for name, shape in shapes.items()}
        for _ in range(dist.get_world_size())
    ]


def expected(step: int) -> dict[str, Tensor]:
    """What `late_ranks` should give on this rank, by plain torch in float64 over all ranks' tensors."""
    everyone, rank = zeros_and_ones(step), dist.get_rank()
    whole = {name: torch.cat([x[name] for x in everyone], 1 if name == "down" else 0) for name in everyone[0]}
    leaves = {name: x.requires_grad_() for name, x in whole.items() if name != "dy"}
    hidden = leaves["x"] @ leaves["gate"].t() + leaves["x"] @ leaves["up"].t()
    y = hidden @ leaves["down"].t()
    y.backward(whole["dy"])
    parts = {"y": y.detach().chunk(len(everyone))[rank]}
    for name, x in leaves.items():
        parts[f"d{name}"] = x.grad.chunk(len(everyone), 1 if name == "down" else 0)[rank]
    return parts


def stall(chance: random.Random, device: torch.device) -> None:
    """Delay this rank at random: its host, and on a GPU its stream."""
    if chance.random() < 0.3:
        time.sleep(0.003 * chance.random())
    if device.type == "cuda":
        torch.cuda._sleep(chance.randrange(1, 1_000_000))


def late_ranks(transport: str, dtype: torch.dtype, steps: int, backend: str | None = None) -> None:
    """Run many forwards and backwards without synchronisation between them, each rank late in its own way.

    backend: make a group with this backend; None takes the world.
    """
    rank, chance = dist.get_rank(), random.Random(dist.get_rank())
    group = dist.group.WORLD if backend is None else dist.new_group(backend=backend)
    inputs = [{n: x.to(Here.device, dtype) for n, x in zeros_and_ones(step)[rank].items()} for step in range(steps)]
    results = []
    for values in inputs:
        dy = values.pop("dy")
        leaves = {name: x.requires_grad_() for name, x in values.items()}
        stall(chance, Here.device)
        gate, up = ops.column_linear(leaves["x"], [leaves["gate"], leaves["up"]], group=group, transport=transport)
        stall(chance, Here.device)
        y = ops.row_linear(gate + up, leaves["down"], group=group, transport=transport)
        stall(chance, Here.device)
        y.backward(dy)
        results.append({"y": y.detach()} | {f"d{name}": x.grad for name, x in leaves.items()})
    for step, result in enumerate(results):
        for name, value in expected(step).items():
            assert torch.equal(result[name].cpu(), value.to(dtype)), (rank, step, name)
    check_all()


def absent_peer(timeout: float) -> tuple[float, str]:
    """The last rank never begins the second operation. Returns on the others (seconds until the error, its message)."""
    group = dist.new_group(list(range(dist.get_world_size())))
    set_timeout(group, 60)  # the first operation compiles, on one rank perhaps a second later than on the other
    x, weight = torch.ones(2, 4, device=Here.device), torch.ones(6, 4, device=Here.device)
    seconds, message = 0.0, ""
    for present in (True, dist.get_rank() < dist.get_world_size() - 1):
        began = time.monotonic()
        try:
            if present:
                ops.column_linear(x, weight, group=group, transport="fused")
            if Here.device.type == "cuda":
                torch.cuda.synchronize()
            check_all()
            set_timeout(group, timeout)
        except HangError as error:
            seconds, message = time.monotonic() - began, str(error)
        dist.barrier()  # a rank that left early would be a peer that died
    close(group)
    return seconds, message


def replays(count: int) -> None:
    """Capture one epoch of each workspace in a CUDA graph, and replay it with new inputs: parities alternate."""
    rank, group, device = dist.get_rank(), dist.group.WORLD, Here.device
    steps = [{n: x.to(device, torch.bfloat16) for n, x in zeros_and_ones(s)[rank].items()} for s in range(count + 1)]
    static = {name: x.clone() for name, x in steps[count].items()}

    def forward() -> Tensor:
        gate, up = ops.column_linear(static["x"], [static["gate"], static["up"]], group=group, transport="fused")
        return ops.row_linear(gate + up, static["down"], group=group, transport="fused")

    with torch.no_grad():
        forward()  # makes the workspaces and compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
    results = []
    for step in range(count):
        for name, x in static.items():
            x.copy_(steps[step][name])
        stall(random.Random(10 * step + rank), device)
        graph.replay()
        results.append(out.clone())
    for step, result in enumerate(results):
        assert torch.equal(result.cpu(), expected(step)["y"].bfloat16()), (rank, step)
    check_all()


def automatic(sequence_parallel: bool, tokens: int) -> tuple[list[tuple[str, str]], str, str]:
    """Return (what each linear's plan says, the plans' reasons, explain's table); the plans are compared with what
    runs."""
    mesh = build_mesh(Here.device.type, tensor_parallel=dist.get_world_size())["tp"]
    options = {"tp": TensorParallel(mesh, sequence_parallel), "device": "meta"}
    mlp = MLP(256, ffn_hidden_size=4608, dtype=torch.bfloat16, **options)
    mlp.to_empty(device=Here.device)
    init_weights(mlp, 0)
    plans = linear_plans(mlp, tokens)
    chosen = [(plan.request.op, plan.decision.transport) for plan in plans]
    reasons, table = "; ".join(plan.decision.reason for plan in plans), explain(mlp, tokens)
    for name in ("fc1", "fc2"):
        (line,) = [line for line in table.splitlines() if line.startswith(name)]
        assert f"  {dict(fc1=chosen[0], fc2=chosen[1])[name][1]}  " in line
    if chosen[0][1] == "sequential" and Here.device.type == "cuda":
        return chosen, reasons, table  # gloo's collectives on CUDA tensors are not what is tested here
    rows = tokens // mesh.size() if sequence_parallel else tokens
    x = torch.ones(rows, 256, device=Here.device, dtype=torch.bfloat16, requires_grad=True)
    with ops.record_transports() as forward:
        y = mlp(x)
    with ops.record_transports() as backward:
        y.sum().backward()
    halves = dict(all_gather_matmul="matmul_reduce_scatter", matmul_reduce_scatter="all_gather_matmul")
    if sequence_parallel:
        assert forward == chosen
        assert backward == [(halves[op], transport) for op, transport in reversed(chosen)]
    else:
        assert (forward, backward) == (chosen[1:], chosen[:1])
    return chosen, reasons, table


@pytest.fixture
def fresh(one_gpu):
    for size in (2, 4):
        one_gpu(size).run(forget)
    return one_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("t", [2, 4])
def test_column_in_bfloat16(fresh, t, sequence_parallel):
    check_columns(on_fused(fresh, "cuda:0"), t, sequence_parallel)


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("t", [2, 4])
def test_row_in_bfloat16(fresh, t, sequence_parallel):
    check_rows(on_fused(fresh, "cuda:0"), t, sequence_parallel)


@pytest.mark.gpu
@pytest.mark.parametrize("t", [2, 4])
def test_late_ranks(fresh, t):
    fresh(t).run(on_device, "cuda:0", late_ranks, "fused", torch.bfloat16, STEPS, timeout=TIMEOUT)


@pytest.mark.gpu
def test_graph_replays(fresh):
    fresh(2).run(on_device, "cuda:0", replays, REPLAYS, timeout=TIMEOUT)


def check_hang(results: list[tuple[float, str]], within: float) -> None:
    absent = len(results) - 1
    for rank, (seconds, message) in enumerate(results[:-1]):
        assert seconds < within, seconds
        for part in ("waited in vain", f"for rank {absent}", f"rank {rank}", "all_gather_matmul", "test_fused_gpu.py"):
            assert part in message, message
    assert results[absent] == (0.0, "")


@pytest.mark.gpu
def test_a_peer_that_never_arrives_is_named(fresh):
    """The timeout is counted in polls, which take longer beside other work; hence the wide bound."""
    check_hang(fresh(2).run(on_device, "cuda:0", absent_peer, 1.0, timeout=TIMEOUT), within=20)


@pytest.mark.gpu
def test_auto_and_explain(fresh):
    """Auto takes the fused kernels where overlap pays, and explain() names the reason either way."""

    def run(*arguments):
        return fresh(2).run(on_device, "cuda:0", automatic, *arguments, timeout=TIMEOUT)[0]

    wide, reasons, _ = run(True, 1024)
    assert [transport for _, transport in wide] == ["fused", "fused"], reasons
    small, reasons, _ = run(False, 16)
    assert [transport for _, transport in small] == ["fused", "fused"] and reasons.count("one-shot") == 2
    few, reasons, _ = run(True, 64)
    assert [transport for _, transport in few] == ["sequential", "sequential"]
    assert reasons.count("64 rows < 1024: too few to overlap") == 2
