"""The bench of replicas sees the mistakes that DiLoCo invites, each planted in the ranks of a small layout."""

from contextlib import ExitStack, nullcontext
from itertools import product
from unittest import mock

import pytest
from turns import in_turns

from checks import replicas
from checks.layout_cases import SIXTEEN, LayoutCase, case
from checks.layouts import RankRun, train
from tpformer.parallel import diloco, fragments
from tpformer.parallel.diloco import DiLoCo
from tpformer.parallel.fragments import Fragment, Held
from tpformer.training.data import build_dataset
from tpformer.training.model import ModelParts
from tpformer.training.setup import run_mesh

ROUNDS = case(2, replicate=2, exchange=replicas.ROUNDS)
STREAMED = case(2, replicate=2, exchange=replicas.STREAMED)
BIASED = case(2, replicate=2, model=SIXTEEN, exchange="diloco every=2")  # whose routers' biases steps move


def test_what_the_bench_covers() -> None:
    cases = (*replicas.SYNCHRONOUS, *replicas.CASES)
    for one in cases:
        replicas.config_of(one, "unused")  # checks every configuration
    assert len({str(one) for one in cases}) == len(cases)
    for field, wanted in (("tensor_parallel", {1, 2}), ("pipeline_parallel", {1, 2}), ("context_parallel", {1, 2})):
        assert {getattr(one.layout, field) for one in replicas.CASES} == wanted
    assert {one.layout.zero for one in replicas.CASES} == {0, 1, 2, 3} and len(replicas.SYNCHRONOUS) >= 6


@pytest.fixture
def text(tmp_path) -> str:
    """The prefix of a dataset of bytes."""
    (tmp_path / "text.txt").write_text("".join(f"{number} squared is {number**2}.\n" for number in range(400)))
    build_dataset([tmp_path], tmp_path / "data", "bytes", quiet=True)
    return str(tmp_path / "data")


def plant(name: str) -> ExitStack:
    """The context in which ranks make a mistake."""
    moved, take, held_by, send = Held.moved, Fragment.take, fragments.held_by, DiLoCo._send
    total, own = ModelParts._total, ModelParts.own_samples

    def over_replicas(self, number, *axes):
        return self.over_replicas(total(self, number, *axes).reshape(1))[0]

    def norms(self, *arguments, **options):
        return self.over_replicas(gradient_norms(self, *arguments, **options).square()).sqrt()

    def taking(**wrong):
        return mock.patch.object(Fragment, "take", lambda self, found, **right: take(self, found, **right | wrong))

    gradient_norms = ModelParts.gradient_norms
    planted = {
        "the sign of delta": mock.patch.object(Held, "moved", lambda self: -moved(self)),
        "no outer momentum": taking(momentum=0.0),
        "the outer rate": taking(lr=1.0),
        "all of the replica's own is given up": taking(mix=0.0),
        "targets of all replicas": mock.patch.object(ModelParts, "_total", over_replicas),
        "the norm of all replicas": mock.patch.object(ModelParts, "gradient_norms", norms),
        "buffers stay apart": mock.patch.object(
            diloco, "held_by", lambda *given: [each for each in held_by(*given) if each.momentum is not None]
        ),
        "a fragment is never sent": mock.patch.object(
            DiLoCo, "_send", lambda self, index: None if index == 1 else send(self, index)
        ),
        "all replicas take the same samples": mock.patch.object(
            ModelParts, "own_samples", lambda self, first, size: (first, own(self, first, size)[1])
        ),
    }  # fmt: skip
    stack = ExitStack()
    stack.enter_context(planted[name] if name else nullcontext())
    return stack


def trained(one: LayoutCase, text: str, mistake: str) -> RankRun:
    config = replicas.config_of(one, text)
    with plant(mistake):
        return train(config, run_mesh(config, "cpu"), True)


def simulated(one: LayoutCase, text: str) -> replicas.Whole:
    return replicas.Oracle(replicas.config_of(one, text)).run()


MISTAKES = {
    "rounds": (ROUNDS, ("the sign of delta", "no outer momentum", "the outer rate", "targets of all replicas",
                        "the norm of all replicas", "all replicas take the same samples")),
    "streamed": (STREAMED, ("all of the replica's own is given up", "a fragment is never sent")),
    "biased": (BIASED, ("buffers stay apart",)),
}  # fmt: skip


OTHERS = [*product(MISTAKES, (True,)), ("rounds", False), ("biased", False)]


@pytest.mark.parametrize(("name", "planted"), [("streamed", False), *in_turns(OTHERS)])
def test_mistakes_are_seen_and_nothing_else(ranks, text, name, planted) -> None:
    one, mistakes = MISTAKES[name]
    (whole,) = ranks(1).run(simulated, one, text)
    for mistake in mistakes if planted else [""]:
        assert replicas.row_of(one, ranks(2).run(trained, one, text, mistake), whole)["ok"] != planted, mistake
