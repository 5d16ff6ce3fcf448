"""An operation has one meaning on all transports: with an operand made wrong in any way it is refused on all of them in
one sentence, before anything is sent, or all give the same. So with names, and with parts of a vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opened import opened
from testing import assert_kernel_close, on_every_rank
from torch import Tensor
from torch.utils._pytree import tree_flatten
from wrong_operands import call, changed, variants

from tpformer import ops
from tpformer.distributed import check_all, close, set_timeout
from tpformer.kernels.rope.reference import rope_table
from tpformer.layers import TensorParallel
from tpformer.ops.expert_operands import within

TOKENS, K, N, F, T = 4, 8, 6, 4, 2  # of all ranks; a rank has half of the rows, features and experts
Row = tuple[tuple, dict[str, Any]]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def where(transport: str, sequence_parallel: bool = True) -> dict[str, Any]:
    return {"transport": opened(dist.group.WORLD, floats(2, K), sequence_parallel, transport)}


def column(transport: str) -> Row:
    norm = ops.Norm("layernorm", floats(K), floats(K), 1e-5)
    return (floats(2, K), [floats(3, K), floats(5, K)], [floats(3), floats(5)]), {"norm": norm, **where(transport)}


def normed_column(transport: str) -> Row:
    norm, x = ops.Norm("rmsnorm", floats(K), None, None), floats(2, K)
    normed = ops.Normed(ops.norm(x, norm), None, x.square().mean(1, True).rsqrt())
    return (x, floats(3, K)), {"norm": norm, "normed": normed, **where(transport)}


def row(transport: str) -> Row:
    drop = ops.Dropout(torch.arange(2) * N, 7, 0.5)
    norm = ops.Norm("layernorm", floats(N), floats(N), 1e-5)
    options = {"activation": "silu", "gate": floats(TOKENS, K), "residual": floats(2, N), "dropout": drop}
    return (floats(TOKENS, K), floats(N, K), floats(N)), {**options, "next_norm": norm, **where(transport)}


def experts(transport: str) -> Row:
    x = floats(2, K)
    shared = floats(3, K), floats(3, K), floats(K, 3)
    routing = ops.Routing(torch.tensor([[0, 1], [1, 3], [0, 2], [2, 3]], dtype=torch.int32), floats(TOKENS, 2))
    options = {"routing": routing, "n_experts": 4, "activation": "silu", "residual": floats(2, K)}
    return (x, ops.ExpertWeights(floats(2, 2 * F, K), floats(2, K, F), *shared)), options | where(transport)


def exchanged() -> Row:
    """Of two own tokens, which may be routed to any of four experts."""
    (x, matrices), options = experts("sequential")
    routing = ops.Routing(*(each[:2] for each in options.pop("routing")))
    del options["transport"]
    own = {"routing": routing, "added": floats(2, K), "group": dist.group.WORLD}
    return (x, ops.ExpertWeights(*matrices[:2])), options | own


LINEARS: dict[Callable, tuple[Callable[..., Any], ...]] = {
    ops.column_linear: (column, normed_column), ops.row_linear: (row,), ops.experts: (experts,),
}  # fmt: skip
TARGETS = torch.tensor([0, 7, -100, 3])


def vocab() -> ops.VocabSlice:
    return ops.VocabSlice(4 * dist.get_rank(), 4, 8)


def router() -> ops.Router:
    balance = ops.Balance(0.1, 2, torch.tensor([0, 0, 1, 1]))
    counted = torch.ones(TOKENS, dtype=torch.bool)
    return ops.Router(ops.Policy(2), floats(4), torch.zeros(4, dtype=torch.int64), counted, balance)


def rotated() -> Row:
    table = rope_table(5, N, 1e4, torch.float32, "cpu")
    return (floats(TOKENS, 2, N), floats(TOKENS, 1, N), table, torch.arange(4)), {}


def attended() -> Row:
    documents = torch.tensor([0, 3, TOKENS], dtype=torch.int32), 3
    return (floats(1, TOKENS, 4, N), floats(1, TOKENS, 2, N), floats(1, TOKENS, 2, N), documents), {}


def remembered() -> Row:
    shape = 1, 5, 2, N
    return (floats(1, TOKENS, 4, N), floats(*shape), floats(*shape), torch.ones(1, TOKENS, 5, dtype=torch.bool)), {}


# those without a transport
OTHERS: dict[Callable, Callable[[], Row]] = {
    ops.attention: attended,
    ops.cached_attention: remembered,
    ops.norm: lambda: ((floats(TOKENS, K), ops.Norm("layernorm", floats(K), floats(K), None)), {}),
    ops.activation: lambda: ((floats(TOKENS, K), "gelu", floats(TOKENS, K)), {}),
    ops.dropout: lambda: ((floats(TOKENS, K), ops.Dropout(torch.arange(TOKENS) * K, 7, 0.5)), {}),
    ops.rope: rotated,
    ops.exchanged_experts: exchanged,
    ops.route: lambda: ((floats(2, K), floats(4, K), router()), {"group": dist.group.WORLD}),
    ops.vocab_parallel_embedding: lambda: (
        (torch.tensor([0, 7, 2, 5]), floats(4, K), vocab()), {"group": dist.group.WORLD}
    ),
    ops.vocab_parallel_cross_entropy: lambda: (
        (floats(TOKENS, 4), TARGETS, vocab()), {"reduction": "mean", "group": dist.group.WORLD}
    ),
    ops.linear_cross_entropy: lambda: (
        (floats(2, K), floats(4, K), TARGETS, vocab()), {"reduction": "sum", "group": dist.group.WORLD}
    ),
}  # fmt: skip


@on_every_rank(2, pool="interpreted")
def test_all_transports_refuse_the_same_or_give_the_same() -> None:
    """After what was refused, a right call is right: nothing had begun."""
    for operation, rows in LINEARS.items():
        for make in rows:
            expected = call(operation, make("sequential"))
            every = [variants(partial(make, name), changed) for name in ("sequential", "pipelined", "fused")]
            for (index, sequential), *others in zip(*every, strict=True):
                given = sequential()
                x, y = tree_flatten(given)[0][index], call(operation, given)
                for _, other in others:
                    found = call(operation, other())
                    what = f"{make.__name__} {index} {getattr(x, 'shape', x)} {getattr(x, 'dtype', '')}"
                    assert (found is None) == (y is None), what
                    assert not isinstance(x, str) or found is None, what
                    for a, b in zip(found or [], y or [], strict=True):
                        assert_kernel_close(a.detach(), b.detach().double(), b.detach(), what)
            for a, b in zip(call(operation, make("fused")), expected, strict=True):
                assert_kernel_close(a.detach(), b.detach().double(), b.detach(), make.__name__)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_every_rank(2, pool="interpreted")
def test_fused_operations_tell_of_their_dropout(sequence_parallel: bool) -> None:
    """Ranks with other keys would drop other elements of equal rows. Who came first hears it as its wait ends."""
    group, options = dist.group.WORLD, where("fused", sequence_parallel)
    set_timeout(group, 0.5)
    rows = 2 if sequence_parallel else TOKENS
    drop = ops.Dropout(torch.arange(rows) * N, dist.get_rank(), 0.5)
    with pytest.raises(RuntimeError, match=r"rank 0: .*'dropout', 0.5, 0.*rank 1: .*'dropout', 0.5, 1"):
        ops.row_linear(floats(TOKENS, K), floats(N, K), dropout=drop, **options)
        check_all()
    close(group)


@on_every_rank(2)
def test_a_residual_of_another_dtype_is_refused() -> None:
    """The result has x's dtype, to which a wider residual stream would be rounded."""
    for operation, make in ((ops.row_linear, row), (ops.experts, experts)):
        arguments, options = make("sequential")
        assert call(operation, (arguments, options)) is not None
        assert call(operation, (arguments, {**options, "residual": options["residual"].double()})) is None


@on_every_rank(2)
def test_other_operations_refuse_what_has_another_shape() -> None:
    for operation, make in OTHERS.items():
        assert call(operation, make()) is not None
        for index, wrong in variants(make, changed):
            given = wrong()
            x, original = tree_flatten(given)[0][index], tree_flatten(make())[0][index]
            alike = isinstance(x, Tensor) and x.shape == original.shape and not x.is_meta
            first = operation in (ops.rope, ops.norm, ops.dropout)  # any heads, any rows, any columns
            if operation is ops.cached_attention:  # any number of new tokens, and of heads in a group
                first = index == 0 and isinstance(x, Tensor) and call(operation, (given[0][:3], {})) is not None
            if operation is ops.vocab_parallel_embedding and isinstance(x, Tensor):  # a table of any width
                first = x.dim() == 2 and x.shape[0] == original.shape[0] and not x.is_meta
            found = call(operation, given)
            assert found is None or alike or first, f"{operation.__name__} {index} {getattr(x, 'shape', x)}"


WHOLE = (floats(TOKENS, 8), floats(8, K))  # logits, and a table


@on_every_rank(1, 2)
def test_a_whole_vocabulary_with_a_slice_of_it_is_refused() -> None:
    """Where one rank has all entries, the whole is its slice."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    width = 8 // ranks
    own = ops.VocabSlice(width * dist.get_rank(), width, 8)
    (logits, table), ids, x = WHOLE, TARGETS.clamp(min=0), floats(TOKENS // ranks, K)

    def each(vocab: ops.VocabSlice, logits: Tensor, table: Tensor) -> list:
        return [
            call(ops.vocab_parallel_cross_entropy, ((logits, TARGETS, vocab), {"group": group})),
            call(ops.linear_cross_entropy, ((x, table, TARGETS, vocab), {"group": group})),
            call(ops.vocab_parallel_embedding, ((ids, table, vocab), {"group": group})),
        ]

    part = slice(own.first, own.first + width)
    assert all(found is not None for found in each(own, logits[:, part], table[part]))
    if ranks > 1:
        assert each(own, logits, table) == [None] * 3
    other = own._replace(first=own.first + width)  # the next rank's, or nobody's
    assert each(other, logits[:, part], table[part]) == [None] * 3
    half = ops.VocabSlice(width // 2 * dist.get_rank(), width // 2, 8)  # all slices are half of the vocabulary
    assert each(half, logits[:, : width // 2], table[: width // 2]) == [None] * 3


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_an_expert_that_does_not_exist(index: int) -> None:
    """It is refused where that takes no wait. Elsewhere its token is NaN, and no other."""
    matrices = ops.ExpertWeights(floats(2, 2 * F, K), floats(2, K, F))
    routing = ops.Routing(torch.tensor([[0], [index], [1]], dtype=torch.int32), torch.ones(3, 1))
    options = {"n_experts": 2, "activation": "silu"}
    with pytest.raises(ValueError, match=r"experts span \[.*\], outside \[0, 1\]"):
        ops.experts(floats(3, K), matrices, routing=routing, **options)
    y, _ = ops.experts(floats(3, K), matrices, routing=within(routing, 2), **options)
    assert y.isnan().any(1).tolist() == y.isnan().all(1).tolist() == [False, True, False]
    right = routing._replace(experts=routing.experts.clamp(0, 1))
    expected = ops.experts(floats(3, K), matrices, routing=right, **options)[0][::2]
    assert_kernel_close(y[::2], expected.double(), expected, "the other tokens")
    with pytest.raises(ValueError, match="matrices of 2 experts on each of 1 ranks, n_experts=3"):
        ops.experts(floats(3, K), matrices, routing=right, **{**options, "n_experts": 3})


@on_every_rank(2)
def test_columns_that_are_not_this_rank_s_are_refused() -> None:
    for columns in (4, 6):
        assert call(ops.gather_columns, ((floats(TOKENS, columns), 6, dist.group.WORLD), {})) is None
    assert ops.gather_columns(floats(TOKENS, 3), 6, dist.group.WORLD).shape == (TOKENS, 6)


NONE: dict[str, Any] = {}
NORM, RMS = ops.Norm("layernorm", floats(K), None, None), ops.Norm("rmsnorm", floats(K), None, None)
WRITTEN = "normed was made by row_linear of other rows or by another norm, or one of them was written"
TABLE = rope_table(5, N, 1e4, torch.float32, "cpu")


def documents(longest: int, *boundaries: int) -> Row:
    q, k, v, _ = attended()[0]
    return (q, k, v, (torch.tensor(boundaries, dtype=torch.int32), longest)), {}


def queued(sinks: int) -> dict[str, Any]:
    return {"deferred": ops.Deferred(ops.WeightGradientQueue(), [lambda gradient: None] * sinks)}


def of_row(change: Callable[[Tensor, ops.Norm, ops.Normed], tuple[Tensor, ops.Norm, ops.Normed]]) -> Row:
    """What column_linear gets of row_linear's result, after a change."""
    x, norm, normed = change(*made_of(1))
    return (x, floats(3, K)), {"norm": norm, "normed": normed}


def made_of(seed: int) -> tuple[Tensor, ops.Norm, ops.Normed]:
    norm = ops.Norm("layernorm", floats(K).clone(), floats(K), 1e-5)
    x, normed = ops.row_linear(floats(2, K) + seed, floats(K, K), next_norm=norm)
    return x, norm, normed


REFUSED: list[tuple[Callable, Row, str]] = [
    (ops.attention, documents(3, 0, 3), r"documents of \[3\] tokens.*rise from 0 to all 4 tokens"),
    (ops.attention, documents(3, 0, 4), "the longest said to have 3"),
    (ops.attention, documents(3, 1, 4, 5), r"begin with \[1\]"),
    (ops.attention, documents(4, 0, 4, 3, 4), "that rise"),
    (ops.attention, ((floats(4, 4, N), floats(4, 2, N), floats(4, 2, N)), NONE), r"give \(batch, tokens, heads"),
    (ops.norm, ((floats(1)[0], NORM), NONE), "x has no dim, so no features"),
    (ops.norm, ((floats(2, K), RMS._replace(bias=floats(K))), NONE), "rmsnorm has no bias"),
    (ops.row_linear, ((floats(2, K), floats(K, K)), {"next_norm": RMS._replace(bias=floats(K))}), "no bias"),
    (
        ops.column_linear,
        ((floats(2, K), floats(3, K)), {"norm": NORM, "normed": ops.Normed(floats(2, K), None, floats(2, 1))}),
        "normed is not that of layernorm",
    ),
    (ops.column_linear, of_row(lambda x, norm, normed: (x.add_(1), norm, normed)), WRITTEN),
    (ops.column_linear, of_row(lambda x, norm, normed: (x + 1, norm, normed)), WRITTEN),
    (ops.column_linear, of_row(lambda x, norm, normed: (x, norm, made_of(2)[2])), WRITTEN),
    (ops.column_linear, of_row(lambda x, norm, normed: (x, norm._replace(eps=1.0), normed)), WRITTEN),
    (ops.column_linear, of_row(lambda x, norm, normed: (x, norm, (norm.weight.mul_(2), normed)[1])), WRITTEN),
    (ops.column_linear, ((floats(2, K), floats(3, K)), queued(2)), "2 sinks for 1 weights"),
    (ops.row_linear, ((floats(2, K), floats(3, K)), queued(0)), "0 sinks for 1 weights"),
    (
        ops.rope,
        ((floats(2, 1, N), floats(2, 1, N), (TABLE[0].clone().requires_grad_(), TABLE[1]), torch.arange(2)), NONE),
        "no gradient of its table",
    ),
    (
        ops.vocab_parallel_embedding,
        ((torch.tensor([0]), floats(8, K), ops.VocabSlice(0, 8, 8)), {"padding_idx": 8}),
        r"padding_idx=8 is outside the vocabulary \[0, 7\]",
    ),
    (ops.take_columns, ((floats(2, 3, K), slice(0, 2), None), NONE), r"give rows \(tokens, N\)"),
    (ops.gather_columns, ((floats(K), K, None), NONE), r"give rows \(tokens, N\)"),
]


@pytest.mark.parametrize("operation, given, words", REFUSED)
def test_what_no_operation_can_mean_is_refused(operation: Callable, given: Row, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        operation(*given[0], **given[1])


@on_every_rank(2)
def test_a_mesh_a_group_of_others_and_a_dtensor_are_refused_with_what_to_give() -> None:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = dist.init_device_mesh("cpu", (2,))
    x, own = floats(2, K), ops.VocabSlice(4 * dist.get_rank(), 4, 8)
    for group, words in (
        (mesh, r"give a process group, as mesh.get_group\(\)"),
        (-100, "do not call the operation there"),
    ):
        for call_it in (
            partial(ops.gather_rows, x, group),
            partial(ops.vocab_parallel_embedding, torch.tensor([0]), floats(4, K), own, group=group),
        ):
            with pytest.raises(TypeError, match=words):
                call_it()
    whole = DTensor.from_local(x, mesh, [Replicate()])
    with pytest.raises(TypeError, match="column_linear: x is a DTensor, and operations take a rank's own tensors"):
        ops.column_linear(whole, floats(3, K), transport=opened(mesh.get_group(), x))
    for other in ("fused", mesh, mesh.get_group(), TensorParallel(mesh)):  # each was taken, by some version or library
        for operation, given in (
            (ops.column_linear, (x, floats(3, K))),
            (ops.row_linear, (x, floats(3, K))),
            (ops.experts, experts("sequential")[0]),
        ):
            options = {"n_experts": 4, "activation": "silu"} if operation is ops.experts else {}
            with pytest.raises(TypeError, match=r"take an opened one, which .*TensorParallel\(mesh, sequence_paral"):
                operation(*given, **options, transport=other)


@pytest.mark.parametrize("name", ["auto", "pipelined"])
@on_every_rank(2)
def test_experts_have_the_same_result_by_every_transport(name: str) -> None:
    for sequence_parallel in (True, False):
        arguments, options = experts("sequential")
        x = arguments[0] if sequence_parallel else floats(TOKENS, K)
        found = [
            ops.experts(x, arguments[1], **{**options, "residual": None, **where(each, sequence_parallel)})[0]
            for each in ("sequential", name)
        ]
        assert_kernel_close(found[1], found[0].double(), found[0], name)


@on_every_rank(2)
def test_a_rank_without_an_entry_looks_up_and_padding_counts_from_the_vocabulary_s_end() -> None:
    rank, whole = dist.get_rank(), floats(3, K)
    for width in (3, 2):
        table = whole[rank * width : (rank + 1) * width].clone().requires_grad_()
        vocab = ops.VocabSlice(rank * width, width, 3)
        ids = torch.tensor([2, 0, 2, 1])
        y = ops.vocab_parallel_embedding(ids, table, vocab, padding_idx=-1, group=dist.group.WORLD)
        assert torch.equal(y, whole[ids].chunk(2)[rank])
        y.sum().backward()
        assert table.grad is not None
        assert table.grad[:, 0].tolist() == [1.0, 1.0, 0.0][rank * width : (rank + 1) * width]
