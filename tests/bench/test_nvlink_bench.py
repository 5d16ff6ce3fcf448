"""The bench of several GPUs, without them: what it needs, what its providers compute over gloo, its rows and table."""

import json
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testing import on_every_rank

from bench import nvlink
from bench import nvlink_attention as attention
from bench.shapes import Shape
from harness.ratios import means
from harness.timing import Effort
from tpformer.config.transport_table import read_transport_table
from tpformer.distributed import record_collectives
from tpformer.kernels.cost import machine_for
from tpformer.ops.context import PARTS
from tpformer.ops.transports.interface import GATHER, OPERATIONS, SCATTER


@on_every_rank(2)
def test_transports_agree_and_the_slowest_rank_counts() -> None:
    """Over gloo, where rank r takes r + 1 seconds. One rank's mistake is raised by all. torch's own operations are
    called as they are declared, with tensors without memory."""

    def cold(call, repetitions, flushed):
        def sample() -> float:
            call.prepare()
            call.run()
            return 1.0 + dist.get_rank()

        return sample

    right, names = nvlink.providers, []

    def wrong_on_rank_1(shape: Shape) -> dict:
        calls = right(shape)
        if dist.get_rank() == 1:
            calls["pipelined"] = lambda correct=calls["pipelined"]: correct() * 2
        return calls

    on_cpu = {"DEVICE": "cpu", "cold": cold, "flush_buffer": lambda: None, "torch_operation": lambda *_: None}
    with mock.patch.multiple(nvlink, **on_cpu):
        for op in OPERATIONS:
            shape = Shape("tiny", "linear", op, 8, 6, 10, dist.get_world_size())
            nvlink.check_shape(shape)
            names += list(nvlink.providers(shape))
        seconds = nvlink.measure(nvlink.providers(shape), Effort(2, 1))
        said = pytest.raises(AssertionError, match="rank 1 tiny linear 8x6x10 pipelined: error")
        with mock.patch.object(nvlink, "providers", wrong_on_rank_1), said:
            nvlink.check_shape(shape)
    assert names == ["sequential", "pipelined"] * 3
    assert seconds == {"sequential": [2.0, 2.0], "pipelined": [2.0, 2.0]}
    for op, rows, result in ((GATHER, 4, (8, 6)), (SCATTER, 8, (4, 6))):
        x, w = torch.empty(rows, 10, device="meta"), torch.empty(6, 10, device="meta")
        operation = nvlink.torch_operation(Shape("tiny", "linear", op, 8, 6, 10, 2), x, w, nvlink.world())
        assert operation().shape == result


@on_every_rank(2)
def test_attention_of_shared_samples_is_right_or_named() -> None:
    """Over gloo, with a small sample and the parts of a GPU. What is hidden of what is sent, only GPUs show."""
    group, sample = nvlink.world(), attention.Sample("8B", 32, 2)
    with mock.patch.dict(PARTS, cpu=PARTS["cuda"]):
        calls = attention.providers(sample, group, "cpu")
        for provider, parts in ((attention.AT_ONCE, 1), (attention.IN_PARTS, PARTS["cuda"])):
            with record_collectives() as sent:
                calls[provider]()
            assert len(sent) == 3 * parts
        assert attention.check(2, group, "cpu", tokens=32) is None
        wrong = {attention.IN_PARTS: lambda: [2 * x for x in calls[attention.IN_PARTS]()]}
        with mock.patch.object(attention, "providers", lambda *_: wrong):
            found = attention.check(2, group, "cpu", tokens=32)
    assert found.startswith(f"rank {dist.get_rank()} 8B 32 tokens, cp 2 keys in parts y: error")


def test_rows_of_attention_stand_beside_the_planners_seconds() -> None:
    """By hand, of 131,072 tokens on 8 H200: 7/8 of 512 MiB come three times, no faster than the links are."""
    sample, machine = attention.samples(8)[-1], machine_for("H200")
    total, alone = attention.predict(sample, machine)
    assert total - alone >= 3 * 7 / 8 * 512 * 2**20 / machine.link
    assert alone >= 7 * 16384 * 131072 * 4096 / machine.peak_flops
    seconds = {attention.AT_ONCE: [2 * total] * 3, attention.IN_PARTS: [total] * 3}
    assert [row["ratio"] for row in attention.rows_of(sample, seconds, total)] == [2.0, 1.0, 0.5]
    (row,) = attention.predicted_rows([sample], machine)
    assert (row["value"], row["baseline_value"]) == (round(1e6 * total, 1), round(1e6 * alone, 1))


def test_rows_and_table(tmp_path):
    """The table of a gather has both of its ways."""
    shape = Shape("70B", "down", SCATTER, 8192, 8192, 3584, 8)
    seconds = {"sequential": [1e-3] * 3, "fused": [8e-4] * 3, "torch async-TP": [9e-4] * 3}
    rows = nvlink.rows_of(shape, seconds, 7.2e-4)
    assert [(row["provider"], row["baseline"], row["ratio"]) for row in rows] == [
        ("fused", "sequential", 1.25), ("torch async-TP", "sequential", 1.111), ("fused", "predicted fused", 0.9),
    ]  # fmt: skip
    assert len(means(rows * 2)) == 3
    gather = Shape("70B", "qkv", GATHER, 8192, 1280, 8192, 8)
    ways = {"sequential": [5e-4], "fused": [3e-4], "fused, by copies": [4e-4], "fused, by a push": [3e-4]}
    path = nvlink.write_table([nvlink.table_row(shape, seconds), nvlink.table_row(gather, ways)], tmp_path)
    assert path.name == "transports_8.json" and json.loads(path.read_text())[0]["pipelined_us"] is None
    first, second = read_transport_table(path).rows
    assert (first.op, first.ranks, first.dtype, first.m, first.n, first.k) == (SCATTER, 8, "bfloat16", 8192, 8192, 3584)
    assert first.times == {"sequential": 1000.0, "fused": 800.0} and first.ways == {}
    assert second.times == {"sequential": 500.0, "fused": 300.0} and second.ways == {"copy": 400.0, "push": 300.0}


def test_a_gather_is_forced_to_a_way():
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    from tpformer.ops.transports import fused

    def asked() -> torch.Tensor:
        return torch.tensor(fused.send_by_copies((8, 8, 8), 2, torch.float32, torch.device("cpu")))

    assert [bool(nvlink.gathered_by(way, asked)) for way in ("copy", "push")] == [True, False] and not asked()


@pytest.mark.parametrize("devices, environment, needed", [
    (1, {}, "several CUDA devices of one NVLink node"),
    (4, {}, "torchrun --nproc-per-node 4 -m bench nvlink"),
    (4, {"WORLD_SIZE": "3", "LOCAL_RANK": "0"}, r"divides 8, one per device of one node \(here: 3 on 4\)"),
    (4, {"WORLD_SIZE": "8", "LOCAL_RANK": "0"}, r"\(here: 8 on 4\)"),
    (4, {"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "None"),
])  # fmt: skip
def test_it_says_what_it_needs(devices, environment, needed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.search(needed, str(nvlink.obstacle()))
