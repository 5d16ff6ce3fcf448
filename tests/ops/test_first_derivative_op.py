"""With create_graph=True every operation gives its right first gradients, and refuses every derivative of them. It
never takes one for zero, also where the incoming gradient needs none. torch's transforms and forward-mode AD are
refused, too, with the operation's name."""

from collections.abc import Callable

import pytest
import torch
from kept import kept
from shards import leaves, make
from torch import Tensor, nn
from torch.autograd import forward_ad

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.kernels.rope.reference import rope_table
from tpformer.layers import LayerNorm, RowParallelLinear, transformer_block

REFUSED = r"tpformer.ops.\w+ has no second derivative: if you need one, as for a gradient penalty or a Hessian, use"
ROWS, K = 6, 4
TARGETS = torch.tensor([0, 3, 5, -100, 1, 2])
VOCAB = ops.VocabSlice(0, K, K)
NORMS = {kind: lambda w, b, kind=kind: ops.Norm(kind, w, b, 1e-5) for kind in ("layernorm", "rmsnorm")}
SITE = ops.Dropout(ops.dropout_starts(torch.arange(1), ROWS, K, slice(0, ROWS)), 7, 0.5)


def rotate(x: Tensor, *_: Tensor) -> Tensor:
    heads = x.view(ROWS, 1, K)
    return ops.rope(heads, 2 * heads, rope_table(ROWS, K, 1e4, x.dtype, x.device), torch.arange(ROWS))[1].square()


def head(x: Tensor, weight: Tensor, v: Tensor, norm: str | None = None) -> Tensor:
    prologue = None if norm is None else NORMS[norm](v, None)
    return ops.linear_cross_entropy(x, weight, TARGETS.clamp(max=3), VOCAB, norm=prologue, chunk_tokens=4)


def exchanged(x: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """Of two experts, one of which each token takes."""
    matrices = ops.ExpertWeights(torch.stack([torch.cat([weight, weight])] * 2), torch.stack([weight, weight]))
    options = {"router": ops.Router(ops.Policy(1, normalised=False)), "n_experts": 2, "activation": "silu"}
    return ops.exchanged_experts(
        x, matrices, router_weight=weight[:2], norm=NORMS["rmsnorm"](v, None), residual=x, added=2 * x, **options
    )[0]


# of x (ROWS, K), a weight (K, K) and a vector (K,); where linear in x, only the incoming gradient has a derivative
OPERATIONS = {
    "exchanged_experts": exchanged,
    "column_linear": lambda x, w, v: ops.column_linear(x, w, v),
    "column_linear of a norm": lambda x, w, v: ops.column_linear(x, w, v, norm=NORMS["layernorm"](v, v)),
    "carried": lambda x, w, v: sum(ops.column_linear(x, [w, w], norm=NORMS["rmsnorm"](v, None), carry=True)),
    "row_linear": lambda x, w, v: ops.row_linear(x, w, v, residual=x),
    "row_linear of a gate": lambda x, w, v: ops.row_linear(x, w, v, activation="silu", gate=x, dropout=SITE),
    "row_linear and a norm": lambda x, w, v: ops.row_linear(x, w, v, next_norm=NORMS["layernorm"](v, None))[0],
    "norm": lambda x, w, v: ops.norm(x, NORMS["layernorm"](v, v)),
    "activation": lambda x, w, v: ops.activation(x, "gelu"),
    "dropout": lambda x, w, v: ops.dropout(x, SITE).square(),
    "rope": rotate,
    "cross_entropy": lambda x, w, v: ops.vocab_parallel_cross_entropy(x, TARGETS.clamp(max=3), VOCAB),
    "linear_cross_entropy": head,
    "linear_cross_entropy of a norm": lambda x, w, v: head(x, w, v, "rmsnorm"),
}


def forward(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: run(forward_ad.make_dual(x, x))


def refuse(y: Tensor, wanted: list[Tensor]) -> None:
    """The gradients of y have the same values with create_graph, and every derivative of them is refused."""
    plain = torch.autograd.grad(y.sum(), wanted, retain_graph=True, allow_unused=True)
    found = torch.autograd.grad(y.sum(), wanted, create_graph=True, allow_unused=True)
    for one, other in zip(plain, found, strict=True):
        assert one is other is None or torch.equal(one, other.detach())
    used = [(x, g) for x, g in zip(wanted, found, strict=True) if g is not None]
    for _, gradient in used:
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(gradient.sum(), [x for x, _ in used], retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_refuse_second_derivatives(name):
    x, weight, vector = leaves(make(0, torch.float64, x=(ROWS, K), weight=(K, K), vector=(K,))).values()
    refuse(OPERATIONS[name](x, weight, vector), [x, weight, vector])
    y = OPERATIONS[name](x, weight.detach(), vector.detach())
    refuse(y, [x])
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.functional.hessian(lambda x: OPERATIONS[name](x, weight, vector).sum(), x.detach())


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_refuse_transforms_and_forward_mode(name):
    x, weight, vector = make(0, torch.float64, x=(ROWS, K), weight=(K, K), vector=(K,)).values()

    def run(x: Tensor) -> Tensor:
        return OPERATIONS[name](x, weight, vector)

    for use in (torch.func.grad(lambda x: run(x).sum()), torch.func.jacrev(run), forward_ad.dual_level()(forward(run))):
        with pytest.raises(RuntimeError, match=r"do not enter tpformer.ops.\w+: take gradients by backward"):
            use(x)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_gradient_penalty_of_a_block(recompute):
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    block = kept(transformer_block, 8, 2, recompute=recompute, dtype=torch.float64)
    critic = nn.Sequential(block, LayerNorm(8, dtype=torch.float64), RowParallelLinear(8, 1, dtype=torch.float64))
    (dx,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(critic(x).sum(), x)
    assert torch.equal(dx, expected)
    with pytest.raises(RuntimeError, match=REFUSED):
        (dx.norm() - 1).square().backward()


def test_a_queue_has_no_graph():
    layer, queue = RowParallelLinear(4, 3), ops.WeightGradientQueue()
    with queue.collect():
        y = layer(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match=r"row_linear ran in WeightGradientQueue.collect.* leave out create_graph"):
        torch.autograd.grad(y.sum(), layer.bias, create_graph=True)
