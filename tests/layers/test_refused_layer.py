"""What a layer cannot do is refused, with the numbers and the remedy. Refusals that are part of a longer story (of
checkpoints, routers, heads, packing) are beside it."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import test_moe_layer as moe
import torch
from kept import kept
from steps import tp_mesh
from test_block_layer import make_block
from testing import on_every_rank
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tpformer import layers, ops
from tpformer.config import check_heads
from tpformer.layers import (
    ColumnParallelLinear,
    Positions,
    SelfAttention,
    TensorParallel,
    TransformerBlock,
    keep,
    transformer_block,
)
from tpformer.models import GPT, GPTConfig

REAL, NORM = torch.zeros(1, 3, dtype=torch.bool), ops.Norm("rmsnorm", torch.ones(4), None, 1e-5)
CONFIG = GPTConfig(vocab_size=9, seq_length=4, n_layers=1, hidden_size=8, n_heads=2, dropout=0.5)


def loss_in_chunks_of(tokens: int) -> None:
    head = layers.LMHead(30, 8)
    head.chunk_tokens = tokens
    head(torch.ones(3, 8), targets=torch.zeros(3, dtype=torch.long))


def untied(tied: torch.Tensor | None) -> None:
    layers.LMHead(50, 8, vocab_multiple=64, weight=False)(torch.randn(4, 8), tied=tied)


def embedded(*ids: int) -> None:
    """The table has a row 19, but it is padding."""
    layers.VocabParallelEmbedding(19, 6, vocab_multiple=22)(torch.tensor(ids))


def dropped(sample_index: tuple[int, ...], of_another: bool) -> None:
    block = make_block("gelu-layernorm", dropout=0.5)
    key = layers.DropoutKey(0, 1, torch.tensor(sample_index), transformer_block(8, 2) if of_another else block)
    block(torch.zeros(2, 3, 24, dtype=torch.float64), dropout_key=key)


def with_layer(layer: nn.Module) -> GPT:
    model = GPT(CONFIG)
    model.layers["0"] = layer
    return model


def with_norm_of_6(kind: str, path: str) -> None:
    """Without weights, whose shapes would not fit; in a pass that a linear makes."""
    experts = {"activation": "swiglu", "moe": {"n_experts": 2, "ffn_hidden_size": 4}} if kind == "moe" else {}
    model = GPT(CONFIG).eval() if kind == "gpt" else transformer_block(8, 2, **experts)
    setattr(model, path, layers.LayerNorm(6, elementwise_affine=False))
    model(torch.zeros(1, 4).long() if kind == "gpt" else torch.zeros(1, 4, 8))


def balanced(x: torch.Tensor, positions: Positions | None = None) -> None:
    with layers.balance_losses():
        moe.make_moe("balance")(x, positions)


def routed_by_own_rows() -> None:
    routing = ops.Routing(torch.zeros(6, 2).long(), torch.ones(6, 2).double())
    moe.make_moe("softmax", tp_mesh()).experts(torch.zeros(6, moe.HIDDEN).double(), routing)


# shapes of x without its features, and (batch, seq_length) of its positions
OF_OTHERS = [((2, 8), (4, 4)), ((4, 2), (2, 4)), ((1, 8), (2, 4)), ((7,), (2, 4)), ((4, 4), (1, 8)),
             ((2, 2, 3), (2, 4)), ((), (2, 4))]  # fmt: skip
Refusal = tuple[Callable[[], object], str]
REFUSED: list[Refusal] = [
    (lambda: check_heads(12, 6, 4, 1, rope=True), "n_heads=6 is not a multiple of n_kv_heads=4: change either"),
    (lambda: check_heads(48, 12, 12, 5, rope=True), r"n_heads=12 .* tensor_parallel=5 .*from \[1, 2, 3, 4, 6, 12\]"),
    (lambda: check_heads(12, 0, 4, 1, rope=True), "n_heads=0 must be at least 1"),
    (lambda: check_heads(12, 4, -2, 1, rope=True), "n_kv_heads=-2 must be at least 1"),
    (lambda: check_heads(0, 4, 4, 1, rope=True), "hidden_size=0 must be at least 1"),
    (lambda: check_heads(10, 4, 4, 3, rope=True),
     "hidden_size=10 is not .* of n_heads=4: change either, or give head_dim"),
    (lambda: check_heads(12, 4, 4, 1, rope=True), "RoPE needs an even head dim, not hidden_size / n_heads = 3"),
    (lambda: transformer_block(8, 2, n_kv_heads=0), "n_kv_heads=0 must be at least 1"),
    (lambda: SelfAttention(8, 2, rope_scaling=layers.RopeScaling(8.0, 1.0, 4.0, 32)), "without rope_base would scale"),
    (lambda: SelfAttention(8, 2, rope_scaling=layers.RopeScaling(8.0, 4.0, 1.0, 32)), "rope_low_frequency=4.0 must be"),
    (lambda: SelfAttention(8, 2, rope_base=0.0), "rope_base=0.0: .*give a number above 0"),
    (lambda: transformer_block(8, 2, sliding_window=0), "it has at least 1 token, the query itself"),
    (lambda: transformer_block(8, 2, sliding_window=4, is_causal=False), "it has at least 1 token, the query itself"),
    (lambda: transformer_block(8, 2, norm="batchnorm"), "norm='batchnorm': choose one of layernorm, rmsnorm"),
    (lambda: layers.MLP(8, activation="relu"), "'relu': choose one of gelu, gelu_tanh, swiglu, geglu, relu2"),
    (lambda: kept(transformer_block, 8, 2, recompute="some"), "recompute='some': choose one of none, mlp, full"),
    (lambda: TensorParallel(transport="magic"), "transport='magic': choose one of auto, sequential"),
    *((lambda dtype=dtype: kept(transformer_block, 8, 2, pack_activations=True)(torch.ones(1, 4, 8, dtype=dtype)),
       "only bfloat16 has an exponent of 8 bits") for dtype in (torch.float16, torch.float32, torch.float64)),
    (lambda: kept(GPT, CONFIG, pack_activations=True, pack_layers="7"), "'7' selects none of the 1 layers"),
    (lambda: kept(GPT, CONFIG, pack_layers="0"), "pack_activations is false"),
    (lambda: keep(torch.nn.Linear(2, 2)), "Linear contains no TransformerBlock: give a model that does"),
    (lambda: keep(nn.Sequential(GPT(CONFIG)), recompute="mlp"), "Sequential has a GPT in it, at '0': give that one"),
    (lambda: keep(with_layer(nn.Identity()), recompute="mlp"), "layer 0 is a Identity, which is no TransformerBlock: "),
    (lambda: kept(transformer_block, 8, 2, recompute="full", recompute_interval=2), "only a GPT runs its layers"),
    (lambda: kept(transformer_block, 8, 2, offload_activations=True), "ops.Offload around each"),
    (lambda: kept(transformer_block, 8, 2, recompute="mlp", recompute_layers="1"), "'1' selects none of the 1 layers"),
    (torch.autocast("cpu")(lambda: ops.row_linear(*torch.ones(2, 4, 4), next_norm=NORM)),
     "next_norm would be made in autocast's dtype: call ops"),
    (lambda: ColumnParallelLinear(0, 4), "in_features=0 must be at least 1"),
    (lambda: layers.RowParallelLinear(-1, 4), "in_features=-1 must be at least 1"),
    (lambda: layers.RowParallelLinear(4, 0), "out_features=0 must be at least 1"),
    (lambda: layers.MLP(8, ffn_hidden_size=0), "out_features=0 must be at least 1"),
    (lambda: layers.LayerNorm((4, 7)), r"normalized_shape=\(4, 7\): norms are over the last dim alone"),
    (lambda: layers.RMSNorm(7, -1e-5), "eps=-1e-05 is added under a root"),
    (lambda: layers.LayerNorm(7, elementwise_affine=False)(torch.ones(6)), "x has 6 features, but the norm is over 7"),
    *((lambda model=model, path=path: with_norm_of_6(model, path), "x has 8 features, but the norm is over 6")
      for model, path in product(("block", "moe"), ("input_layernorm", "post_attention_layernorm"))),
    (lambda: with_norm_of_6("gpt", "norm"), "x has 8 features, but the norm is over 6"),
    (lambda: layers.VocabParallelEmbedding(0, 8), "vocab_size=0 must be at least"),
    (lambda: layers.VocabParallelEmbedding(19, 6, 19), r"padding_idx=19 is outside the vocabulary \[0, 18\]"),
    (lambda: embedded(3, 19), r"token ids span \[3, 19\], outside the vocabulary \[0, 18\]"),
    (lambda: embedded(-1, 4), r"token ids span \[-1, 4\], outside the vocabulary \[0, 18\]"),
    (lambda: layers.LMHead(30, 8, vocab_multiple=0), "vocab_multiple=0 must be at least 1"),
    (lambda: loss_in_chunks_of(0), "chunk_tokens=0: at least 1"),
    (lambda: untied(None), r"no table of its own \(weight=False\): give each call one"),
    (lambda: untied(torch.ones(32, 8)), r"table is a Tensor \(32, 8\), but has to be this rank's plain \(64, 8\)"),
    (lambda: untied(torch.ones(64, 4)), r"the output table is a Tensor \(64, 4\), but has to be"),
    (lambda: layers.LMHead(50, 8)(torch.ones(2, 3, 8), targets=torch.ones(3, 2).long()), r"targets are \(3, 2\)"),
    (lambda: layers.PositionEmbedding(-2, 8), "seq_length=-2 must be at least 1"),
    (lambda: Positions(2, 3, offset=-1), "batch=2, seq_length=3, offset=-1: none may be negative"),
    *((lambda ids=ids: Positions(1, 3, torch.tensor([ids])), "start at 0 in every sample and count up by 1")
      for ids in ([1, 2, 3], [0, 2, 3], [0, 1, 1])),
    (lambda: Positions(1, 3, key_padding_mask=torch.tensor([[False, True, False]])),
     "padding between real tokens of a sample: move"),
    (lambda: Positions(1, 3, key_padding_mask=REAL.float()), r"is \(1, 3\) torch.float32: give .* = \(1, 3\) bool"),
    (lambda: Positions(1, 3, key_padding_mask=REAL[:, :2]), r"is \(1, 2\) torch.bool: give .* = \(1, 3\) bool"),
    (lambda: Positions(1, 3, key_padding_mask=REAL, offset=1), "offset=1 is where whole samples begin"),
    (lambda: Positions(1, 3, key_padding_mask=REAL, ids=torch.arange(3)[None]),
     "beside ids: let ids restart at 0 where padding"),
    (lambda: SelfAttention(8, 2)(torch.zeros(1, 3, 8), positions=Positions(1, 3), key_padding_mask=REAL),
     r"beside positions: give it once, as Positions\(..., key_padding_mask=...\)"),
    (lambda: layers.PositionEmbedding(7, 6)(torch.zeros(8, 6), Positions(2, 4, offset=4)),
     "positions up to 7, but this PositionEmbedding has 7 .* seq_length=8"),
    (lambda: make_block("gelu-layernorm")(torch.zeros(12, 24).double()),
     r"x of shape \(12, 24\).*pass positions=Positions\(batch, seq_length\)"),
    (lambda: GPT(CONFIG)(torch.zeros(2, 4).long(), position_ids=torch.arange(3).repeat(2, 1)),
     r"position ids of shape \(2, 3\) are not \(batch, seq_length\) = \(2, 4\)"),
    (lambda: balanced(moe.inputs()[0], Positions(moe.SEQ, moe.BATCH)), "that are not those of Positions"),
    (lambda: balanced(moe.inputs()[0].flatten(0, 1)), "rows do not tell them"),
    (lambda: moe.make_moe("balance")(moe.inputs()[0]), "would be lost: run the forward in `with balance_losses"),
    (lambda: dropped((1, 2), True), "this TransformerBlock is not in the TransformerBlock that its DropoutKey got"),
    (lambda: dropped((1, 2, 3), False), r"sample_index of shape \(3,\) for a batch of 2 samples"),
    *((lambda kind=kind, shape=shape, of=of: kind(8, 2)(torch.zeros(*shape, 8), positions=Positions(*of)),
       rf"has {math.prod(shape)} rows that are not those of Positions\(batch={of[0]}, seq_length={of[1]}\): give")
      for kind, (shape, of) in product((SelfAttention, transformer_block), OF_OTHERS)),
]  # fmt: skip


@pytest.mark.parametrize("call, words", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("make, module, error, words", [
    (ColumnParallelLinear.from_linear, weight_norm(nn.Linear(2, 2)), TypeError, "a Parametrized.* does not compute"),
    (layers.RowParallelLinear.from_linear, nn.Bilinear(2, 2, 2), TypeError, "an unchanged nn.Linear"),
    (layers.LayerNorm.from_norm, nn.RMSNorm(2), TypeError, "an unchanged nn.LayerNorm"),
    (layers.LayerNorm.from_norm, nn.LayerNorm((2, 2)), ValueError, "over the last dim alone"),
    (layers.VocabParallelEmbedding.from_embedding, nn.Embedding(2, 2, max_norm=1.0), ValueError, "max_norm"),
])  # fmt: skip
def test_modules_that_compute_something_else_are_not_taken(make, module, error, words):
    with pytest.raises(error, match=words):
        make(module)


def column(k: int = 8, n: int = 12, **options) -> ColumnParallelLinear:
    return ColumnParallelLinear(k, n, tp=tp_mesh(), **options)


def row(sequence_parallel: bool = False, k: int = 12, n: int = 8, **options) -> layers.RowParallelLinear:
    return layers.RowParallelLinear(k, n, tp=TensorParallel(tp_mesh(), sequence_parallel), **options)


def with_child(child: nn.Module) -> None:
    block = make_block("gelu-layernorm", tp_mesh())
    block.self_attn.q_proj = child.double()
    block(torch.zeros(2, 6, 24).double())


NEEDED = "dropout=0.5 in training on 2 tensor-parallel ranks needs {}: drawn from each"
ON_TWO_RANKS: list[Refusal] = [
    (lambda: row(True, sequence_dim=1)(torch.zeros(2, 5, 6)),
     r"\(2, 5, 6\) has 5 along sequence_dim=1, which 2 .* ranks cannot share"),
    (lambda: row(True, sequence_dim=1)(torch.zeros(4, 6)),
     r"sequence_dim=1 is the dim of the features in x of shape \(4, 6\)"),
    (lambda: TransformerBlock(SelfAttention(8, 2, tp=tp_mesh()), layers.MLP(8), layers.RMSNorm(8), layers.RMSNorm(8)),
     "a RMSNorm on 1 tensor-parallel rank cannot be part of a TransformerBlock on 2 .* the same tp"),
    (lambda: column(n=1), "weight has 1 rows on its sharded dim, too few for 2"),
    (lambda: column()(torch.ones(2, 4)),
     "x has 4 features, but every rank needs all in_features=8: .* give it gather_output=True"),
    (lambda: row()(torch.ones(2, 12)), "x has 12 features, .* of in_features=12 has 6: set input_is_paral"),
    (lambda: row(input_is_parallel=False)(torch.ones(2, 6)),
     "x has 6 features, .* of in_features=12 has 6: set input_is_paral"),
    (lambda: column(gather_output=True, used_rows=slice(0, 3)), "gather_output=True with used_rows"),
    (lambda: SelfAttention(8, 2, tp=TensorParallel(tp_mesh(), True))(torch.zeros(8, 8), positions=Positions(2, 4)),
     r"has 8 rows .*give .*\(8 / 2, hidden\).* to each of 2 tensor-parallel ranks"),
    (lambda: with_child(nn.Sequential(nn.Dropout(0.1), nn.Linear(24, 24))),
     r"Sequential draws dropout \(p=0.1\) from this rank's generator, and other ranks would"),
    (lambda: with_child(nn.Linear(24, 12)), "Linear computes 12 features of 24: a module that is not built"),
    (routed_by_own_rows, "a routing of 6 tokens for x with 6 rows on each of 2 ranks: give"),
    (lambda: layers.explain(ColumnParallelLinear(4, 4, tp=TensorParallel(tp_mesh(), transport="fused")), 8),
     "fused needs a CUDA device with NVLink"),
    (lambda: make_block("gelu-layernorm", tp_mesh(), dropout=0.5)(torch.zeros(6, 24), positions=Positions(2, 6)),
     NEEDED.format(r"dropout_key=DropoutKey\(seed, step, sample_index, model\)")),
    (lambda: GPT(CONFIG, tp=tp_mesh())(torch.zeros(2, 4).long()), NEEDED.format("sample_index and step")),
]  # fmt: skip


@on_every_rank(2)
def test_what_cannot_be_on_two_ranks_is_refused() -> None:
    for call, words in ON_TWO_RANKS:
        with pytest.raises(ValueError, match=words):
            call()
