"""What all-reduce algorithms send, by their formulas, and how long that takes."""

import pytest

from tpformer.distributed.algorithms import ALGORITHMS, NAMES, Link, Traffic, all_reduce_seconds

FAST, SLOW = Link(2e-6, 300e9), Link(12e-6, 40e9)


def test_values_of_the_textbook():
    """4 ranks with 4 values each."""
    values = {name: cost(4, 4).values for name, cost in ALGORITHMS.items()}
    assert (values["all_pairs"], values["driver"], values["ring"]) == (48, 24, 24)
    assert values["halving_doubling"] == values["parameter_server"] == values["tree"] == 24
    assert values["butterfly"] == 32
    assert ALGORITHMS["ring"](4, 4) == Traffic(6, 24, 24, 6)
    assert ALGORITHMS["tree"](7, 1) == Traffic(4, 12, 12, 3)
    assert ALGORITHMS["butterfly"](6, 1) == Traffic(4, 12, 12, 3), "two ranks fold, four exchange twice"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_algorithm_sends_less_than_a_reduction_needs(name, ranks):
    cost = ALGORITHMS[name](ranks, 100.0)
    assert cost.values >= 2 * (ranks - 1) / ranks * 100 and cost.messages >= ranks - 1
    assert cost.values / ranks <= cost.busiest * (1 + 1e-12) <= cost.values * (1 + 1e-12)


def test_seconds():
    for name in NAMES:
        assert all_reduce_seconds(name, 1e9, 1, 1, FAST, SLOW) == 0
        assert all_reduce_seconds(name, 1e9, 1, 4, FAST, SLOW) > all_reduce_seconds(name, 1e9, 4, 1, FAST, SLOW)
    ring = all_reduce_seconds("ring", 1e9, 4, 1, FAST, SLOW)
    assert ring == pytest.approx(6 * 2e-6 + 1.5e9 / 300e9)
    across = all_reduce_seconds("ring", 1e9, 4, 4, FAST, SLOW)
    assert across == pytest.approx(30 * (12e-6 / 4 + 2e-6 * 3 / 4) + 2 * 15 / 16 * 1e9 / 160e9)
    both = all_reduce_seconds("hierarchical", 1e9, 4, 4, FAST, SLOW)
    assert both == pytest.approx(ring + 6 * 12e-6 + 1.5 * 0.25e9 / 40e9)
    small = {name: all_reduce_seconds(name, 1e3, 8, 8, FAST, SLOW) for name in NAMES}
    assert min(small, key=small.__getitem__) in ("butterfly", "tree"), "latency decides"
