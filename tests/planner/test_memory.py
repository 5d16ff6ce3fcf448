"""The memory model worked out by hand: a schedule's worst moment, buffers and workspaces, states of each ZeRO stage.

tests/planner/test_rank_memory.py compares the whole of it with counts.
"""

import pytest
import torch

from tpformer.models import GPTConfig
from tpformer.parallel import Layout
from tpformer.planner import Step
from tpformer.planner.bubbles import schedule_order
from tpformer.planner.counting import StageCount
from tpformer.planner.memory import Peak, fused_workspaces, loss_workspace, occupancies, schedule_peak
from tpformer.planner.states import (
    ACCUMULATED,
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Elements,
    Precision,
    elements,
    in_backward,
    step_moments,
)

STAGE = StageCount(0, range(1), saved=100, offloaded=30, output=10, queued=50)
# the steps of one stage, one after the other
PEAKS = {
    "FIWFIW": Peak(70, 10, 0, in_flight=1),
    "FFIIWW": Peak(140, 20, 0, in_flight=2),
    "FIFIFIWWW": Peak(70, 10, 100, in_flight=1),  # a weight gradient that is done is no longer queued
    "FFBFBB": Peak(140, 20, 0, in_flight=2),
}


@pytest.mark.parametrize("kinds", PEAKS)
def test_the_worst_moment_of_a_stage(kinds):
    steps = [(Step(0, kind, kinds[:index].count(kind)),) for index, kind in enumerate(kinds)]
    assert schedule_peak(occupancies(steps, [0]), [STAGE]) == PEAKS[kinds]


@pytest.mark.parametrize(
    "schedule, in_flight", [("1F1B", [4, 3, 2, 1]), ("GPipe", [8] * 4), ("ZBVZeroBubble", [8] * 4)]
)
def test_microbatches_in_flight(schedule, in_flight):
    layout = Layout(pipeline_parallel=4, pipeline_schedule=schedule)
    order = schedule_order(schedule, 4, 8, layout.stages_per_rank)
    for rank, most in enumerate(in_flight):
        stages = [StageCount(stage, range(1), 10, 0, 1, 0) for stage in layout.stages_of(rank)]
        peak = schedule_peak(occupancies(order[rank], layout.stages_of(rank)), stages)
        assert (peak.in_flight, peak.saved, peak.output) == (most, 10 * most, most)


def test_what_the_loss_needs_while_it_runs():
    """It needs a chunk's logits, the table's float32 gradient, gathered rows and their gradient."""
    config = GPTConfig(vocab_size=100, seq_length=8, n_layers=1, hidden_size=16, n_heads=2)
    assert loss_workspace(config, 40, 25, 10, itemsize=2) == 10 * 25 * 2 + 4 * 25 * 16 + 2 * 40 * 16 * 2
    assert loss_workspace(config, 6, 25, 10, itemsize=8) == 6 * 25 * 8 + 8 * 25 * 16 + 2 * 6 * 16 * 8


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_workspaces_hold_what_the_kernels_ask_for(sequence_parallel):
    pytest.importorskip("triton")
    from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul_space
    from tpformer.kernels.configurations import TILES
    from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce_space
    from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter_space

    tokens, hidden, tp, tile, half = 4096, 5120, 8, TILES["large"], torch.bfloat16
    if sequence_parallel:
        spaces = [
            all_gather_matmul_space(tokens // tp, hidden, tp, 2)[0],
            matmul_reduce_scatter_space(tokens // tp, hidden, tp, half, tile)[0],
        ]
    else:
        spaces = [matmul_all_reduce_space(tokens, hidden, tp, half, half, tile)[0]]
    slots = sum(2 * max(1 << 20, 1 << (space - 1).bit_length()) for space in spaces)
    flags = 4 * tp * 1024 * len(spaces)
    assert fused_workspaces(tokens, hidden, 2, tp, sequence_parallel) == slots + flags


HALF, SINGLE = (Precision(torch.float32, dtype, torch.float32) for dtype in (torch.bfloat16, torch.float32))
SIZE = Elements(sizes=(200.0,) * 4, matrices=600.0, rest=100.0, head=0.0)
M = 900
TWICE = [Step(0, kind, index) for index in range(2) for kind in "FB"]


def layout_of(stage: int, **others: object) -> Layout:
    degree = {"data_parallel_shard": 4, "zero_stage": stage} if stage else {"data_parallel_replicate": 4}
    return Layout(**{**degree, **others})  # type: ignore[arg-type]


def held(parameters: float, copies: float = 0, accumulated: float = 0, gradients: float = 0, optimizer: float = 0):
    names = {PARAMETERS: parameters, COPIES: copies, ACCUMULATED: accumulated, GRADIENTS: gradients}
    return {name: size for name, size in {**names, OPTIMIZER: optimizer}.items() if size}


def seen(sizes: dict[str, float]) -> dict[str, float]:
    return {name: size for name, size in sizes.items() if size}


# stage -> (end of the last forward, largest at a layer), bytes; 4 ranks: 4 M / 4 = 900, 8 M / 4 = 1800
STAGES = {
    1: (held(900, 2 * M, 4 * M, 0, 1800), 900 + 1800 + 2 * M + 4 * M + 2 * 200),
    2: (held(900, 2 * M, 0, 900, 1800), 900 + 1800 + 2 * M + 900 + (2 + 4) * 200),
    3: (held(900, 2 * 100, 0, 900, 1800), 900 + 1800 + 2 * 100 + 900 + (3 * 2 + 4) * 200),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage):
    found = step_moments({0: SIZE}, TWICE, layout_of(stage), HALF)
    forward, peak = STAGES[stage]
    assert seen(found.idle) == held(900, optimizer=1800)
    assert seen(found.forward) == forward and found.peak == peak
    assert seen(found.backward) == held(900, gradients=900, optimizer=1800)


def test_stage_0_and_float32():
    found = step_moments({0: SIZE}, TWICE, layout_of(0), HALF)
    assert seen(found.forward) == held(4 * M, 2 * M, 4 * M, 0, 8 * M)
    assert found.peak == 18 * M + 4 * 200  # a layer before it is reduced: its shard is a whole gradient
    assert step_moments({0: SIZE}, TWICE, layout_of(0), SINGLE).peak == 20 * M


def test_one_microbatch_accumulates_nothing():
    """Stage 1 is then stage 2."""
    first, second = (step_moments({0: SIZE}, TWICE[:2], layout_of(stage), HALF) for stage in (1, 2))
    assert first == second and ACCUMULATED not in first.forward
    assert first.peak == 900 + 1800 + 2 * M + (2 + 4) * 200


@pytest.mark.parametrize("n_layers, factor", [(1, 2 * 2), (2, 2 * 2 + 4), (3, 3 * 2 + 4)])
def test_layers_that_gather_ahead(n_layers, factor):
    """One layer has no next one to gather and none before it that is being reduced; of two only one of these."""
    size = SIZE._replace(sizes=(200.0,) * n_layers)
    assert sum(in_backward(size, layout_of(3), HALF, accumulates=True)) == factor * 200


def test_pipelines():
    """1F1B's first rank: the second forward comes before any gradient, the third with the first's."""
    first = [Step(0, "F", 0), Step(0, "F", 1), Step(0, "B", 0)]
    sharded = layout_of(3, pipeline_parallel=2)
    assert seen(step_moments({0: SIZE}, first, sharded, HALF).forward) == held(900, 200, 0, 0, 1800)
    third = step_moments({0: SIZE}, [*first, Step(0, "F", 2)], sharded, HALF)
    assert seen(third.forward) == held(900, 200, 0, 900, 1800)
    two = {0: SIZE, 3: SIZE._replace(head=100.0)}
    split = layout_of(1, pipeline_parallel=2, pipeline_schedule="ZBVZeroBubble")
    found = step_moments(two, [Step(stage, kind, 0) for stage in (0, 3) for kind in "FIW"], split, HALF)
    assert seen(found.forward) == held(1800, 4 * M, 4 * M, 0, 3600)
    assert found.peak == 1800 + 4 * M + 2 * 4 * M + 3600  # after the last W; before it 3600 less and 2 * 600 more


def test_elements_of_an_architecture():
    """GPT with tied embeddings: the last stage holds the table again, as its head."""
    config = GPTConfig(vocab_size=100, seq_length=8, n_layers=3, hidden_size=16, n_heads=2, vocab_multiple=1)
    first, last = elements(config, [range(2)], 1), elements(config, [range(2, 3)], 1)
    layer = 12 * 16 * 16 + (3 + 1 + 4 + 1) * 16 + 4 * 16
    assert first == Elements((layer,) * 2, 2 * 12 * 16 * 16, 100 * 16 + 8 * 16, 0)
    assert last == Elements((layer,), 12 * 16 * 16, 2 * 16 + 100 * 16, 2 * 16 + 100 * 16)
    whole = elements(config, [range(3)], 1)
    assert whole.rest == 100 * 16 + 8 * 16 + 2 * 16 and whole.head == 0 and whole.total == config.n_parameters
