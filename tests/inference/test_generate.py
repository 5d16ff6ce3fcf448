"""Cached text equals uncached text, on any ranks, in any batch; it ends where it should, and costs what is stated."""

import dataclasses
from itertools import count
from unittest import mock

import pytest
import torch
from made import greedy
from testing import on_every_rank

from tpformer.distributed import build_mesh, record_collectives
from tpformer.inference.generate import generate, generate_text, next_logits
from tpformer.inference.sampling import Sampling
from tpformer.layers import TensorParallel
from tpformer.layers.router import routers
from tpformer.models import GPT, GPTConfig, KVCache
from tpformer.training.data import ByteTokenizer

LLAMA = GPTConfig(
    **{"vocab_size": 257, "seq_length": 24, "n_layers": 2, "hidden_size": 48, "n_heads": 12, "n_kv_heads": 4},
    **{"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False},
)
LEARNED = GPTConfig(vocab_size=257, seq_length=24, n_layers=1, hidden_size=48, n_heads=6)
SHARED = {"n_experts": 8, "expert_ffn_size": 24, "shared_expert_size": 12, "first_dense_layers": 1}
EXPERTS = dataclasses.replace(LLAMA, router_bias=True, **SHARED)
# as Mixtral, with a window; as Qwen3-MoE, with more experts a token; as DeepSeek-V3
MIXTRAL = dataclasses.replace(LLAMA, n_experts=4, expert_ffn_size=24, sliding_window=3)
MOE = dataclasses.replace(LLAMA, qk_norm=True, n_experts=8, experts_per_token=3, expert_ffn_size=20)
GROUPS = {"router_score": "sigmoid", "router_scale": 2.5, "router_groups": 4, "router_top_groups": 2}
DEEPSEEK = dataclasses.replace(EXPERTS, experts_per_token=3, **GROUPS)
PROMPTS = [[1], [7, 8, 9, 250, 2, 3], [5, 5], [256, 4, 6, 100]]
WARM = Sampling(temperature=1.3, top_k=40, top_p=0.95)


def build(config: GPTConfig = LLAMA, tp: int = 1, spread: float = 6) -> GPT:
    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"] if tp > 1 else None
    model = GPT(config, tp=TensorParallel(mesh), seed=3, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(spread)  # so that neighbouring tokens differ, and the texts are no constants
    return model


def texts(model: GPT, prompts=PROMPTS, max_new_tokens: int = 12, **options) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(len(prompts) * options.get("samples", 1))]
    for token in generate(model, prompts, max_new_tokens=max_new_tokens, **options):
        found[token.sequence].append(token.id)
    return found


CONFIGS = {"dense": LLAMA, "learned positions": LEARNED, "Mixtral": MIXTRAL, "Qwen3-MoE": MOE, "DeepSeek": DEEPSEEK}


def by_config(tp: int) -> dict[str, list[list[list[int]]]]:
    """Texts of four prompts, of two samples, and of one prompt, whose single token a step is fewer than the ranks."""
    found, warm = {}, {"sampling": WARM, "seed": 4}
    for name, config in CONFIGS.items():
        model = build(config, tp)
        samples, alone = texts(model, PROMPTS[:2], 6, samples=2, **warm), texts(model, PROMPTS[1:2], 6, **warm)
        found[name] = [texts(model), samples, alone]
        assert all(router.load is None for router in routers(model).values()), "nothing but training counts tokens"
    return found


def test_every_layout_gives_each_prompts_text_alone(ranks):
    """Models of experts are among them: a rank may have no token, and routers are of every kind."""
    expected = by_config(1)
    for name, found in expected.items():
        assert found[0] == [greedy(build(CONFIGS[name]), prompt, 12) for prompt in PROMPTS]
        assert len({tuple(text) for text in found[0]}) == 4
    assert ranks(2).run(by_config, 2) == [expected] * 2


def test_samples_are_the_texts_of_their_own_seeds():
    model = build()
    together = texts(model, PROMPTS[:2], sampling=WARM, samples=3, seed=10)
    alone = [texts(model, [PROMPTS[i // 3]], sampling=WARM, seed=10 + i)[0] for i in range(6)]
    assert together == alone and len({tuple(text) for text in together}) == 6


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["dense", "experts"])
@on_every_rank(2)
def test_collectives_of_a_step(config):
    """Two all-reduces a layer, one for the embedding, one gather of the last tokens' logits, in prefill and decode."""
    model, cache, hidden, size = build(config, tp=2), KVCache(), 48, 8
    for rows, tokens in ((PROMPTS, 4 * 6), ([[1]] * 4, 4)):
        with record_collectives() as found:
            next_logits(model, rows, cache)
        assert found == [("all_reduce", tokens * hidden * size)] * 5 + [("all_gather", 4 * 384 * size)]


def test_texts_end_where_they_should():
    model = build()
    free = greedy(model, PROMPTS[1], 12)
    stop = free[5]
    first = free.index(stop)
    cache = KVCache()
    tokens = list(generate(model, [[*PROMPTS[1]]], max_new_tokens=12, stop={stop}, cache=cache))
    assert [token.id for token in tokens] == free[: first + 1] and cache.lengths == [len(PROMPTS[1]) + first]
    assert [token.ended for token in tokens] == [None] * first + ["stop"]
    # the other texts of a batch go on; a stop token in the prompt ends nothing
    for prompt, text in zip(PROMPTS, texts(model, stop={stop, *PROMPTS[0]}), strict=True):
        alone = greedy(model, prompt, 12)
        ends = [index for index, token in enumerate(alone) if token in {stop, *PROMPTS[0]}]
        assert text == alone[: ends[0] + 1 if ends else 12]
    asked = count(1)
    third = [token.ended for token in generate(model, [[7]], max_new_tokens=9, ends=lambda token: next(asked) == 3)]
    assert third == [None, None, "stop"]
    assert list(generate(model, PROMPTS, max_new_tokens=0)) == [] == list(generate(model, [], max_new_tokens=3))


def test_learned_positions_end_a_text_and_rope_goes_on():
    tokens = [[], []]
    for token in generate(build(LEARNED), [[1] * 20, [1]], max_new_tokens=24):
        tokens[token.sequence].append(token)
    # the model reads 24 tokens at most, and gives one more
    assert (len(tokens[0]), tokens[0][-1].ended) == (5, "context")
    assert (len(tokens[1]), tokens[1][-1].ended) == (24, "length")
    model = build()
    assert texts(model, [[2, 3]], 40) == [greedy(model, [2, 3], 40)]
    assert len(texts(model, [[2] * 50], 4)[0]) == 4


REFUSED = [
    ([[1], []], {}, "prompt 1 has no tokens"),
    ([[1, 257]], {}, r"prompt 0 has ids from 1 to 257, outside the vocabulary \[0, 256\]"),
    ([[-1]], {}, "prompt 0 has ids from -1 to -1"),
    ([[0.5]], {}, r"a prompt is \(1,\) torch.float32: give a list"),
    ([[[1]]], {}, r"a prompt is \(1, 1\)"),
    ([[1] * 25], {}, "a text of 25 tokens, but the model has 24 learned positions"),
    ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1, samples=1: give at least 0"),
    ([[1]], {"samples": 0}, "samples=0: give at least 0 and at least 1"),
    ([[1], [2]], {"cache": KVCache()}, "a cache of 0 texts for 2 prompts"),
]


def test_memory_is_made_for_the_texts_that_can_come():
    """Room was made for a million tokens, of which a model with 24 learned positions reads 24."""
    for config, most, capacity in ((LEARNED, 10**6, 24), (LLAMA, 10**6, 24), (LLAMA, 4, 5)):
        with mock.patch("tpformer.inference.generate.KVCache", side_effect=KVCache) as made:
            next(generate(build(config), [[1, 2]], max_new_tokens=most))
        made.assert_called_once_with(capacity)


def test_wrong_calls_are_refused_at_once():
    for prompts, options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            generate(build(LEARNED), prompts, **{"max_new_tokens": 3, **options})


def test_pieces_of_text_are_the_text():
    model, tokenizer = build(), ByteTokenizer()
    options = {"max_new_tokens": 60, "sampling": Sampling(top_k=200), "samples": 2}
    told: list[str] = []
    found = [""] * 4
    for number, piece in generate_text(model, tokenizer, ["", "ab"], report=told.append, **options):
        found[number] += piece
    ids = texts(model, [[256], [97, 98]], 60, sampling=Sampling(top_k=200), samples=2, stop={256})
    assert found == [tokenizer.decode(text) for text in ids] and max(map(len, ids)) > 30
    worse = "texts may need 61 positions, but the model was trained with 24: they are likely to be worse beyond them"
    assert told == [worse]
    stop = found[2][5:7]
    pieces = generate_text(model, tokenizer, ["", "ab"], stops=[stop], report=told.append, **options)
    assert "".join(piece for number, piece in pieces if number == 2) == found[2][: found[2].index(stop)]
