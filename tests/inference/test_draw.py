"""Filters are transformers' own, draws have the probabilities that are left, and a seed fixes them."""

import pytest
import torch

from tpformer.inference.sampling import Sampling, draw, filtered

LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


FILTERS = [
    {"temperature": 0.7}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.8}, {"top_p": 1e-6}, {"min_p": 0.1}, {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", FILTERS)
def test_filters_are_those_of_transformers(options):
    transformers = pytest.importorskip("transformers")
    wanted = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    config = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    processors = model._get_logits_processor(wanted, input_ids_seq_length=1)  # in the order that generate() has
    ties = LOGITS.clone()
    ties[0, 3:9] = ties[0].max()
    for logits in (LOGITS, ties):
        expected = processors(torch.zeros(6, 1, dtype=torch.int64), logits.clone())
        assert torch.equal(filtered(logits, Sampling(**options)), expected)


def test_draws_have_the_probabilities_that_are_left():
    logits = LOGITS[:1].expand(4000, -1)
    sampling = Sampling(temperature=2.0, top_k=6)
    found = torch.bincount(torch.tensor(draw(logits, sampling, range(4000), 0)), minlength=50) / 4000
    expected = filtered(LOGITS[:1], sampling).softmax(-1)[0]
    assert (found > 0).tolist() == (expected > 0).tolist()
    # five standard deviations of a share of 4000 draws
    assert bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all())


def test_a_draw_depends_on_its_own_seed_and_index_only():
    sampling = Sampling(temperature=3.0)
    together = draw(LOGITS, sampling, [1, 2, 3, 1, 2, 3], 7)
    assert together == [draw(LOGITS[row : row + 1], sampling, [seed], 7)[0] for row, seed in enumerate([1, 2, 3] * 2)]
    same = LOGITS[:1].expand(6, -1)
    assert len({tuple(draw(same, sampling, range(6), index)) for index in range(6)}) == 6
    assert draw(LOGITS, Sampling(temperature=0.0), [0] * 6, 0) == LOGITS.argmax(-1).tolist()


REFUSED = [
    ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
    ({"temperature": float("nan")}, "temperature=nan must"),
    ({"temperature": 1e-300}, "temperature=1e-300 must be at least 1e-06, or 0"),
    ({"top_k": 0}, "top_k=0 must be at least 1"),
    ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": -0.1}, "min_p=-0.1 must be from 0"),
]


def test_what_gives_no_probabilities_is_refused():
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            Sampling(**options)
    for value in (float("nan"), float("inf")):
        logits = LOGITS.clone()
        logits[3, 4] = value
        with pytest.raises(FloatingPointError, match="the logits are not finite"):
            draw(logits, Sampling(), [0] * 6, 0)
