"""The memory model: a schedule's worst moment, buffers and workspaces by hand, states of a step beside measured ones.

tests/planner/test_rank_memory.py compares the whole of it with counts.
"""

import dataclasses
import json
from collections import Counter

import pytest
import torch

from checks import zero
from checks.held import KINDS
from harness.provenance import RESULTS
from tpformer.config import RunConfig, build_config
from tpformer.models import GPTConfig
from tpformer.parallel import Layout
from tpformer.planner import Step, memory
from tpformer.planner.counting import StageCount
from tpformer.planner.kept import kept_by_kind
from tpformer.planner.memory import Peak, fused_workspaces, loss_workspace, occupancies, schedule_peak
from tpformer.planner.moments import Layers, Place, places
from tpformer.planner.states import ACCUMULATED, Elements, Precision, in_backward, step_moments
from tpformer.planner.units import Unit, stage_units

STAGE = StageCount(0, range(1), saved=100, offloaded=30, output=10, queued=50)
# the steps of one stage, one after the other
PEAKS = {
    "FIWFIW": Peak(70, 10, 0, in_flight=1),
    "FFIIWW": Peak(140, 20, 0, in_flight=2),
    "FIFIFIWWW": Peak(70, 10, 100, in_flight=1),  # a weight gradient that is done is no longer queued
    "FFBFBB": Peak(140, 20, 0, in_flight=2),
}
SHAPE = {"vocab_size": 250, "seq_length": 512, "n_layers": 4, "hidden_size": 256, "n_heads": 8}
EXPERTS = {
    **SHAPE, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 64, "shared_expert_size": 32,
}  # fmt: skip
UNIT = 2 * 512 * 256 * 4  # bytes of the residual stream
# what `python -m bench zero` found on real ranks, in every ZeRO stage, two dtypes and three schedules
MEASURED = json.loads((RESULTS / "cpu" / "zero.json").read_text())
HALF = Precision(torch.float32, torch.bfloat16, torch.float32)
SIZE = Elements(sizes=(200.0,) * 4, matrices=600.0, rest=100.0, head=0.0)
M = 900


@pytest.mark.parametrize("kinds", PEAKS)
def test_the_worst_moment_of_a_stage(kinds):
    steps = [(Step(0, kind, kinds[:index].count(kind)),) for index, kind in enumerate(kinds)]
    assert schedule_peak(occupancies(steps, [0]), [STAGE]) == PEAKS[kinds]


def test_the_places_of_a_backward():
    """At the loss no layer has gradients; then each layer's come, and what it kept goes. What is fetched from the host
    is a layer's own and that of the layer before it."""
    waits = (7, 30), (11, 20), (13, 0)
    units = [Unit(range(i, i + 1), kept, moved, 100 * i, 50) for i, (kept, moved) in enumerate(waits)]
    of = Layers(of_layer=1, head=40, head_elements=20, loss=1000, total=200, by_layer=True)
    assert places(units, of, last=True) == [
        Place(0, 0, 1000, 0), Place(40, 20, 201, 0.1), Place(53, 50, 101, 0.35), Place(64, 30, 1, 0.6),
    ]  # fmt: skip
    assert places(units, of._replace(by_layer=False), last=False)[0] == Place(0, 20, 201, 1)


def test_what_the_loss_needs_while_it_runs():
    """It needs a chunk's logits, the table's float32 gradient, gathered rows and their gradient."""
    config = GPTConfig(vocab_size=100, seq_length=8, n_layers=1, hidden_size=16, n_heads=2)
    assert loss_workspace(config, 40, 25, 10, itemsize=2) == 10 * 25 * 2 + 4 * 25 * 16 + 2 * 40 * 16 * 2
    assert loss_workspace(config, 6, 25, 10, itemsize=8) == 6 * 25 * 8 + 8 * 25 * 16 + 2 * 6 * 16 * 8
    # a CPU's exponentials; of 16 bits the logits in float32, too, and a product
    assert loss_workspace(config, 6, 25, 10, 4, on_cpu=True) == 2 * 6 * 25 * 4 + 4 * 25 * 16 + 2 * 6 * 16 * 4
    on_cpu = 10 * 25 * (2 + 4 + 4) + (4 + 2) * 25 * 16 + 2 * 40 * 16 * 2
    assert loss_workspace(config, 40, 25, 10, 2, on_cpu=True) == on_cpu


def configuration(model: dict = SHAPE, **parallel: object) -> RunConfig:
    train = {"global_batch_size": 16, "microbatch_size": 2, "dtype": "float32", "device": "cpu"}
    return build_config({"model": model, "parallel": parallel, "train": train})


# On two ranks, in UNITs: three of gathered rows and gradients, what the activation reads, and its gradient. Experts of
# 64 features have 1/4, twice; 2 of 8 experts for each token leave a rank one row for a token, at worst two.
@pytest.mark.parametrize("model, parallel, kind, units", [
    (SHAPE, {}, {}, 3 + 2 + 2),
    (SHAPE, {}, {"packs": True}, 3 + 2 + 2 + 4 / 2),
    ({**SHAPE, "ffn_hidden_size": 2560}, {}, {}, 1 + 5 + 2 * 5),  # on a CPU, beside what a GPU needs
    (EXPERTS, {}, {"experts": True}, 3 + (2 / 4 + 2 / 16) + (2 / 4 + 1 + 2 / 16)),
    (EXPERTS, {}, {"experts": True, "worst": True}, 3 + (2 * 2 / 4 + 2 / 16) + (2 * (2 / 4 + 1) + 2 / 16)),
    # of 512 tokens of a rank, 402 have experts on each of two ranks: their rows leave, and as many come, twice
    (EXPERTS, {"expert_parallel": 2}, {"experts": True}, 3 + 5 / 8 + 13 / 8 + 3 * 2 * 402 / 1024),
    (EXPERTS, {"expert_parallel": 2}, {"experts": True, "worst": True}, 3 + 34 / 8 + (2 * 402 + 4 * 512) / 1024),
])  # fmt: skip
def test_what_the_backward_of_a_layer_needs(model, parallel, kind, units):
    config = configuration(model, tensor_parallel=2, **parallel)
    assert memory.layer_workspace(config, **kind) == units * UNIT


def test_what_the_backward_of_a_unit_makes_again():
    """Of a region all that its layers would keep, but for its input: q, k, v, attention's result, four of fc1's, two
    residuals, on two ranks half of each; and the statistics of the rows."""
    for n in (1, 2, 4, 6):
        config = configuration(tensor_parallel=2, recompute="full", recompute_interval=n)
        regions = stage_units(config, 0)
        assert [len(unit.layers) for unit in regions] == [min(n, 4)] * (4 // min(n, 4))
        kept = kept_by_kind(config)[False]
        whole = sum(kept.storages("none"))
        assert all(unit.kept == kept.stream for unit in regions)
        assert regions[0].working == memory.layer_workspace(config) + min(n, 4) * whole - kept.stream
        assert whole == pytest.approx(5 * UNIT, rel=0.02)
    mixed = configuration(keep="1*full+pack,1*offload,1*offload+mlp,1*offload")
    mixed = dataclasses.replace(mixed, train=dataclasses.replace(mixed.train, dtype="bfloat16", device="cuda"))
    kept, units = kept_by_kind(mixed)[False], stage_units(mixed, 0)
    again = [sum(kept.storages("none")) - sum(kept.storages(each)) for each in ("full", "none", "mlp", "none")]
    need = [memory.layer_workspace(mixed, packs=each) for each in (True, False)]
    again[0] += kept.stream
    assert [unit.working for unit in units] == [need[0] + again[0], *(need[1] + each for each in again[1:])]
    # a storage of 1 MiB and more moves; the last layer's backward comes at once
    large = [sum(size for size in kept.storages(each) if size >= 1 << 20) for each in ("none", "mlp")]
    assert [unit.moved for unit in units] == [0, large[0], large[1], 0]
    assert units[3].kept == sum(kept.storages("none"))


def test_what_an_activation_has_read_is_gone_before_a_layers_last_gradient():
    """Gate and up of the dense layer, 1024 features each on two ranks, half of each; experts are one operation."""
    config = configuration({**EXPERTS, "first_dense_layers": 1, "ffn_hidden_size": 1024}, tensor_parallel=2)
    assert [unit.freed for unit in stage_units(config, 0)] == [2 * UNIT * 1024 / 256 / 2, 0, 0, 0]


# kv_heads of 32: of the gathered bytes, those of a part; then what a kernel makes of one of two samples, in parts:
# for each head of queries, and as their sums
@pytest.mark.parametrize("kv_heads, part, kernel", [
    (32, 1 / 4, 1 / 2), (8, 1 / 4, 5 / 2), (6, 2 / 6, 33 / 2), (2, 1 / 4, 17 / 2), (1, 1 / 2, 33 / 2),
])  # fmt: skip
def test_what_attention_needs_on_context_parallel_ranks(kv_heads, part, kernel):
    """Gradients of own queries in float32, and of own keys and values. Of a part the gradients in float32, and beside
    them keys and values with what a kernel makes; the next part, and what is on its way of the one before, twice."""
    model = {**SHAPE, "n_kv_heads": kv_heads, "n_heads": 32 if kv_heads != 6 else 192, "head_dim": 8}
    config = configuration(model, context_parallel=4, zero_stage=3)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype="bfloat16", device="cuda"))
    gathered = 2 * 2 * 512 * kv_heads * 8 * 2
    assert memory.context_bytes(config) == gathered
    own = 4 * 2 * 128 * config.model.query_size + gathered / 4
    parts = part * gathered * (1 + 1 / 4 + 2 + 1 + max(kernel + 2, 1))
    assert memory.context_workspace(config) == pytest.approx(own + parts, rel=1e-12)
    assert memory.context_workspace(configuration()) == 0


def test_what_attention_needs_where_kernels_make_masks_or_scores():
    """On a CPU there is one part. Its gradients and, repeated, keys and values for 4 heads of queries each; a mask of a
    chunk and a window, of 1 byte, inverted and in float32. On CUDA in float32 also three times the scores of a part."""
    model, parallel = {**SHAPE, "n_kv_heads": 2, "n_heads": 8, "head_dim": 8}, {"context_parallel": 4, "zero_stage": 3}
    gathered = 2 * 2 * 512 * 2 * 8 * 4
    rest = 4 * 2 * 128 * 64 + gathered / 4
    for window, seen in ((None, 0), (100, 163), (512, 0)):
        config = configuration({**model, "sliding_window": window}, **parallel)
        need = rest + gathered * (1 + 1 + (4 + 4) / 2) + 64 * seen * 6
        assert memory.context_workspace(config) == need
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cuda"))
        halved = rest + gathered / 4 * (1 + 1 / 4 + 2 + 1 + 1 + (4 + 4) / 2)
        scores = 64 * (min(256, seen or 256) * 3 * 4 * 4 + min(256, seen) * 6)
        assert memory.context_workspace(config) == halved + scores


def test_what_a_pipeline_receives_and_has_sent():
    """With one stage for each rank it sent the results in flight; else all rows and gradients of 8 microbatches."""
    straight = configuration(pipeline_parallel=2)
    looped = configuration(pipeline_parallel=2, pipeline_schedule="Interleaved1F1B")
    v_shaped = configuration(pipeline_parallel=2, pipeline_schedule="ZBVZeroBubble")
    for config, stages, received, sent in (
        (straight, [0], 1, 0), (straight, [1], 1, 0),
        (looped, [0, 2], 1 + 2, 3), (looped, [1, 3], 2 + 1, 3),
        (v_shaped, [0, 3], 1 + 1, 2), (v_shaped, [1, 2], 2 + 2, 2),
    ):  # fmt: skip
        assert memory.pipeline_buffers(config, stages, 7) == (received + 8 * sent) * UNIT + 7
        assert memory.pipeline_buffers(config, stages, 7, keeps_sent=False) == received * UNIT + 7


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("hidden", [5120, 4096])
def test_workspaces_hold_what_the_kernels_ask_for(hidden, sequence_parallel):
    """Of 4096 features a slot is a power of two before it is rounded up."""
    pytest.importorskip("triton")
    from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul_space
    from tpformer.kernels.all_gather_quantized_matmul.kernel import all_gather_quantized_matmul_space
    from tpformer.kernels.configurations import TILES
    from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce_space
    from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter_space

    tokens, tp, tile, half = 4096, 8, TILES["large"], torch.bfloat16

    def workspace(space: int) -> int:
        return 2 * max(1 << 20, 1 << (space - 1).bit_length()) + 4 * tp * 1024

    spaces = [matmul_all_reduce_space(tokens, hidden, tp, half, half, tile)[0]]
    if sequence_parallel:
        reduction = matmul_reduce_scatter_space(tokens // tp, hidden, tp, half, tile)[0]
        spaces = [all_gather_matmul_space(tokens // tp, hidden, tp, 2)[0], reduction]
    assert fused_workspaces(tokens, hidden, 2, tp, sequence_parallel) == sum(map(workspace, spaces))
    spaces[:-1] = [all_gather_quantized_matmul_space(tokens // tp, hidden, tp)[0]] * sequence_parallel
    assert fused_workspaces(tokens, hidden, 2, tp, sequence_parallel, True) == sum(map(workspace, spaces))


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['case']}, {row['dtype']}, rank {row['rank']}")
def test_states_of_a_step_are_those_that_ranks_held(row):
    """Each moment's formula is the one beside which the committed results are right to 3 %."""
    moments = {moment: dict(zip(KINDS, found["held"], strict=True)) for moment, found in row["moments"].items()}
    memory = {moment: found["memory"] for moment, found in row["moments"].items() if found["memory"] is not None}
    config = zero.run_config(zero.CASES[row["case"]], row["dtype"], MEASURED["model"], MEASURED["microbatches"])
    again = zero.zero_row(row["case"], config, row["rank"], zero.Measured(moments, memory, Counter()))
    assert again["moments"] == row["moments"] and again["parameters"] == row["parameters"]
    assert all(found["ok"] for found in again["moments"].values())


def sharded(stage: int) -> Layout:
    return Layout(data_parallel_shard=4, zero_stage=stage)


def test_one_microbatch_accumulates_nothing():
    """Stage 1 is then stage 2, but in a pipeline, and with two microbatches."""
    steps = [Step(0, "F", 0), Step(0, "B", 0)]
    first, second = (step_moments({0: SIZE}, steps, sharded(stage), HALF) for stage in (1, 2))
    assert first == second and ACCUMULATED not in first.forward
    assert first.peak == 900 + 1800 + 2 * M + (2 + 4) * 200
    for more, pipeline, cast in ((steps, 2, 0), ([*steps, Step(0, "F", 1), Step(0, "B", 1)], 1, 2 * 200)):
        layout = dataclasses.replace(sharded(1), pipeline_parallel=pipeline)
        assert step_moments({0: SIZE}, more, layout, HALF).peak == 900 + 1800 + (2 + 4) * M + cast


@pytest.mark.parametrize("n_layers, factor", [(1, 2 * 2), (2, 2 * 2 + 4), (3, 3 * 2 + 4)])
def test_layers_that_gather_ahead(n_layers, factor):
    """One layer has no next one to gather and none before it that is being reduced; of two only one of these."""
    size = SIZE._replace(sizes=(200.0,) * n_layers)
    assert sum(in_backward(size, sharded(3), HALF, accumulates=True)) == factor * 200
