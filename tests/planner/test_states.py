"""The formulas of model states by hand: what a rank holds at each moment of a step, in each ZeRO stage."""

import pytest
import torch

from tpformer.models import GPTConfig
from tpformer.parallel import Layout
from tpformer.planner import Step
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
