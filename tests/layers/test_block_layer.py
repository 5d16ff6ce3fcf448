"""TransformerBlock equals a block of torch's modules in float64 with every gradient: on one rank and on several, on
whole samples and on sequence shards, with any attention, padding, recomputation and dropout. It runs the collectives
that are promised. With dropout it has the plain block's gradients in lower precision, too, and their bits do not depend
on what it recomputes. SelfAttention takes norms and key projections of other people.

tests/planner/test_rank_memory.py counts what a mode of recomputation keeps.
"""

from functools import cache
from itertools import product
from typing import NamedTuple

import habits
import pytest
import theirs
import torch
from steps import Results, assert_ranks_have, draw, each_case, gradients, joined, own, step, with_keys_in_one
from testing import assert_identical, assert_kernel_close, assert_same
from torch import Tensor, nn
from turns import in_turns, of_turn

from tpformer import layers, ops
from tpformer.config import RECOMPUTE
from tpformer.distributed import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.kernels.dropout.reference import dropout_apply
from tpformer.kernels.philox.reference import philox_key
from tpformer.layers import ColumnParallelLinear, Positions, RMSNorm, SelfAttention, TensorParallel, TransformerBlock
from tpformer.layers.keep_block import Keep
from tpformer.planner.storages import Saved

BATCH, SEQ, HIDDEN, HEADS = 2, 6, 24, 6
GATED = {"activation": "swiglu", "ffn_hidden_size": 36}
KINDS = {
    "gelu-layernorm": {},
    "gelu-erf": {"activation": "gelu"},
    "swiglu-rmsnorm-rope-gqa": {**GATED, "norm": "rmsnorm", "rope_base": 10000.0, "n_kv_heads": 3, "bias": False},
    "geglu": {**GATED, "activation": "geglu"},
    # with 2 or 3 ranks every rank holds the one key-value head
    "mqa": {"n_kv_heads": 1, "rope_base": 500.0},
    # With 3 ranks every rank holds both key-value heads and uses one or two of them. One frequency stays, one is
    # between, one is divided
    "qk-norm-head-dim-scaling": {
        **GATED, "qk_norm": True, "head_dim": 6, "n_kv_heads": 2, "norm": "rmsnorm", "bias": False, "rope_base": 100.0,
        "rope_scaling": layers.RopeScaling(8.0, 1.0, 4.0, 32),
    },
    "qkv-bias-qk-norm-mqa": {"qk_norm": True, "n_kv_heads": 1, "bias": False, "qkv_bias": True, "rope_base": 500.0},
    "no-qkv-bias": {"qkv_bias": False, "head_dim": 2},
    "relu2-rope-interleaved": {"activation": "relu2", "rope_base": 500.0, "rope_interleaved": True},
}  # fmt: skip
SEED, STEP, INDEX = 3, 7, torch.tensor([11, 4])
P = 0.1
DTYPES = (torch.float32, torch.bfloat16)
DROPOUT_KINDS = ["gelu-layernorm", "qk-norm-head-dim-scaling"]
D = 4
ROW, COLUMN = torch.arange(SEQ)[:, None], torch.arange(SEQ)
# name -> (options of a block, whether a query sees a key)
ATTENTION = {
    "causal": ({}, COLUMN <= ROW),
    "bidirectional": ({"is_causal": False}, COLUMN >= 0),
    "window": ({"sliding_window": 2}, (COLUMN <= ROW) & (COLUMN > ROW - 2)),
    "window of one": ({"sliding_window": 1}, COLUMN == ROW),
    "window of all": ({"sliding_window": SEQ}, COLUMN <= ROW),
}
# the document that each token is in; padding is in document -1
SAMPLES = {
    "not told": [[0] * SEQ] * BATCH,
    "whole": [[0] * SEQ] * BATCH,
    "documents": [[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]],
    "left padding": [[-1, -1, 0, 0, 0, 0], [0] * SEQ],
    "right padding": [[0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, -1]],
    "padding around": [[-1, 0, 0, 0, -1, -1], [-1] * SEQ],
}
IDS = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]])  # the positions in "documents"
# every rank has its own key heads, or the one key head, or one rank has two that others have, too
FOREIGN = {2: [(4, 2, True), *product([4], [1], (True, False), ("", "hooked", "gathered"))], 3: [(6, 2, False)]}


def make_block(kind: str, mesh=None, sequence_parallel: bool = True, **options) -> TransformerBlock:
    """A block with norms and biases off 1 and 0, so that every term shows."""
    return habits.block(HEADS, KINDS[kind], TensorParallel(mesh, sequence_parallel), **options)


def inputs(seed: int = 1) -> list[Tensor]:
    return draw(*[(BATCH, SEQ, HIDDEN)] * 2, seed=seed)


def key(block: TransformerBlock) -> layers.DropoutKey:
    return layers.DropoutKey(SEED, STEP, INDEX, block)


def masks(p: float) -> list[Tensor]:
    """The dropout of both branches as factors, drawn here from the definition."""
    start = (INDEX[:, None] * SEQ + torch.arange(SEQ)).flatten() * HIDDEN
    ones = torch.ones(BATCH * SEQ, HIDDEN, dtype=torch.float64)
    sites = [dropout_apply(ones, start, philox_key(SEED, STEP, SEQ, "", name), p) for name in ("attention", "mlp")]
    return [site.view(BATCH, SEQ, HIDDEN) for site in sites]


class Case(NamedTuple):
    """A block, and what it gets. dim: along which x (batch, seq, hidden) is sharded; None if it is not."""

    kind: str
    dim: int | None = 1
    attention: str = "causal"
    samples: str = "not told"
    recompute: str = "none"
    dropout: float = 0.0

    @property
    def arguments(self) -> dict:
        """What the block is told of its samples."""
        if "padding" in self.samples:
            return {"key_padding_mask": torch.tensor(SAMPLES[self.samples]) < 0}
        return {"documents": {"ids": IDS}}.get(self.samples, {})

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the gradient of the result (zero at padding, which nobody reads) and the document of each token."""
        x, dy = inputs()
        document = torch.tensor(SAMPLES[self.samples])
        return x, dy * (document >= 0)[..., None], document


@cache
def expected(case: Case) -> Results:
    x, dy, document = case.inputs()
    same = (document[:, :, None] == document[:, None]) & (document >= 0)[:, None] | torch.eye(SEQ).bool()
    options = {"masks": masks(case.dropout)} if case.dropout else {}
    visible = same & ATTENTION[case.attention][1]
    return step(theirs.Block(HIDDEN, HEADS, **KINDS[case.kind]), x, dy, visible=visible, **options)


def on_rank(mesh, *fields) -> tuple[Results, list, list]:
    case = Case(*fields)
    options = {"dropout": case.dropout, "recompute": case.recompute} | ATTENTION[case.attention][0]
    block = make_block(case.kind, mesh, case.dim is not None, **options)
    arguments, told = case.arguments, case.samples != "not told"
    if told and (mesh.size() > 1 or "key_padding_mask" not in arguments):  # on one rank the block itself takes a mask
        arguments = {"positions": Positions(BATCH, SEQ, **arguments)}
    x, dy = (own(z, case.dim) for z in case.inputs()[:2])
    x.requires_grad_()
    with record_collectives() as forward:
        y = block(x, dropout_key=key(block), **arguments)
    with record_collectives() as backward:
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(block), list(forward), list(backward)


TWO = ("gelu-erf", "qk-norm-head-dim-scaling")
EVERY = [Case(kind, dim) for kind in KINDS for dim in (1, None)]
SEEN = [
    Case(TWO[(i + j) % 2], 1, how, told) for (i, how), (j, told) in product(enumerate(ATTENTION), enumerate(SAMPLES))
]
DROPPED = [Case(each, 1, "causal", *case, 0.5) for each, *case in product(TWO, list(SAMPLES)[:3], RECOMPUTE)]
SLICES_OF_TOKENS = [Case(TWO[1], 0, samples=samples) for samples in ("whole", "documents")]


# On two ranks each attention and each kind of samples once, on one with each other. On three heads are shared unevenly.
@pytest.mark.parametrize("t, cases", [
    (1, [*EVERY, *SEEN]), (2, [*EVERY, *SEEN[::5], *DROPPED[::4], *SLICES_OF_TOKENS]),
    *in_turns([(2, DROPPED), (3, [*EVERY[::2], *DROPPED[::5]])], first=5),
])  # fmt: skip
def test_equals_plain_block(ranks, t, cases):
    nbytes = BATCH * SEQ * HIDDEN * 8
    for case, by_rank in each_case(ranks, t, on_rank, cases):
        real = torch.tensor(SAMPLES[case.samples]) >= 0
        found = [result for result, *_ in by_rank]
        for each in found if case.dim is None else joined(found, case.dim):
            wanted = expected(case)
            assert_same(each | {"y": each["y"][real]}, wanted | {"y": wanted["y"][real]}, f"{case} on {t}")
        # Column inputs are gathered once more, for the weight gradients. A recomputation repeats its gathers, and of
        # the reductions the one whose result is read
        gathers, scatters = {"none": (4, 2), "mlp": (5, 2), "full": (6, 3)}[case.recompute]
        gather, scatter, reduce = ((name, nbytes) for name in ("all_gather", "reduce_scatter", "all_reduce"))
        wanted = ([gather, scatter] * 2, [gather] * gathers + [scatter] * scatters)
        for _, forward, backward in by_rank if t > 1 else ():
            assert (forward, sorted(backward)) == (wanted if case.dim is not None else ([reduce] * 2,) * 2), case


def alone(mesh, kind: str) -> Results:
    torch.manual_seed(0)
    place: dict = {"tp": TensorParallel(mesh, True), "dtype": torch.float64}
    x, dy = (own(z, 1) for z in inputs())
    if kind == "attention":
        return step(layers.SelfAttention(HIDDEN, HEADS, rope_base=50.0, **place), x, dy)
    if kind == "mlp":
        return step(layers.MLP(HIDDEN, **place), x, dy)
    positions = Positions(BATCH, SEQ, IDS if kind == "documents" else None)
    return step(layers.PositionEmbedding(SEQ, HIDDEN, **place), x, dy, positions=positions)


def foreign(mesh, parallel: bool, recompute: str) -> Results:
    """An attention that somebody else made of linears, which may be parallel ones."""
    module = make_block("gelu-layernorm", mesh, recompute=recompute)
    torch.manual_seed(1)
    module.self_attn = attention = theirs.Attention(HIDDEN, 4).double()
    for name, linear in [*attention.named_children()] if parallel else ():
        kind = layers.RowParallelLinear if name == "o_proj" else layers.ColumnParallelLinear
        setattr(attention, name, kind.from_linear(linear, tp=module.tp))
    return step(module, *(own(z, 1) for z in inputs()), positions=Positions(BATCH, SEQ))


@pytest.mark.parametrize("function, cases", [
    (alone, [("attention",), ("mlp",), ("positions",), ("documents",)]),
    (foreign, [(True, "none")]), *in_turns([(foreign, [*product((True, False), RECOMPUTE)])]),
])  # fmt: skip
def test_a_layer_alone_and_an_attention_of_other_people_on_shards_equal_the_whole(ranks, function, cases):
    wanted = [expected for _, (expected,) in each_case(ranks, 1, function, cases)]
    for t in (2, 3) if function is alone else (2,):
        for (case, found), expected in zip(each_case(ranks, t, function, cases), wanted, strict=True):
            assert_ranks_have(found, expected, 1, f"{case} on {t}")


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_are_no_error(shape):
    mask, block = torch.zeros(shape, dtype=torch.bool), make_block("mqa")
    x = torch.zeros(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    for y in (block(x), block(x, key_padding_mask=mask)):
        assert y.shape == x.shape
        y.sum().backward()


def of_seeds(block: nn.Module, dtype: torch.dtype, dim: int | None = None, **options) -> Results:
    """Results of several inputs, which float32 holds: the largest error in one block is luck, in eight far less so."""
    found = []
    for seed in range(8):
        block.zero_grad()
        x, dy = (own(z.float().to(dtype), dim) for z in inputs(seed))
        found.append(with_keys_in_one(step(block, x, dy, **options)))
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


@cache
def by_plain(kind: str, dtype: torch.dtype) -> Results:
    block = theirs.Block(HIDDEN, HEADS, **KINDS[kind]).float().to(dtype)
    return of_seeds(block, dtype, masks=[each.to(dtype) for each in masks(P)])


def with_dropout(mesh, kind: str, dtype: torch.dtype) -> Results:
    block = make_block(kind, mesh, dropout=P, dtype=torch.float32).to(dtype)
    return of_seeds(block, dtype, 1, dropout_key=key(block))


@pytest.mark.parametrize("t", [2, *in_turns([1], first=1)])
def test_gradients_are_the_plain_blocks(ranks, t):
    """Without recomputation; test_bits_do_not_depend_on_the_mode says the same of the other modes."""
    for (kind, dtype), found in each_case(ranks, t, with_dropout, product(DROPOUT_KINDS, DTYPES)):
        oracle, baseline = by_plain(kind, torch.float64), by_plain(kind, dtype)
        whole = found[0] | {name: torch.cat([each[name] for each in found], 2) for name in ("y", "dx")}
        for name, x in oracle.items():
            assert_kernel_close(whole[name], x, baseline[name], f"{kind} t={t} {dtype} {name}")


def in_mode(mesh, kind: str, dtype: torch.dtype, recompute: str) -> Results:
    block = make_block(kind, mesh, dropout=P, recompute=recompute, dtype=dtype)
    rows = (own(z.float().to(dtype).flatten(0, 1)) for z in inputs())
    return step(block, *rows, positions=Positions(BATCH, SEQ), dropout_key=key(block))


@pytest.mark.parametrize("t", [2, *in_turns([1], first=2)])
def test_bits_do_not_depend_on_the_mode(ranks, t):
    assert RECOMPUTE[0] == "none"
    expected: dict = {}
    for case, found in each_case(ranks, t, in_mode, product(DROPOUT_KINDS, DTYPES, RECOMPUTE)):
        assert_identical(found, expected.setdefault(case[:2], found), f"{case}")


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_without_gradients_nothing_is_kept_and_a_kept_graph_has_several_backwards(recompute):
    block, (x, dy) = make_block(DROPOUT_KINDS[0], recompute=recompute), inputs()
    with torch.no_grad(), Saved().recording() as saved:
        assert torch.equal(block(x), make_block(DROPOUT_KINDS[0])(x))
    assert saved.total() == 0
    y = block(x.requires_grad_())
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_regions_inside_regions():
    """A recomputed block computes its result where it is read: by the next block, or by a caller without gradients."""
    (x, dy), found, teacher = inputs(), [], make_block(DROPOUT_KINDS[1], recompute="mlp")
    teach = torch.no_grad()(lambda z: teacher(z))
    for outer in (lambda region, x: region(x), ops.recompute):
        first, second = (make_block(DROPOUT_KINDS[0], recompute="full") for _ in range(2))
        rows = x.clone().requires_grad_()
        outer(lambda z, a=first, b=second: b(a(z)) * teach(z), rows).backward(dy)
        found.append([rows.grad, *(p.grad for block in (first, second) for p in block.parameters())])
    assert_identical(*found)


def normed(heads: int, kv_heads: int, tp=None) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(heads * D, heads, n_kv_heads=kv_heads, qk_norm=True, tp=tp, dtype=torch.float64)
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.constant_(norm.weight, 1.5)
    return layer


def foreign_children(mesh, heads: int, kv_heads: int, sequence_parallel: bool, keys: str = "") -> Results:
    """Gradients with norms of torch.nn, which every rank runs for all heads, and with a key projection that is called
    as a module, and may gather all heads; and what refuses a norm of rows."""
    tp, dim = TensorParallel(mesh, sequence_parallel), 0 if sequence_parallel else None
    layer = normed(heads, kv_heads, tp)
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, norm := nn.RMSNorm(D, eps=1e-5, dtype=torch.float64))
        nn.init.constant_(norm.weight, 1.5)
    if keys == "gathered":
        values = {name: full_tensor(p.detach()) for name, p in layer.k_proj.named_parameters()}
        layer.k_proj = ColumnParallelLinear(heads * D, kv_heads * D, gather_output=True, tp=tp, dtype=torch.float64)
        habits.fill(layer.k_proj, values)
    if keys:
        layer.k_proj.register_forward_hook(lambda *_: None)
    x, dy = (own(z, dim) for z in draw(*[(BATCH, SEQ, heads * D)] * 2))
    found = step(layer, x, dy, positions=Positions(BATCH, SEQ))
    layer.k_norm = RMSNorm(D, tp=tp, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"RMSNorm norms one rank's heads of {mesh.size()}: build it with of_heads=Tr"):
        layer(x, positions=Positions(BATCH, SEQ))
    return found


@pytest.mark.parametrize("t", FOREIGN)
def test_norms_of_torch_see_every_head_once(ranks, t):
    for case, found in each_case(ranks, t, foreign_children, FOREIGN[t]):
        wanted = step(normed(*case[:2]), *draw(*[(BATCH, SEQ, case[0] * D)] * 2))
        assert_ranks_have(found, wanted, 0 if case[2] else None, f"{case}")


def test_a_block_is_composed_of_parts() -> None:
    """Of the same parts it is what transformer_block makes; parts of another kind are called."""
    made = make_block(DROPOUT_KINDS[0], dropout=P)
    parts = made.self_attn, made.mlp, made.input_layernorm, made.post_attention_layernorm
    composed, (x, dy) = TransformerBlock(*parts, dropout=P), inputs()
    assert list(composed.state_dict()) == list(made.state_dict())
    found = [each(x, dropout_key=key(each)) for each in (made, composed)]
    assert torch.equal(*found)
    assert_identical(*(torch.autograd.grad(y, list(made.parameters()), dy) for y in found))
    plain = TransformerBlock(*parts[:3], nn.LayerNorm(HIDDEN, dtype=torch.float64))
    assert "post_attention_layernorm is called as a module" in layers.explain(plain, 8)
    for wrong in (lambda: TransformerBlock(HIDDEN, HEADS), lambda: TransformerBlock(hidden_size=8, n_heads=2)):
        with pytest.raises(TypeError, match=r"takes its parts, .*transformer_block\(hidden_size, n_heads"):
            wrong()


class OfSizes(TransformerBlock):
    def __init__(self, hidden_size: int, heads: int) -> None:
        norms = (RMSNorm(hidden_size) for _ in range(2))
        super().__init__(SelfAttention(hidden_size, heads), layers.MLP(hidden_size), *norms)


def test_subclasses_seeds_and_blocks_of_earlier_versions() -> None:
    assert OfSizes(8, 2)(torch.ones(1, 3, 8)).shape == (1, 3, 8)
    torch.manual_seed(0)  # parts draw in the order in which x meets them
    parts = [layers.LayerNorm(8), SelfAttention(8, 2), layers.LayerNorm(8), layers.MLP(8)]
    torch.manual_seed(0)
    block = layers.transformer_block(8, 2)
    own = [block.input_layernorm, block.self_attn, block.post_attention_layernorm, block.mlp]
    assert_identical(*([p for part in each for p in part.parameters()] for each in (own, parts)))
    with pytest.raises(AttributeError, match=r"recompute of a TransformerBlock is said by .*keep\(module, recompute="):
        block.recompute = "full"
    old = block.__getstate__()
    del old["keep"]
    block = TransformerBlock.__new__(TransformerBlock)
    block.__setstate__(old | {"recompute": "mlp", "pack_activations": True})
    assert block.keep == Keep("mlp", True)


@of_turn(1)
def test_a_compiled_block_keeps_what_is_said_later() -> None:
    block, (x, _) = make_block("gelu-layernorm"), inputs()
    run, found = torch.compile(block, backend="eager"), []
    for mode in ("none", "full", "mlp", "none"):
        layers.keep(run, recompute=mode)
        with Saved(*block.parameters()).recording() as saved:
            run(x.requires_grad_())
        found.append(saved.total())
    assert found[0] == found[3] > found[2] > found[1]
