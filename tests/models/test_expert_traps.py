"""Mistakes that experts over the data axes invite, each made on purpose: steps of training see it in a layout that is
named beside it, and without a mistake those steps are one process's.

A mistake would train to a wrong loss without a message. tests/ops has those of the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from pool import WorkerPool
from small_runs import build, run_config, take_step, world_size
from testing import differ_on_a_rank
from torch.distributed.fsdp import FSDPModule

from tpformer.layers import module
from tpformer.models import GPT
from tpformer.parallel import gradients, zero
from tpformer.training import experts, setup
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers

route = import_module("tpformer.ops.route")  # the package has the function
Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]
BATCH, SEQ, STEPS = 4, 8, 2
MODEL = {
    "vocab_size": 50, "seq_length": SEQ, "n_layers": 2, "hidden_size": 16, "n_heads": 4, "dropout": 0.1,
    "n_experts": 8, "expert_ffn_size": 6, "shared_expert_size": 4, "first_dense_layers": 1, "router_bias": True,
    "activation": "swiglu", "bias": False, "norm": "rmsnorm", "router_score": "sigmoid",
}  # fmt: skip
LAYOUTS: dict[str, dict] = {
    "dp4 ep2": {"data_parallel_shard": 4, "zero_stage": 3, "expert_parallel": 2},
    "tp4 ep2": {"tensor_parallel": 4, "expert_parallel": 2},
    "tp2 dp2 ep4": {"tensor_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 4},
    "cp2 tp2 ep2": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "pp2 dp2 ep2": {
        "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2, "expert_parallel": 2,
    },
    "tp2 pp2 ep1": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 1},
}  # fmt: skip


def steps(model: ModelParts, optimizers: list) -> dict[str, Any]:
    """What training gives: losses, norms before clipping, experts' loads. A step begins with what the last one made."""
    found: dict[str, Any] = {}
    for step in range(STEPS):
        rows = torch.randint(50, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
        result = take_step(model, optimizers, rows, step * BATCH)
        found |= {f"loss {step}": result.loss, f"norm {step}": result.norm, f"loads {step}": result.loads}
    return found


def differs(layout: str, mistake: Mistake | None) -> bool:
    """Whether a rank's results in the layout, with the mistake, differ from one process's, without it."""
    options: dict[str, Any] = {"dtype": "float64", "global_batch_size": BATCH, "balance_loss": 0.1}
    made = MODEL | ({"n_layers": 4} if "pipeline_parallel" in LAYOUTS[layout] else {})
    config = run_config(LAYOUTS[layout], made, microbatch_size=1, **options)
    alone = GPT(config.model.architecture, seed=config.train.seed, dtype=torch.float64, balance_loss=0.1)
    rate = config.train.router_bias_rate
    whole = ModelParts(
        [alone], microbatch_size=1, n_microbatches=BATCH, dtype=torch.float64, router_bias_rate=rate
    )  # fmt: skip
    expected = steps(whole, build_optimizers(whole, config.optimizer))
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            mistake(patch)
        found = steps(*build(config))
    return differ_on_a_rank(found, expected)


def norm_counts_copies_of_experts(patch: Patch) -> None:
    """As if a gradient's parts were those of the dense parameters."""
    patch.setattr(gradients, "_copies", lambda grad, ranks: ranks // grad.device_mesh.size(0))


def gradients_of_experts_are_averages(patch: Patch) -> None:
    before = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: before(self, 2.0))


def experts_drawn_by_local_index(patch: Patch) -> None:
    before = module.own_part
    patch.setattr(module, "own_part", lambda *args: (before(*args)[0], (0,) * len(args[0])))


def copies_of_experts_without_data_parallelism(patch: Patch) -> None:
    patch.setattr(setup, "uses_fsdp", lambda layout, dtype: layout.copies > 1)


def weight_gradients_after_the_reduction(patch: Patch) -> None:
    patch.setattr(zero, "take_weight_gradients", lambda part: None)


def loads_of_own_tokens(patch: Patch) -> None:
    before = experts.all_reduce
    patch.setattr(experts, "all_reduce", lambda x, group: before(x, None if group and group.size() == 2 else group))


def loads_of_tensor_parallel_ranks_twice(patch: Patch) -> None:
    before = experts.all_reduce
    patch.setattr(experts, "all_reduce", lambda x, group: before(x, group) * (1 if group is None else 2))


def balance_of_own_tokens(patch: Patch) -> None:
    patch.setattr(route, "all_reduce", lambda x, group: x)


TRAPS: dict[Mistake, str] = {
    norm_counts_copies_of_experts: "dp4 ep2",
    gradients_of_experts_are_averages: "dp4 ep2",
    experts_drawn_by_local_index: "dp4 ep2",
    copies_of_experts_without_data_parallelism: "tp4 ep2",
    weight_gradients_after_the_reduction: "pp2 dp2 ep2",
    loads_of_own_tokens: "cp2 tp2 ep2",
    loads_of_tensor_parallel_ranks_twice: "cp2 tp2 ep2",
    balance_of_own_tokens: "tp2 dp2 ep4",
}


@pytest.mark.parametrize("mistake", TRAPS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_seen(ranks: WorkerPool, mistake: Mistake) -> None:
    layout = TRAPS[mistake]
    assert all(ranks(world_size(LAYOUTS[layout])).run(differs, layout, mistake))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_mistake_it_is_one_process(ranks: WorkerPool, layout: str) -> None:
    assert not any(ranks(world_size(LAYOUTS[layout])).run(differs, layout, None))
