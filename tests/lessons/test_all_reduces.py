"""Replicas add up gradients by the algorithm that the layout names, once a step, and nothing else changes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import build, run_config
from small_runs import take_step as step_of
from testing import assert_identical, assert_same, on_every_rank
from turns import in_turns

from tpformer.config import RunConfig
from tpformer.distributed import record_collectives
from tpformer.lessons.algorithms import ALGORITHMS
from tpformer.lessons.all_reduces import ranks_of_a_node
from tpformer.training.checkpoint import Checkpointer, load_checkpoint
from tpformer.training.checkpoint_files import step_path
from tpformer.training.model import ModelParts
from tpformer.training.updates import LocalUpdate

MODEL = {"vocab_size": 128, "seq_length": 8, "hidden_size": 16, "n_heads": 2, "position": "rope"}


def config_of(n_layers: int = 1, dtype: str = "float32", **parallel: object) -> RunConfig:
    model = {**MODEL, "n_layers": n_layers}
    return run_config(parallel, model, global_batch_size=8, microbatch_size=1, dtype=dtype)


def take_step(model: ModelParts, optimizers: list[LocalUpdate], step: int) -> float:
    first = 8 * (step - 1)
    rows = torch.arange(first, first + 8)[:, None] * 7 % 50 + torch.arange(9)
    return float(step_of(model, optimizers, rows, first).loss)


def save(directory, step: int, model: ModelParts, optimizers: list[LocalUpdate]) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(step, model.parts, optimizers, exchange=model.exchange)
    checkpointer.wait()


def load(directory, step: int, model: ModelParts, optimizers: list[LocalUpdate]) -> None:
    load_checkpoint(step_path(directory, step), model.parts, optimizers, model.exchange, group=dist.group.WORLD)


def train(config: RunConfig, steps: int) -> tuple[list[float], list[int], list[torch.Tensor]]:
    """Losses, bytes of the messages of the last step, and what this rank holds of the parameters."""
    model, optimizers = build(config)
    losses = []
    for step in range(1, steps + 1):
        with record_collectives() as calls:
            losses.append(take_step(model, optimizers, step))
    sent = [nbytes for name, nbytes in calls if name == "send"]
    return losses, sent, [parameter.to_local().detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def losses_of_one_process(ranks) -> list[float]:
    return ranks(1).run(train, config_of(dtype="float64", cpu_offload=True), 2)[0][0]


@pytest.mark.parametrize(("algorithm", "zero"), [("butterfly", 3), *in_turns([("ring", 1), ("driver", 2)], first=0)])
def test_replicas_send_what_the_algorithm_says_once_a_step(ranks, losses_of_one_process, algorithm, zero):
    """Two replicas of two shards, and two microbatches, after which all that the shards have is reduced."""
    parallel = {"data_parallel_replicate": 2, "data_parallel_shard": 2, "zero_stage": zero, "exchange": algorithm}
    config = config_of(**parallel)
    _, sent, held = zip(*ranks(4).run(train, config, 2), strict=True)
    cost = ALGORITHMS[algorithm](2, 4 * config.model.n_parameters / 2)
    assert sum(map(len, sent)) == 2 * (config.model.n_layers + 1) * cost.messages
    assert sum(map(sum, sent)) == 2 * cost.values
    assert_identical(held[0], held[2], "what replicas hold")
    assert_same(ranks(4).run(train, config_of(dtype="float64", **parallel), 2)[0][0], losses_of_one_process)


@on_every_rank(4)
def test_the_ranks_of_a_node() -> None:
    group = dist.new_group([0, 2, 3])
    if dist.get_rank() == 1:
        return
    for local, found in ((4, 3), (1, 1)):
        with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(local)}):
            assert ranks_of_a_node(group) == found
    said = r"the ranks \[0, 2, 3\] are on the machines \[0, 1, 1\]: choose another exchange"
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}), pytest.raises(ValueError, match=said):
        ranks_of_a_node(group)
