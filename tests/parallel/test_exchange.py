"""The protocol of an Exchange: its default changes nothing, and one of a user's own is asked for all of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import run_config, take_step
from testing import assert_identical, assert_same, on_every_rank

from tpformer.config import RunConfig
from tpformer.distributed import all_reduce
from tpformer.distributed.links import Link
from tpformer.models import GPT
from tpformer.parallel import Exchange, Layout, exchange_named
from tpformer.training import graph
from tpformer.training.checkpoint import Checkpointer
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

MODEL = {"vocab_size": 128, "seq_length": 8, "hidden_size": 16, "n_heads": 2, "n_layers": 2}
PARALLEL = {"data_parallel_replicate": 2, "data_parallel_shard": 2}


class Counting(Exchange):
    """The library's sum, by hand, which counts the sums of each unit."""

    sums_replicas = True

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.settled: list[float] = []

    def unit(self, name: str, shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> Callable:
        self.sums[name] = torch.zeros(1)

        def add(x: torch.Tensor) -> None:
            assert x.numel() == sum(torch.Size(shape).numel() for shape in shapes)
            x.copy_(all_reduce(x, group))
            self.sums[name] += 1

        return add

    def settle(self, skipped: torch.Tensor) -> None:
        self.settled.append(float(skipped))

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{dist.get_rank()}.{name}": each for name, each in self.sums.items()}

    def load(self, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert set(self.state()) < set(saved) and all(each.is_meta for each in saved.values())
        return self.state()


def rows(first: int) -> torch.Tensor:
    return torch.arange(first, first + 8)[:, None] * 7 % 50 + torch.arange(9)


@on_every_rank(4)
def test_one_of_a_users_own_is_asked_once_a_step_and_is_saved(tmp_path) -> None:
    config, runs = run_config(PARALLEL, MODEL, global_batch_size=8, microbatch_size=1, dtype="float64"), []
    for exchange in (Exchange(), Counting()):
        model = build_model(config, run_mesh(config, "cpu"), exchange=exchange)
        optimizers = build_optimizers(model, config.optimizer)
        losses = [float(take_step(model, optimizers, rows(first), first).loss) for first in (0, 8)]
        runs.append([losses, [each.to_local() for each in model.parameters()]])
    assert_same(runs[1], runs[0])
    assert exchange.settled == [0.0, 0.0] and list(exchange.sums.values()) == [2.0] * 3
    assert list(exchange.sums)[:2] == ["layers.0", "layers.1"] and "+" in list(exchange.sums)[2]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model.parts, optimizers, exchange=exchange)
    checkpointer.wait()
    again = Counting()
    other = build_model(config, run_mesh(config, "cpu"), exchange=again)
    checkpointer.load(1, other.parts, build_optimizers(other, config.optimizer), again)
    assert_identical(again.sums, exchange.sums)


def test_the_default_does_nothing() -> None:
    found, steps = exchange_named("library"), object()
    assert type(found) is Exchange and found.state() == {} and found.load({"a": torch.ones(1)}) == {}
    assert [found.samples(24, 12, rank, 3) for rank in range(3)] == [(24, 4), (28, 4), (32, 4)]
    assert found.steps(steps, None, [], None) is steps and found.kept_bytes(1e6, 4) == 0
    links = Link(1.0, 1.0), Link(2.0, 1.0)
    wanted = {(1, 1): 0, (4, 1): 6 + 12, (2, 2): 3 * 2 + 3 + 12}
    assert {ranks: found.seconds(8.0, *ranks, *links) for ranks in wanted} == wanted
    with pytest.raises(TypeError, match="Exchange leaves sums over replicas to FSDP2"):
        found.unit("layers.0", [], None)


class Refusing(Exchange):
    takes_steps = True

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        raise ValueError(f"not with {layout.data_parallel} ranks, {run is not None}")


def test_who_builds_a_model_asks_the_exchange_that_was_handed_in() -> None:
    config = run_config({}, MODEL, global_batch_size=2, microbatch_size=1)
    mesh: Any = None
    with pytest.raises(ValueError, match="not with 1 ranks, True"):
        build_model(config, mesh, exchange=Refusing())
    parts, layout = [GPT(config.model.architecture, device="meta")], Layout(data_parallel_replicate=2, exchange="ring")
    with pytest.raises(ValueError, match="exchange='ring': give the Exchange that the parts were built with"):
        ModelParts(parts, layout, microbatch_size=1)
    model: Any = SimpleNamespace(exchange=Refusing(), end_of_document=None)
    with mock.patch.multiple(graph, why_no_graph=lambda *_: None, StepGraph=mock.Mock(side_effect=AssertionError)):
        assert graph.build_steps(config, "cuda", model, []).func is train_step


@pytest.mark.parametrize("other, same", [
    ("topk share=0.01", True), ("topk  share=0.01 feedback=true", True), ("topk share=0.02", False), ("int8", False),
])  # fmt: skip
def test_exchanges_are_compared_by_what_they_do(other: str, same: bool) -> None:
    assert (exchange_named("topk") == exchange_named(other)) is same
