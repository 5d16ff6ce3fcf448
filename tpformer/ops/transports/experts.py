"""The two sides of a layer of experts over tensor-parallel ranks: gather and grouped GEMM; grouped GEMM and reduction.

Belongs here: how each transport carries them. `sequential` is the specification. The chunks of `pipelined` are the rows
of one rank's tokens. `fused` has a kernel for the gather. Its reduction is sequential's, because a token's rows lie in
several experts' groups, so that no tile's epilogue has a token's sum.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from tpformer.distributed.chunked import all_reduce_chunks, reduce_scatter_chunks
from tpformer.distributed.collectives import all_reduce, reduce_scatter
from tpformer.kernels.finish import NOTHING, Finish

from ..dispatch import Dispatch
from ..implementation import implementation
from .interface import ALL_REDUCE, GATHER, SCATTER, Transport, finish_rows, record_transport
from .products import Factor, Products, rows_of, tensors_of

if TYPE_CHECKING:
    from .fused import Fused  # imports triton
    from .pipelined import Pipelined


def gather_experts(
    transport: Transport,
    x_shard: Factor,
    dispatch: Dispatch,
    weights: Tensor,
    *,
    transposed: bool = False,
    keep: bool = False,
) -> tuple[Tensor, Factor]:
    """(y (R, N), x_gathered (T, K)): each dispatched row of x_gathered times the transpose of its expert's matrix.

    Shapes: x_shard (T / t, K), or all rows without sequence parallelism; weights (E, N, K), or (E, K, N) if transposed.
    x_gathered is a factor. The group's next operation may overwrite it, unless `keep`.
    Communication: one all-gather of T * K * itemsize bytes with sequence parallelism.
    """
    transport = transport.gathering
    if transport.name == "fused":
        return cast("Fused", transport).gather_grouped(x_shard, dispatch, weights, transposed=transposed, keep=keep)
    if transport.group is not None:
        record_transport(GATHER, transport.name)
    products = transport.products
    if transport.name != "pipelined":
        x_gathered = transport.start_gather(x_shard)()
        return expert_product(products, x_gathered, dispatch, weights, transposed=transposed), x_gathered
    right = products.expert_right(weights, transposed)
    gathered, chunks = cast("Pipelined", transport).arriving(x_shard)
    y = weights.new_empty(len(dispatch.slots), weights.shape[2 if transposed else 1])
    for arrived, x in chunks:
        rows, part = dispatch.parts[arrived.start // len(tensors_of(x_shard)[0])]
        y[rows] = products.expert_product(x, right, part.offsets, part.tokens)
    return y, products.received(gathered)


def expert_product(
    products: Products, x: Factor, dispatch: Dispatch, weights: Tensor, *, transposed: bool = False
) -> Tensor:
    """y (R, N) of gather_experts where all rows x (T, K) are here."""
    right = products.expert_right(weights, transposed)
    return products.expert_product(x, right, dispatch.offsets, dispatch.tokens)


def reducing(transport: str) -> str:
    """The transport that carries experts_reduce for a layer of this transport: fused kernels do not.

    A token's rows lie in the groups of several experts, so no tile of a grouped GEMM holds a token's sum.
    """
    return "sequential" if transport == "fused" else transport


def experts_reduce(
    transport: Transport,
    rows: Factor,
    dispatch: Dispatch,
    weights: Tensor,
    dense: Sequence[tuple[Factor, Tensor]] = (),
    *,
    transposed: bool,
    finish: Finish = NOTHING,
) -> Tensor:
    """The sum over ranks, for each token, of its rows times their experts' matrices and of the dense products.

    Shapes: rows (R, K), a factor; weights (E, N, K), or (E, K, N) if transposed; dense: pairs of a factor (T, K_i) and
    a weight (N, K_i), or (K_i, N) if transposed; result with sequence parallelism this rank's (T / t, N), else (T, N),
    equal on all ranks. Then `finish`, which has no norm.
    Numerics: a rank adds a token's rows in the order of its experts, in at least float32, then the dense products. A
    reduction over ranks adds what the ranks have rounded, in the order that its transport has for dense layers.
    Communication: one reduce-scatter or all-reduce of T * N * itemsize bytes.
    """
    n, scatter = weights.shape[2 if transposed else 1], transport.sequence_parallel
    if transport.group is not None:
        record_transport(SCATTER if scatter else ALL_REDUCE, reducing(transport.name))

    products = transport.products
    right = products.expert_right(weights, transposed)
    pairs = [(x, products.right(weight, not transposed)) for x, weight in dense]

    def product(rows: Factor, part: Dispatch, tokens: slice) -> Tensor:
        y = products.expert_product(rows, right, part.offsets)
        y = implementation("combine", y).combine(y, part.tokens, part.positions)
        for x, factor in pairs:
            products.product(rows_of(x, tokens), factor, y, y)
        return y

    if transport.name != "pipelined":
        y = product(rows, dispatch, slice(None))
        return finish_rows((reduce_scatter if scatter else all_reduce)(y, transport.group), finish)[0]
    assert transport.group is not None
    shape, like = (dispatch.n_tokens, n), weights
    if not scatter:
        whole = product(rows, dispatch, slice(None))
        y = all_reduce_chunks(lambda tokens, out: out.copy_(whole[tokens]), shape, like, transport.group)
        return finish_rows(y, finish)[0]
    share = dispatch.n_tokens // transport.group.size()

    def fill(tokens: slice, out: Tensor) -> None:
        picked, part = dispatch.parts[tokens.start // share]
        out.copy_(product(rows_of(rows, picked), part, tokens))

    return finish_rows(reduce_scatter_chunks(fill, shape, like, transport.group), finish)[0]


def weight_gradient(
    dy: Tensor, x: Tensor, dispatch: Dispatch, *, dy_of_tokens: bool = False, x_of_tokens: bool = False
) -> Tensor:
    """dW (E, N, K) of each expert's matrix: the sum over its rows of dy x^T. dy and x are what factors stand for, and
    may have rows of tokens (T, ...), in place of dispatched rows (R, ...)."""
    of_dy, of_x = (dispatch.tokens if each else None for each in (dy_of_tokens, x_of_tokens))
    return implementation("grouped_matmul", dy).grouped_weight_gradient(dy, x, dispatch.offsets, of_dy, of_x)
