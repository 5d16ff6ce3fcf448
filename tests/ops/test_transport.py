"""A transport is chosen by device, topology, dtype and shape, by measured times, or by hand, and says why."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import device

from tpformer import ops
from tpformer.config import TRANSPORTS
from tpformer.distributed.groups import REGISTRY
from tpformer.kernels import cost
from tpformer.ops.choice import Grouped, Request, choose
from tpformer.ops.choice.prediction import send_by_copies
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER, record_transport
from tpformer.planner.devices import as_if_on, load_device

H100 = "NVIDIA H100 80GB HBM3"
CUDA, CPU = device("cuda"), device("cpu")
BF16 = torch.bfloat16
T4, B200 = {"name": "NVIDIA T4"}, {"name": "NVIDIA B200"}
TWO_HOSTS = {"fused": "ranks 0 and 4 are on two hosts"}
NO_PEERS = {"fused": "no peer access", "backend": "gloo"}
COPIED = {"copied_flags": "torch lacks the operation"}
FLAGS = "; copy engines set flags by copies: torch lacks the operation"
GATHERS = "blocks are gathered, and "
FP8 = {"precision": "fp8"}
EVENS = "; break-even of its gather 1160, of its reduction in bfloat16 2303"
BLOCKS = tuple(
    f"; FP8: {gathers}the GEMM multiplies what blocks stand for{evens}"
    for gathers, evens in (("", ""), (GATHERS, EVENS))
)
RUNNING = ("sequential", "pipelined", "fused")


def request(
    op=GATHER, m=8192, n=1792, k=4096, ranks=8, dtype=BF16, where=CUDA, choice="auto", grouped=None, precision="16"
):
    group = SimpleNamespace(size=lambda: ranks)
    return Request(op, m, n, k, dtype, where, group, choice, grouped, precision)  # type: ignore[arg-type]


@pytest.fixture
def node(monkeypatch):
    """node(fused=reason, backend=..., name=...) describes a node of H100s; by default one with fused kernels."""
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

    def describe(fused=None, backend="nccl", name=H100, copied_flags=None) -> None:
        answers = {"why_not_fused": fused, "why_copied_flags": copied_flags}
        for function, answer in (answers | {"torch_backend": backend, "device_name": name}).items():
            monkeypatch.setattr(choose, function, lambda *_, answer=answer: answer)

    describe()
    with as_if_on(load_device("h100")):
        yield describe
    ops.use_measured_table(None)


def choice(*args, **options) -> tuple[str, str]:
    return choose.choose_transport(request(*args, **options))


@pytest.mark.parametrize("described, options, name, reason", [
    *(({}, {"ranks": 1, "choice": each}, "local", "one rank") for each in TRANSPORTS),
    # auto never takes the interpreter, whatever the shape
    *(({}, {"where": CPU, "m": m}, "sequential", "on cpu the collective, then the GEMM") for m in (8, 10**6)),
    ({}, {"dtype": torch.float32}, "sequential", "float32 is for verification, not for speed"),
    ({}, {"dtype": torch.float64}, "sequential", "float64 is for verification, not for speed"),
    ({}, {"dtype": torch.float16}, "fused", "predicted: fused .*"),
    (T4, {}, "fused", "no performance model of NVIDIA T4: 8192 rows >= 1024"),
    (T4, {"m": 1023}, "sequential", "no performance model of NVIDIA T4: 1023 rows < 1024"),
    (TWO_HOSTS, {}, "pipelined", "1024 rows per rank >= 1024; not fused: ranks 0 and 4 are on two hosts"),
    (TWO_HOSTS, {"m": 8191}, "sequential", "1023 rows per rank < 1024; not fused: ranks 0 and 4 are on two hosts"),
    (TWO_HOSTS, {"op": ALL_REDUCE, "m": 64, "n": 8}, "sequential", "8 rows per rank < 1024; not fused: ranks.*"),
    (TWO_HOSTS, {"dtype": torch.float32}, "sequential", "float32 is for verification.*"),
    (NO_PEERS, {}, "sequential", "the group's backend for cuda is gloo; not fused: no peer access"),
    (NO_PEERS, {"choice": "pipelined", "where": CPU}, "pipelined", "as asked for"),
    # where auto would choose otherwise
    *(({}, {"choice": each, "m": 8, "dtype": torch.float32}, each, "as asked for") for each in RUNNING),
    # flags that copies set are named only where copies may send rows: of a gather, also in the backward
    (COPIED, {}, "fused", "predicted: fused .*" + FLAGS),
    (COPIED, {"op": SCATTER, "n": 4096, "k": 1792, "choice": "fused"}, "fused", "as asked for" + FLAGS),
    (COPIED, {"op": ALL_REDUCE, "m": 16, "n": 8192, "choice": "fused"}, "fused", "as asked for"),
    (COPIED, {"choice": "sequential"}, "sequential", "as asked for"),
    # of blocks
    ({}, {"ranks": 1, **FP8}, "local", "one rank" + BLOCKS[0]),
    ({}, {"where": CPU, **FP8}, "sequential", "on cpu the collective, then the GEMM" + BLOCKS[1]),
    ({}, {"where": CPU, "op": ALL_REDUCE, **FP8}, "sequential", "on cpu the collective, then the GEMM" + BLOCKS[0]),
    ({}, {"where": CPU, "choice": "pipelined", **FP8}, "pipelined", "as asked for" + BLOCKS[1]),
    # fused where the model says that it pays
    *((COPIED, {"op": op, "n": n, "k": k, **FP8}, "fused", "predicted of both ways: .*" + BLOCKS[1] + FLAGS)
      for op, n, k in ((GATHER, 1792, 4096), (SCATTER, 4096, 1792))),
    ({}, {"op": ALL_REDUCE, "n": 4096, "k": 1792, **FP8}, "fused", "predicted: .*" + BLOCKS[0]),
    ({}, {"m": 16, "ranks": 2, **FP8}, "fused", "predicted of both ways: .*; break-even of its gather 663, .*"),
    ({}, {"m": 512, "n": 8192, "k": 3584, **FP8}, "sequential", "predicted of both ways: .*" + BLOCKS[1]),
    ({}, {"choice": "fused", **FP8}, "fused", "as asked for" + BLOCKS[1]),
    ({}, {"op": ALL_REDUCE, "choice": "fused", **FP8}, "fused", "as asked for" + BLOCKS[0]),
    (TWO_HOSTS, FP8, "pipelined", "1024 rows per rank >= 1024; not fused: ranks 0 and 4 are on two hosts" + BLOCKS[1]),
    (B200, FP8, "pipelined", "1024 rows .*; not fused: the rate of blocks on NVIDIA B200 is not known; FP8: .*"),
    # of experts the forward's gather alone: no kernel fuses their reduction
    ({}, {"grouped": Grouped(8, 16, 1536), "choice": "fused", **FP8}, "fused", "as asked for" + BLOCKS[1]),
    ({}, {"grouped": Grouped(8, 16, 1536), "m": 8, **FP8}, "sequential", "predicted: .*" + BLOCKS[1]),
])  # fmt: skip
def test_what_is_chosen_and_why(node, described, options, name, reason):
    node(**described)
    chosen, why = choice(**options)
    assert chosen == name and re.fullmatch(reason, why), why


@pytest.mark.parametrize("tokens, expected", [(8192, "sequential"), (32768, "fused")])
def test_auto_does_not_fuse_the_gather_for_experts_with_few_tokens(node, table, tokens, expected):
    """Qwen3-30B-A3B: with few tokens, reading all matrices once for each rank's rows is more than the overlap hides."""
    sizes = {"m": tokens, "n": 8 * 1536 // 8, "k": 2048}
    linear, experts = choice(**sizes), choice(**sizes, grouped=Grouped(chosen=8, groups=128 // 8, n=1536))
    assert linear[0] == "fused" and experts[0] == expected
    ops.use_measured_table(table(row(ranks=8, fused_us=1)))  # of linears
    assert choice(**sizes, grouped=Grouped(8, 16, 1536)) == experts


def test_where_there_are_other_groups_their_collectives_find_free_processors(node, monkeypatch):
    """The o projection of 405B on 2 of more ranks: with 100 of 132 SMs the fused kernel loses more than it hides."""
    from tpformer.ops.transports.fused import Fused

    shape = {"op": SCATTER, "m": 8192, "n": 16384, "k": 8192, "ranks": 2}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for world, allowed, spare, name in ((2, None, 0, "fused"), (4, None, 32, "sequential"), (4, "0", 0, "fused")):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
        monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
        if allowed is not None:
            monkeypatch.setenv("NCCL_MAX_CTAS", allowed)
        assert Fused(SimpleNamespace(size=lambda: 2)).spare == spare  # type: ignore[arg-type]
        assert choice(**shape)[0] == name
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.delenv("NCCL_MAX_CTAS")
    monkeypatch.setattr(REGISTRY, "beside", {"a group of experts"})  # of all ranks, as the group that asks
    assert Fused(SimpleNamespace(size=lambda: 2)).spare == 32  # type: ignore[arg-type]


def test_measured_times_are_not_of_blocks(node, table):
    ops.use_measured_table(table(row(ranks=8, sequential_us=1)))
    assert choice()[0] == "sequential" and choice(**FP8)[0] == "fused"


def refused(words: str, name: str, **options) -> None:
    with pytest.raises(ValueError, match=words):
        choice(choice=name, **options)


def test_an_explicit_choice_that_cannot_run_raises(node, monkeypatch):
    node(fused="rank 3 has no peer access to rank 0", backend="gloo")
    refused("fused needs a CUDA device with NVLink .*: rank 3 has no peer access.*auto", "fused")
    refused("pipelined needs a backend that sends .*: the group's backend for cuda is gloo", "pipelined")
    refused("transport='magic': choose one of auto, sequential, pipelined", "magic")
    monkeypatch.undo()
    monkeypatch.setattr(choose, "why_copied_flags", lambda group, device: None)
    monkeypatch.setattr(choose, "why_no_kernels", lambda group, device: None if device == CUDA else "none there")
    assert choice(choice="fused") == ("fused", "as asked for")
    refused(r"TRITON_INTERPRET=1 for tests on CPU\): none there; use transport", "fused", where=CPU)
    kept = "operands are torch.float64, and the kernels take bfloat16, float16 and float32"
    refused(kept, "fused", dtype=torch.float64)
    refused("there is no row, and the kernels take at least one row", "fused", m=0)
    refused("8 ranks cannot have a row each of 7, and the kernels take at least one row", "fused", op=SCATTER, m=7)
    monkeypatch.setattr(choose, "torch_backend", lambda group, device: "nccl")
    assert choice(op=SCATTER, m=7)[0] == "sequential" and choice(op=ALL_REDUCE, m=7)[0] == "fused"


def row(**changes) -> dict:
    base = {"op": GATHER, "ranks": 8, "dtype": "bfloat16", "m": 8192, "n": 1792, "k": 4096}
    return {**base, "sequential_us": 300.0, "pipelined_us": 250, "fused_us": 200.0, **changes}


@pytest.fixture
def table(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "table.json"
        path.write_text(json.dumps(rows))
        return str(path)

    return write


def test_measured_times_override_the_model(node, table):
    far = row(m=4096, fused_us=1.0)
    path = table(far, row(fused_us=400.5), row(op=SCATTER, fused_us=1), row(ranks=4, fused_us=1))
    ops.use_measured_table(path)
    times = "pipelined 250 us, sequential 300 us, fused 400.5 us"
    assert choice() == ("pipelined", f"{path} row 1 (8192x1792x4096): {times}")
    assert choice(m=8000, n=2000)[0] == "pipelined"  # the nearest row counts
    assert choice(m=4096)[0] == "fused"
    assert choice(m=16384, n=3584, k=8192)[0] == "pipelined"  # a factor 2 in each still counts
    for beyond in ({"m": 16385}, {"n": 3585}, {"k": 2047}, {"dtype": torch.float16}, {"ranks": 2}):
        assert "predicted" in choice(**beyond)[1], beyond
    assert choice(where=CPU) == ("sequential", "on cpu the collective, then the GEMM")
    assert choice(choice="sequential") == ("sequential", "as asked for")
    # what cannot run does not count
    ops.use_measured_table(table(row()))
    node(fused="no peer access")
    assert choice() == ("pipelined", f"{table(row())} row 0 (8192x1792x4096): pipelined 250 us, sequential 300 us")
    ops.use_measured_table(table(row(sequential_us=None, pipelined_us=None)))
    assert choice()[1].endswith("not fused: no peer access")  # the row has nothing that can run, so the model decides
    node()
    assert choice()[0] == "fused"
    ops.use_measured_table(None)
    assert choice()[0] == "fused"


def test_measured_times_say_who_sends_the_shards_of_a_gather(node, table):
    """Where both ways are measured; else the model says it: here seven copies of 2 MiB begin as late as they take."""

    def by_copies(m=4096, n: int | None = 512, where=CUDA) -> bool:
        return send_by_copies((m, n, 2048), 8, BF16, where)

    assert not by_copies() and by_copies(n=8192) and by_copies(m=8192, n=None)
    assert not by_copies(n=8192, where=CPU)
    shape = {"m": 4096, "n": 512, "k": 2048}
    ops.use_measured_table(table(row(**shape, copy_us=30, push_us=31.5)))
    assert by_copies() and not by_copies(m=1024) and by_copies(m=8192, n=None)
    ops.use_measured_table(table(row(**shape, copy_us=31.5, push_us=30)))
    assert not by_copies() and not by_copies(n=1024) and by_copies(n=8192)
    ops.use_measured_table(table(row(**shape, copy_us=30), row(**{**shape, "n": 8192}, copy_us=None, push_us=1)))
    assert not by_copies() and by_copies(n=8192)


@pytest.mark.parametrize(("content", "words"), [
    ("{", ["not valid JSON"]),
    ("{}", ["list of rows", "dict"]),
    ("[3]", ["row 0", "object"]),
    (json.dumps([row(), {"op": GATHER, "m": 1}]), ["row 1 lacks dtype, ranks, n, k, sequential_us", "null"]),
    (json.dumps([row(op="matmul")]), ["row 0", "'matmul'", GATHER]),
    (json.dumps([row(dtype="nn")]), ["dtype 'nn'", "bfloat16"]),
    (json.dumps([row(n=0)]), ["n 0", "whole number"]),
    (json.dumps([row(m=True)]), ["m True"]),
    (json.dumps([row(fused_us=-1)]), ["fused_us -1", "or null"]),
    (json.dumps([row(fused_us="fast")]), ["fused_us 'fast'"]),
    (json.dumps([row(push_us=0)]), ["push_us 0", "or null"]),
])  # fmt: skip
def test_a_table_that_is_malformed_is_refused(tmp_path, content, words):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        ops.use_measured_table(path)
    assert all(word in str(error.value) for word in ("table.json", *words)), error.value
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        ops.use_measured_table(tmp_path / "nothing.json")


def test_recording_ends_with_its_context():
    with ops.record_transports() as outer:
        record_transport(GATHER, "fused")
        with pytest.raises(ZeroDivisionError), ops.record_transports() as inner:
            record_transport(ALL_REDUCE, "sequential")
            raise ZeroDivisionError
    record_transport(SCATTER, "pipelined")
    assert outer == [(GATHER, "fused"), (ALL_REDUCE, "sequential")] and inner == [(ALL_REDUCE, "sequential")]


def test_performance_model():
    """For bfloat16 on 8 H100. test_explain.py has figures worked out by hand."""
    h100 = cost.machine_for(H100)
    assert h100 is not None and cost.machine_for("NVIDIA T4") is None
    assert [cost.machine_for(f"NVIDIA {machine.name}") for machine in cost.MACHINES] == list(cost.MACHINES)
    # one row takes the time to read the weights
    assert cost.gemm_seconds(1, 4096, 4096, 2, h100) == 2 * (4096 * 4096 + 2 * 4096) / h100.memory
    moved = {op: cost.communication_bytes(op, 8192, 1792, 4096, 8, 2) for op in (ALL_REDUCE, SCATTER, GATHER)}
    assert moved[ALL_REDUCE] == 2 * moved[SCATTER]
    # at the break-even width, with enough chunks, the two times are the same
    seconds = 2 * 8192 * cost.break_even_width(8, h100, 2) * 4096 / h100.flops
    assert seconds == pytest.approx(moved[GATHER] / h100.link, rel=1e-6)
    assert (cost.overlapped_seconds(8.0, 2.0, 8), cost.overlapped_seconds(8.0, 9.0, 8)) == (8.0, 10.0)
