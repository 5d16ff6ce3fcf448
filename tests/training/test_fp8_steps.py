"""A step in FP8 quantises each weight once, for all microbatches, but in ZeRO stage 3; its numbers are those of steps
that quantise in each use, to the bit, also in a CUDA graph. Nothing that it keeps outlives it."""

import dataclasses
import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from graphs import recorded
from pool import WorkerPool
from turns import in_turns

from harness.step_counts import run_config
from tpformer.kernels.quantize.format import VALUES, weight_exponents
from tpformer.ops.transports.interface import REGISTRY
from tpformer.ops.transports.quantized import record_blocks
from tpformer.parallel import local_part
from tpformer.planner.storages import live_storages
from tpformer.training import model as training_model
from tpformer.training.graph import WARM_UP, StepGraph
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

MODEL = {
    "vocab_size": 64, "seq_length": 8, "n_layers": 2, "hidden_size": 128, "n_heads": 2, "head_dim": 128,
    "ffn_hidden_size": 256, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False,
}  # fmt: skip
LINEARS, MICROBATCHES, STEPS = 2 * 7, 3, WARM_UP + 2
SHARED, PP2 = {"data_parallel_shard": 2}, {"pipeline_parallel": 2}


def ran(parallel: dict, captures: bool = False, keeps: bool = True) -> tuple[list[int], int, list[torch.Tensor]]:
    """This rank's part of a run: weights that the host has quantised in each step, what is left, parameters."""
    config = run_config(parallel, "float64", MODEL, MICROBATCHES)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="fp8"))
    model = build_model(config, run_mesh(config, "cpu"))
    optimizers, quantised = build_optimizers(model, config.optimizer), []

    def take(*arguments, **options):  # type: ignore[no-untyped-def]
        with record_blocks() as made:
            results = train_step(model, optimizers, *arguments, **options)
        shapes = [(each.exponents.shape, each.values.shape) for each in made]
        quantised.append(sum(exponents == weight_exponents(*values) for exponents, values in shapes))
        assert REGISTRY.blocks is None
        return results

    step = StepGraph(take, model, optimizers, strict=True, capture=recorded) if captures else take
    with nullcontext() if keeps else mock.patch.object(training_model, "keep_blocks", nullcontext):
        for number in range(1, STEPS + 1):
            first, share = model.own_samples(number * MICROBATCHES, config.train.global_batch_size)
            ids = torch.randint(64, (share, 9), generator=torch.Generator().manual_seed(first))
            step(ids, first_sample=first, lr=0.01, clip_norm=1.0)
    gc.collect()
    left = 0 if captures else len(live_storages(lambda x: x.dtype == VALUES))
    return quantised, left, [local_part(each).detach().clone() for each in model.parameters()]


CASES = [
    ({}, LINEARS),
    ({**SHARED, "zero_stage": 3}, LINEARS * 2 * MICROBATCHES),
]
OTHERS = [
    ({"data_parallel_replicate": 2}, LINEARS),
    ({**SHARED, "zero_stage": 1}, LINEARS),
    ({"tensor_parallel": 2}, LINEARS),
    ({**PP2, "pipeline_schedule": "1F1B"}, LINEARS // 2),
    ({**PP2, "pipeline_schedule": "InterleavedZeroBubble", "pipeline_stages_per_rank": 1}, LINEARS // 2),
    ({**SHARED, "zero_stage": 2, "recompute": "full"}, LINEARS),
]


@pytest.mark.parametrize("parallel, linears", [*CASES, *in_turns(OTHERS)])
def test_a_step_quantises_each_weight_once(ranks: WorkerPool, parallel: dict, linears: int) -> None:
    n = 2 if parallel else 1
    for found, fresh in zip(ranks(n).run(ran, parallel), ranks(n).run(ran, parallel, False, False), strict=True):
        assert found[0] == [linears] * STEPS and sum(fresh[0]) >= sum(found[0]) and found[1] == 0
        assert all(map(torch.equal, found[2], fresh[2]))


def test_a_graph_of_a_step_quantises_in_each_replay(ranks: WorkerPool) -> None:
    (plain,), (replayed,) = (ranks(1).run(ran, {}, captures) for captures in (False, True))
    assert replayed[0] == [LINEARS] * (WARM_UP + 1), "replays are not the host's"
    assert all(map(torch.equal, replayed[2], plain[2]))
