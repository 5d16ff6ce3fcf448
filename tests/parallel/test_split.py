"""No pipeline split is better than the one found; a GPT's costs are its parts' parameters and FLOPs."""

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpformer.models import GPT, GPTConfig, preset_config
from tpformer.parallel import split_stages


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
@example([2, 3, 5, 1, 6], 4)  # the best split of the first four items in three stages is not part of the best one
def test_no_split_is_better(costs, stages):
    stages = min(stages, len(costs))
    found = split_stages(costs, stages)
    assert [i for each in found for i in each] == list(range(len(costs))) and all(found)

    def quality(bounds):
        sums = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        return max(sums), sum(value**2 for value in sums)

    every = [quality((0, *inner, len(costs))) for inner in combinations(range(1, len(costs)), stages - 1)]
    assert quality((*(each.start for each in found), len(costs))) == min(every)


def test_embedding_and_head_are_counted():
    """A vocabulary as heavy as two layers takes layers from the first and the last stage. None is without a layer."""
    config = GPTConfig(vocab_size=24 * 64, n_layers=8, hidden_size=64, n_heads=4, seq_length=8)
    assert [len(part) for part in split_stages(config.layer_costs("parameters"), 4)] == [1, 3, 3, 1]
    *others, last = [len(part) for part in split_stages(config.layer_costs("time"), 4)]
    assert sorted(others) == [2, 2, 3] and last == 1, "an embedding takes no time, a head does"
    with pytest.raises(ValueError, match="3 layers cannot be divided among 4 stages"):
        split_stages([1.0] * 3, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_costs_are_the_parts_parameters_and_flops(tied):
    config = GPTConfig(vocab_size=128, n_layers=4, hidden_size=32, n_heads=4, tie_embeddings=tied, qk_norm=tied)
    costs = config.layer_costs("parameters")
    for part in split_stages(costs, 3):
        built = GPT(config, part=part, device="meta")
        assert sum(parameter.numel() for parameter in built.parameters()) == sum(costs[part.start : part.stop])
    assert sum(costs) == config.n_parameters + (128 * 32 if tied else 0)
    config = preset_config("llama3-8b")
    assert sum(config.layer_costs("time")) == config.flops_per_token
    assert sum(preset_config("megatron-1008b").layer_costs("time")) / 1e12 == pytest.approx(6.17, rel=0.02)
