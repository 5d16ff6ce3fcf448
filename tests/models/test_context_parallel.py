"""A GPT, and layers by themselves, whose samples' tokens lie on context-parallel ranks compute what one process does,
with packed documents, windows and dropout. What they cannot compute is refused.

tests/checks has runs in many layouts, and tests/ops the operation.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from context import BATCH, GPT2, HIDDEN, MIXTURE, NEWER, SEQ, context, documents, drawn, gradients, loss_of
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor, nn
from turns import in_turns, of_turn

from tpformer.distributed import all_reduce, build_mesh
from tpformer.layers import MoE, PositionEmbedding, Positions, SelfAttention, TensorParallel, transformer_block
from tpformer.layers.dropout import DropoutKey
from tpformer.models import GPT, GPTConfig, KVCache
from tpformer.ops import Context

OPTIONS = {}, {"recompute": "full", "reduction": "mean"}, {"recompute": "mlp", "label_smoothing": 0.1}
RUNS = [  # every pair of a model, documents or none, and options
    (config, ids, options)
    for (row, config), (column, options) in product(enumerate((GPT2, NEWER, MIXTURE)), enumerate(OPTIONS))
    for ids in ((None, documents()) if row == column else (documents(),))
]


@pytest.fixture(scope="module")
def of_one_process() -> list:
    return [loss_of(config, None, ids, **options) for config, ids, options in RUNS]


@on_every_rank(2, *in_turns([4], first=1))
def test_a_gpt_is_that_of_one_process(of_one_process: list) -> None:
    tp = context()
    for (config, ids, options), expected in zip(RUNS, of_one_process, strict=True):
        assert_same(loss_of(config, tp, ids, **options), expected, f"{config} {options}")


@on_every_rank(2)
def test_evaluation_pads_and_logits_are_of_own_tokens() -> None:
    """22 tokens cannot be shared by two ranks, of which each has two of four chunks."""
    for config in (GPT2, NEWER):
        one, model = (GPT(GPTConfig(**config), tp=tp, seed=3, dtype=torch.float64) for tp in (None, context()))
        ids = torch.randint(50, (BATCH, 23), generator=torch.Generator().manual_seed(0))
        inputs, targets = ids[:, :-1], ids[:, 1:]
        with pytest.raises(ValueError, match="seq_length=22 tokens cannot be shared by ranks=2"):
            model(inputs, targets=targets, sample_index=torch.arange(BATCH), step=0)
        one.eval(), model.eval()
        for reduction in ("sum", "mean"):
            assert_same(*(each(inputs, targets=targets, reduction=reduction) for each in (model, one)))
        with pytest.raises(ValueError, match="seq_length=22 tokens cannot be shared by ranks=2"):
            model(inputs)
        own = Positions(BATCH, 12).shared(model.tp.shares_tokens).own_tokens()
        assert_same(model(inputs[:, :12]), one(inputs[:, :12])[:, own])
        with pytest.raises(ValueError, match="a cache on 1 tensor-parallel rank and 2 context-parallel ranks"):
            model(inputs, cache=KVCache())


def layer_results(make: Callable[..., nn.Module], positions: Positions, tp: TensorParallel | None, **more) -> dict:
    """A layer's result, dx and gradients, for this rank's tokens of a batch."""
    layer = make(tp=tp, dtype=torch.float64)
    with torch.no_grad():
        for seed, p in enumerate(layer.parameters()):
            p.copy_(drawn(*p.shape, seed=seed) / 4)
    own = positions.shared(None if tp is None else tp.shares_tokens).own_tokens()
    x, dy = (drawn(BATCH, SEQ, HIDDEN, seed=seed)[:, own] for seed in (1, 2))
    x = x.requires_grad_()
    if "sample_index" in more:
        more = {"dropout_key": DropoutKey(1, 2, more["sample_index"], layer)}
    y = layer(x, positions=positions, **more)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "parameters": gradients(layer, summed=tp is not None)}
    if isinstance(layer, MoE):
        found["load"] = layer.gate.load if tp is None else all_reduce(layer.gate.load, dist.group.WORLD)
    return found


def assert_is_that_of_one_process(make: Callable[..., nn.Module], positions: Positions, **more) -> dict:
    """The results of one process, of which a rank has those of its own tokens."""
    found, whole = (layer_results(make, positions, tp, **more) for tp in (context(), None))
    own = positions.shared(context().shares_tokens).own_tokens()
    assert_same(found, {**whole, "y": whole["y"][:, own], "dx": whole["dx"][:, own]}, make.__name__)
    return whole


def attention(**options) -> SelfAttention:
    return SelfAttention(HIDDEN, 6, n_kv_heads=2, qk_norm=True, rope_base=100.0, sliding_window=6, **options)


def block(**options) -> nn.Module:
    return transformer_block(HIDDEN, n_heads=4, dropout=0.2, **options)


def mixture(**options) -> MoE:
    return MoE(HIDDEN, 4, ffn_hidden_size=8, **options)


class Theirs(nn.Module):
    def forward(self, x: Tensor, positions: Positions | None = None) -> Tensor:
        return x


def foreign(block: nn.Module) -> nn.Module:
    block.self_attn = Theirs()
    return block


def table(**options) -> nn.Module:
    return PositionEmbedding(SEQ, HIDDEN, **options)


@on_every_rank(2, *in_turns([4], first=2))
def test_a_layer_by_itself_is_that_of_one_process() -> None:
    for make in (attention, block, table):
        for ids in (None, documents()):
            more = {"sample_index": torch.tensor([7, 3, 5])} if make is block else {}
            assert_is_that_of_one_process(make, Positions(BATCH, SEQ, ids), **more)


@on_every_rank(2)
def test_padding_is_that_of_one_process() -> None:
    """Runs of padding are documents, which may cross from one rank's tokens to another's. Experts do not count it."""
    padding = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    padding[0, :7], padding[1, 10:] = True, True
    positions = Positions(BATCH, SEQ, key_padding_mask=padding)
    assert_is_that_of_one_process(attention, positions)
    whole = assert_is_that_of_one_process(mixture, positions)
    assert whole["load"].sum() == 2 * padding.logical_not().sum()


@on_every_rank(4)
def test_positions_serve_several_contexts_and_logits_keep_their_order() -> None:
    """On 2 x 2 ranks with sequence shards, of which a sample of 12 tokens and 4 ranks' shards would need padding."""
    mesh = build_mesh("cpu", tensor_parallel=2, context_parallel=2)
    whole, axes = Positions(1, SEQ), [Context.of(mesh.get_group(axis)) for axis in ("cp", "tp")]
    for context_of in (*axes, *axes):
        assert whole.shared(context_of).context == context_of
        own = whole.shared(context_of).flat_ids(torch.device("cpu"))
        assert_identical(own, whole.shared(context_of).own_tokens())
    copy = deepcopy(whole)
    assert_identical(copy.shared(axes[0]).own_tokens(), whole.shared(axes[0]).own_tokens())
    model = GPT(GPTConfig(**NEWER), tp=TensorParallel(mesh["tp"], True, context=mesh["cp"]), dtype=torch.float64).eval()
    ids = torch.zeros(1, 12, dtype=torch.int64)
    assert model(ids).shape[1] == 6
    nothing = torch.full_like(ids, -100)
    loss = model(ids, targets=nothing, reduction="mean")
    loss.backward()
    assert loss.isnan() and not any(p.grad.to_local().any() for p in model.parameters())
    with pytest.raises(ValueError, match="1 samples of 12 tokens cannot be shared by .* a multiple of 8"):
        four = TensorParallel(build_mesh("cpu", tensor_parallel=4)["tp"], True, context=mesh["cp"])
        GPT(GPTConfig(**{**NEWER, "n_heads": 4, "n_kv_heads": 4}), tp=four, dtype=torch.float64).eval()(ids)


@on_every_rank(2)
def test_what_context_parallel_layers_refuse() -> None:
    tp, size = context(), dist.get_world_size()
    layer, x = attention(tp=tp), torch.zeros(BATCH, SEQ, HIDDEN)
    own = x[:, : SEQ // size]
    one = attention()
    for words, call in (
        (r"\(3, 12, 24\) on 2 context-parallel ranks does not tell whether it is a rank's tokens", lambda: layer(own)),
        (r"Positions\(batch=3, seq_length=12\), the own part of 24 tokens: give \(3, 12, hidden\)",
         lambda: layer(x, positions=Positions(BATCH, SEQ))),
        ("offset=3 on 2 context-parallel ranks", lambda: layer(own, positions=Positions(BATCH, SEQ, offset=3))),
        ("seq_length=14 tokens cannot be shared by ranks=2", lambda: layer(own, positions=Positions(BATCH, 14))),
        ("is_causal=False on 1 tensor-parallel rank and 2", lambda: SelfAttention(HIDDEN, 6, is_causal=False, tp=tp)),
        ("dropout=0.2 in training on 2 context-parallel ranks needs",
         lambda: block(tp=tp)(own, positions=Positions(BATCH, SEQ))),
        ("self_attn is a Theirs, which would attend to the tokens of one of 2 context-parallel ranks alone",
         lambda: foreign(block(tp=tp).eval())(own, positions=Positions(BATCH, SEQ))),
        ("positions of rank . of 2 context-parallel ranks for other ranks, 3 of them",
         lambda: Positions(BATCH, SEQ).shared(tp.shares_tokens).shared(tp.shares_tokens._replace(size=3))),
        ("positions of one of 2 context-parallel ranks for a layer on 1 tensor-parallel rank",
         lambda: one(own, positions=Positions(BATCH, SEQ).shared(tp.shares_tokens))),
        ("cannot be part of a", lambda: setattr(block(tp=tp), "attention", one)),
        (r"the mesh has 2 axes \(dp_shard, cp\) and layers lie on one: give that axis, as mesh\['cp'\]",
         lambda: TensorParallel(context=build_mesh("cpu", tensor_parallel=1, context_parallel=2)["dp_shard", "cp"])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="context=3, a int: give a 1-D DeviceMesh or None"):
        TensorParallel(context=3)  # type: ignore[arg-type]


@of_turn(0)
@on_every_rank(2)
def test_a_compiled_block_is_the_block() -> None:
    """Attention is called as it is between what is compiled."""
    tp, positions = context(), Positions(BATCH, SEQ, documents())
    layer, own = block(tp=tp).eval(), positions.shared(tp.shares_tokens)
    x = drawn(BATCH, SEQ, HIDDEN).float()[:, own.own_tokens()].requires_grad_()
    found = []
    for each in (layer, torch.compile(layer, backend="eager")):
        y = each(x, positions=own)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    assert_identical(*found)


@on_every_rank(2)
def test_one_rank_of_context_is_none() -> None:
    """A mesh's axis of one rank changes nothing, and costs nothing."""
    mesh = build_mesh("cpu", tensor_parallel=2)
    tp = TensorParallel(context=mesh["cp"])
    assert tp.shares_tokens is None and Positions(1, 3).shared(tp.shares_tokens).context is None
    x = drawn(BATCH, SEQ, HIDDEN)
    torch.manual_seed(0)
    one = attention(dtype=torch.float64)
    torch.manual_seed(0)
    assert_identical(attention(tp=tp, dtype=torch.float64)(x), one(x))
