"""Cases of `cross_entropy`: the differentiable operations, from logits and fused with the output projection."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.cross_entropy.reference import cross_entropy_cost
from tpformer.ops import VocabSlice, linear_cross_entropy, vocab_parallel_cross_entropy

from ..shapes import MODELS, RANKS
from . import formulas, liger
from .case import COMPILED, ITEMSIZE, LIGER, Case, Function, Rows, Work
from .formulas import compiled


def logits_and_targets(rows: Rows, device: str, dtype: torch.dtype) -> list[Tensor]:
    (logits,) = rows.random(1, device, dtype)
    return [logits, torch.randint(rows.n, (rows.m,), device=device)]


def cross_entropy_forward(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    def ours(logits: Tensor, targets: Tensor) -> Any:
        return vocab_parallel_cross_entropy(logits, targets, VocabSlice(0, rows.n, rows.n))

    plain = formulas.cross_entropy_forward
    inputs = logits_and_targets(rows, device, dtype)
    return Work(inputs, ours, plain, {COMPILED: compiled(plain), LIGER: liger.cross_entropy(gradient=False)})


def cross_entropy_both(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    upstream = torch.ones(rows.m, device=device, dtype=torch.promote_types(dtype, torch.float32))

    def ours(logits: Tensor, targets: Tensor) -> Any:
        leaf = logits.detach().requires_grad_()
        losses = vocab_parallel_cross_entropy(leaf, targets, VocabSlice(0, rows.n, rows.n), in_place=True)
        return losses.detach(), torch.autograd.grad(losses, leaf, upstream)

    plain = formulas.cross_entropy_both
    inputs = logits_and_targets(rows, device, dtype)
    rivals = {COMPILED: compiled(plain), LIGER: liger.cross_entropy(gradient=True)}
    return Work(inputs, ours, plain, rivals, mutated=(0,))


def with_gradients(loss: Callable[..., Tensor]) -> Function:
    """f(x, weight, targets) -> (loss, dx, dweight), by autograd."""

    def both(x: Tensor, weight: Tensor, targets: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        result = loss(*leaves, targets)
        return result.detach(), torch.autograd.grad(result, leaves)

    return both


def head(rows: Rows, hidden: int, device: str, dtype: torch.dtype) -> Work:
    x = torch.randn(rows.m, hidden, device=device, dtype=dtype)
    weight = torch.randn(rows.n, hidden, device=device, dtype=dtype) * hidden**-0.5
    targets = torch.randint(rows.n, (rows.m,), device=device)

    def ours(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, VocabSlice(0, rows.n, rows.n))

    plain = formulas.linear_cross_entropy
    rivals = {COMPILED: with_gradients(compiled(plain)), LIGER: liger.linear_cross_entropy()}
    return Work([x, weight, targets], with_gradients(ours), with_gradients(plain), rivals)


def cross_entropy_cases(quick: bool) -> list[Case]:
    config, tokens = MODELS["8B"], 4096
    assert config.vocab_size is not None
    cases = []
    for ranks in (RANKS,) if quick else (RANKS, 1):
        rows = Rows("8B" if ranks == 1 else f"8B/{ranks}", tokens, config.vocab_size // ranks)
        costs = [cross_entropy_cost(rows.m, rows.n, ITEMSIZE, backward).bytes for backward in (False, True)]
        cases += [
            Case("cross entropy forward", str(rows), costs[0], partial(cross_entropy_forward, rows)),
            Case("cross entropy forward, backward", str(rows), sum(costs), partial(cross_entropy_both, rows)),
        ]
    sharded = Rows(f"8B/{RANKS}", tokens, config.vocab_size // RANKS)
    flops = 6 * sharded.m * sharded.n * config.hidden_size
    build = partial(head, sharded, config.hidden_size)
    return [
        *cases,
        Case("linear cross entropy forward, backward", f"{sharded}x{config.hidden_size}", None, build, flops),
    ]
