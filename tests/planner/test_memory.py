"""Parts of the memory model, worked out by hand: a schedule's worst moment, and what the loss needs while it runs."""

from tpformer.models import GPTConfig
from tpformer.planner import Step
from tpformer.planner.counting import StageCount
from tpformer.planner.memory import Peak, loss_workspace, occupancies, schedule_peak

STAGE = StageCount(0, range(1), saved=100, offloaded=30, output=10, queued=50)


def order(kinds: str) -> list[tuple[Step, ...]]:
    """The steps of one stage, one after the other."""
    seen: dict[str, int] = {}
    steps = []
    for kind in kinds:
        seen[kind] = seen.get(kind, -1) + 1
        steps.append((Step(0, kind, seen[kind]),))
    return steps


def peak(steps: list[tuple[Step, ...]]) -> Peak:
    return schedule_peak(occupancies(steps, [0]), [STAGE])


def test_a_weight_gradient_that_is_done_is_no_longer_queued():
    assert peak(order("FIWFIW")) == Peak(70, 10, 0, in_flight=1)
    assert peak(order("FFIIWW")) == Peak(140, 20, 0, in_flight=2)
    assert peak(order("FIFIFIWWW")) == Peak(70, 10, 100, in_flight=1)
    assert peak(order("FFBFBB")) == Peak(140, 20, 0, in_flight=2)


def test_what_the_loss_needs_while_it_runs():
    """It needs a chunk's logits, the table's float32 gradient, gathered rows and their gradient."""
    config = GPTConfig(vocab_size=100, seq_length=8, n_layers=1, hidden_size=16, n_heads=2)
    assert loss_workspace(config, 40, 25, 10, itemsize=2) == 10 * 25 * 2 + 4 * 25 * 16 + 2 * 40 * 16 * 2
    assert loss_workspace(config, 6, 25, 10, itemsize=8) == 6 * 25 * 8 + 8 * 25 * 16 + 2 * 6 * 16 * 8
