"""A model with a cache gives the logits of the model without one, whatever comes in which pieces, or refuses."""

import itertools

import pytest
import torch
import torch.distributed as dist
from testing import assert_kernel_close, assert_same, on_every_rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.layers import Positions, TensorParallel, TransformerBlock, transformer_block
from tpformer.layers.cache import LayerCache
from tpformer.models import GPT, GPTConfig, KVCache

BASE = {"vocab_size": 50, "vocab_multiple": 16, "seq_length": 20, "n_layers": 2, "hidden_size": 48, "n_heads": 12}
ROPE = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tie_embeddings": False}
LEARNED = "learned positions"
CONFIGS = {
    LEARNED: {},
    "GQA": {**ROPE, "n_kv_heads": 4},
    "MQA, window, head dim": {**ROPE, "n_kv_heads": 1, "sliding_window": 3, "head_dim": 6},
    "qk-norm, window, scaled RoPE": {
        **ROPE, "n_kv_heads": 6, "qk_norm": True, "sliding_window": 7, "rope_scaling_factor": 8.0,
        "rope_original_length": 16,
    },
}  # fmt: skip
IDS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))


def build(config: str, tp: int = 1, dtype: torch.dtype = torch.float64) -> GPT:
    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"] if tp > 1 else None
    return GPT(GPTConfig(**BASE, **CONFIGS[config]), tp=TensorParallel(mesh), seed=3, dtype=dtype).eval()


PIECES = ([6, *[1] * 3, 9, 2], [*[1] * 9, 11], [1, 19])  # a window of 7 moves with a text's first single tokens, too


@torch.no_grad()
def in_pieces(model: GPT, pieces: list[int]) -> Tensor:
    """The logits of texts that come in pieces. The cache starts small and grows."""
    cache, bounds = KVCache(capacity=2), itertools.pairwise(itertools.accumulate(pieces, initial=0))
    return torch.cat([model(IDS[:, a:b], cache=cache) for a, b in bounds], 1)


@torch.no_grad()
def ragged(model: GPT, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Texts of different lengths: last logits of two padded pieces, then of single tokens; the same without a cache."""
    cache, found, expected = KVCache(), [], []
    for lengths in ([2, 7, 4], [4, 1, 3], *[[1, 1, 1]] * 4):
        rows = torch.full((3, max(lengths)), 49)
        starts = cache.lengths or [0, 0, 0]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rows[row, : end - start] = IDS[row, start:end]
        found.append(model(rows, cache=cache, lengths=lengths)[:, 0])
        expected.append(torch.stack([whole[row, end - 1] for row, end in enumerate(ends)]))
        assert cache.lengths == ends
    return torch.stack(found), torch.stack(expected)


# 4 ranks share 1 key-value head, or have 1.5 of 6: a rank then keeps two, and one of them for each query
@on_every_rank(2, *in_turns([1, 4], first=0))
def test_logits_equal_those_without_a_cache() -> None:
    for config in CONFIGS:
        model = build(config, dist.get_world_size())
        whole = model(IDS).detach()
        for pieces in PIECES:
            assert_same(in_pieces(model, pieces), whole, f"{config} in {pieces}")
        assert_same(*ragged(model, whole), f"{config} ragged")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_as_near_as_without_a_cache(dtype):
    exact, model, cache = build("GQA")(IDS).detach(), build("GQA", dtype=dtype), KVCache()
    with torch.inference_mode():
        found = torch.cat([model(IDS[:, i : i + 1], cache=cache) for i in range(20)], 1)
        whole = model(IDS)
    assert found.dtype == dtype and cache.layer("0").keys.dtype == dtype
    assert_kernel_close(found, exact, whole, "logits")


@torch.no_grad()
def test_samples_are_repeated_dropped_and_cut():
    model, cache = build("GQA"), KVCache()
    expected = model(IDS)
    with torch.inference_mode():  # what is written there can be read and written outside
        model(IDS[:, :9], cache=cache)
    cache.select([2, 0, 2])
    cache.truncate([5, 9, 7])
    rows = torch.stack([IDS[2, 5:6], IDS[0, 9:10], IDS[2, 7:8]])
    found = model(rows, cache=cache)[:, 0]
    assert_same(found, torch.stack([expected[2, 5], expected[0, 9], expected[2, 7]]))


class Double(nn.Module):
    """A module around another one. Its forward hands the cache on if `passes`."""

    def __init__(self, inner: nn.Module, passes: bool) -> None:
        super().__init__()
        self.inner, self.passes = inner, passes

    def forward(self, x: Tensor, **options) -> Tensor:
        return self.inner(x, **(options if self.passes else {**options, "cache": None}))


@torch.no_grad()
def test_changed_children_use_the_cache_or_are_refused():
    model = build("GQA")
    model.layers["0"].self_attn.q_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    model.layers["1"].self_attn = Double(model.layers["1"].self_attn, True)
    model.layers["1"].mlp.register_forward_hook(lambda module, inputs, output: output + 1)
    expected, cache = model(IDS), KVCache()
    found = torch.cat([model(IDS[:, :5], cache=cache), model(IDS[:, 5:], cache=cache)], 1)
    assert_same(found, expected)
    model.layers["1"].self_attn.passes = False
    with pytest.raises(ValueError, match=r"layers.1 took a cache and left its tokens out"):
        model(IDS[:, :1], cache=cache)
    for path, name in (("layers.0.self_attn", "self_attn"), ("layers.0", "layers.0")):
        model.set_submodule(path, nn.Identity())
        with pytest.raises(ValueError, match=f"{name} is a Identity, whose forward takes no cache"):
            model(IDS, cache=KVCache())


def block(**options) -> TransformerBlock:
    return transformer_block(48, 4, rope_base=1e4, dtype=torch.float64, **options).eval()


def by_block(module: TransformerBlock, **options) -> Tensor:
    return module(torch.zeros(2, 8, 48, dtype=torch.float64), cache=LayerCache(4), **options)


def cached(model: GPT, ids: Tensor = IDS, cache: KVCache | None = None, **options) -> Tensor:
    return model(ids, cache=cache or KVCache(), **options)


def filled() -> KVCache:
    cached(build(LEARNED), cache=(cache := KVCache()))
    return cache


STAGE = GPT(GPTConfig(**BASE), part=range(1)).eval()
REFUSED = [
    (lambda: build("GQA")(IDS, lengths=[1, 2, 3]), "lengths without a cache"),
    (lambda: cached(build("GQA"), lengths=[0, 2, 3]), r"lengths=\[0, 2, 3\] of a batch \(3, 20\): give"),
    (lambda: cached(build("GQA"), lengths=[20]), r"lengths=\[20\] of a batch"),
    (lambda: cached(build("GQA"), targets=IDS), "a cache takes token ids and lengths only"),
    (lambda: cached(build("GQA"), position_ids=0 * IDS), "a cache takes token ids and lengths only"),
    (lambda: cached(build(LEARNED), IDS[:, :5], filled()), "25 tokens per sample, but the model has 20 learned"),
    (lambda: cached(build("GQA"), IDS[:1, :1], filled()), "1 samples, but the cache has 3: make one for each batch"),
    (lambda: filled().truncate([21, 1, 1]), r"a cache of \[20, 20, 20\] tokens cannot be cut to \[21, 1, 1\]"),
    (lambda: cached(STAGE), "a pipeline stage takes no cache"),
    (lambda: cached(build(LEARNED).train()), r"a cache in training mode: call model.eval\(\) first"),
    (torch.enable_grad()(lambda: cached(build(LEARNED))), "a cache keeps no gradients: call .* under torch.no_grad"),
    (lambda: Positions(2, 1, offset=[1, 2, 3]), r"offset has 3 numbers for batch=2"),
    (lambda: by_block(block(), positions=Positions(2, 8, offset=9)), "from position 9 on, but the cache has 0: give"),
    (lambda: by_block(block(), key_padding_mask=torch.zeros(2, 8).bool()), "pad on the right"),
    (lambda: by_block(block(is_causal=False)), "needs causal attention without sequence_parallel, but is_causal=F"),
]  # fmt: skip


@torch.no_grad()
def test_what_does_not_fit_is_refused():
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()


@on_every_rank(2)
def test_shards_of_parameters_take_a_cache_and_shards_of_sequences_do_not() -> None:
    model = GPT(GPTConfig(**BASE), tp=build_mesh("cpu", tensor_parallel=2)["tp"]).eval()
    words = "a cache on 2 tensor-parallel ranks with sequence shards: build"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model(IDS, cache=KVCache())
    model, mesh = build(LEARNED), dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = model(IDS).detach()
    for part in (*model.layers.values(), model):
        fully_shard(part, mesh=mesh)
    cache = KVCache()
    with torch.no_grad():
        found = torch.cat([model(IDS[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 20))], 1)
    assert_same(found, whole)
