"""The memory model: a schedule's worst moment, buffers and workspaces by hand, states of a step beside measured ones.

tests/planner/test_rank_memory.py compares the whole of it with counts.
"""

import json
from collections import Counter

import pytest
import torch

from bench.provenance import RESULTS
from checks import zero
from checks.held import KINDS
from tpformer.models import GPTConfig
from tpformer.parallel import Layout
from tpformer.planner import Step
from tpformer.planner.counting import StageCount
from tpformer.planner.memory import Peak, fused_workspaces, loss_workspace, occupancies, schedule_peak
from tpformer.planner.states import ACCUMULATED, Elements, Precision, in_backward, step_moments

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


# what `python -m bench zero` found on real ranks, in every ZeRO stage, two dtypes and three schedules
MEASURED = json.loads((RESULTS / "cpu" / "zero.json").read_text())


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['case']}, {row['dtype']}, rank {row['rank']}")
def test_states_of_a_step_are_those_that_ranks_held(row):
    """Each moment's formula is the one beside which the committed results are right to 3 %."""
    moments = {moment: dict(zip(KINDS, found["held"], strict=True)) for moment, found in row["moments"].items()}
    memory = {moment: found["memory"] for moment, found in row["moments"].items() if found["memory"] is not None}
    config = zero.run_config(zero.CASES[row["case"]], row["dtype"], MEASURED["model"], MEASURED["microbatches"])
    again = zero.zero_row(row["case"], config, row["rank"], zero.Measured(moments, memory, Counter()))
    assert again["moments"] == row["moments"] and again["parameters"] == row["parameters"]
    assert all(found["ok"] for found in again["moments"].values())


HALF = Precision(torch.float32, torch.bfloat16, torch.float32)
SIZE = Elements(sizes=(200.0,) * 4, matrices=600.0, rest=100.0, head=0.0)
M = 900


def sharded(stage: int) -> Layout:
    return Layout(data_parallel_shard=4, zero_stage=stage)


def test_one_microbatch_accumulates_nothing():
    """Stage 1 is then stage 2."""
    first, second = (
        step_moments({0: SIZE}, [Step(0, "F", 0), Step(0, "B", 0)], sharded(stage), HALF) for stage in (1, 2)
    )
    assert first == second and ACCUMULATED not in first.forward
    assert first.peak == 900 + 1800 + 2 * M + (2 + 4) * 200


@pytest.mark.parametrize("n_layers, factor", [(1, 2 * 2), (2, 2 * 2 + 4), (3, 3 * 2 + 4)])
def test_layers_that_gather_ahead(n_layers, factor):
    """One layer has no next one to gather and none before it that is being reduced; of two only one of these."""
    size = SIZE._replace(sizes=(200.0,) * n_layers)
    assert sum(in_backward(size, sharded(3), HALF, accumulates=True)) == factor * 200
