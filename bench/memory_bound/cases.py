"""The cases of the benches norm, activation, rope, dropout and cross_entropy: sizes, bytes, and who can do them.

Belongs here: a builder for each operation that differs in more than options, and the list of all benches. The cases of
experts are in experts.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.activation.reference import activation_cost
from tpformer.kernels.cross_entropy.reference import cross_entropy_cost
from tpformer.kernels.dropout.reference import dropout_cost, finish_cost
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.reference import norm_cost
from tpformer.kernels.philox.reference import philox_key
from tpformer.kernels.rope.reference import rope_cost, rope_table
from tpformer.ops import VocabSlice, linear_cross_entropy, vocab_parallel_cross_entropy
from tpformer.ops.implementation import implementation

from ..shapes import MODELS, RANKS
from . import experts, formulas, updates
from .case import COMPILED, Case, Function, Rows, Work, compiled

ITEMSIZE, P, EPS = 2, 0.1, 1e-5
KEY = philox_key("bench")
BASE, SEQUENCE = 10000.0, 2048  # of rotary embedding: the base of its angles, tokens of a sample


def hidden_rows(quick: bool) -> list[Rows]:
    """Whole models' hidden states."""
    rows = [Rows(name, m, MODELS[name].hidden_size) for name, m in (("8B", 8192), ("70B", 8192), ("405B", 4096))]
    return rows[:1] if quick else rows


def norm_of(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> Norm:
    weight, bias = rows.random_vectors(2, device, dtype)
    return Norm(kind, weight, bias if kind == "layernorm" else None, EPS)


def dropout_of(rows: Rows, device: str) -> Dropout:
    return Dropout(torch.arange(rows.m, device=device) * rows.n, KEY, P)


def norm_forward(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    (x,) = rows.random(1, device, dtype)
    inputs, plain = (x, norm_of(kind, rows, device, dtype)), formulas.norm_forward
    return Work(inputs, implementation("norm", x).norm_forward, plain, {COMPILED: compiled(plain)})


def norm_backward(kind: str, residual: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """The backward of a norm. residual: it also adds the gradient of the residual stream to its result."""
    dy, x, dresidual = rows.random(3, device, dtype)
    norm = norm_of(kind, rows, device, dtype)
    _, *mean, rstd = formulas.norm_forward(x, norm)
    inputs = (dy, x, (mean[0] if mean else None, rstd), norm, dresidual if residual else None)
    plain = formulas.norm_backward
    return Work(inputs, implementation("norm", x).norm_backward, plain, {COMPILED: compiled(plain)})


def finish_norm(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """layernorm: after bias, dropout and residual, as in GPT; rmsnorm: after the residual only, as in Llama."""
    x, residual = rows.random(2, device, dtype)
    (bias,), norm = rows.random_vectors(1, device, dtype), norm_of(kind, rows, device, dtype)
    full, plain = kind == "layernorm", formulas.finish_norm_forward
    finish = Finish(bias, dropout_of(rows, device), residual, norm) if full else Finish(residual=residual, norm=norm)
    theirs = compiled(partial(plain, drop=partial(F.dropout, p=P)))
    op = implementation("norm", x).finish_norm_forward
    return Work((x, finish), op, plain, {COMPILED: theirs}, random=full)


def norm_cases(quick: bool) -> list[Case]:
    cases = []
    for rows in hidden_rows(quick):
        for kind in ("layernorm", "rmsnorm"):
            full = kind == "layernorm"
            listed: dict[str, tuple[Callable[..., Work], dict[str, bool]]] = {
                "forward": (partial(norm_forward, kind), {}),
                "backward": (partial(norm_backward, kind, False), {"backward": True}),
                "backward + residual": (partial(norm_backward, kind, True), {"backward": True, "residual": True}),
                "after finish": (partial(finish_norm, kind), {"bias": full, "dropout": full, "residual": True}),
            }
            for name, (make, parts) in listed.items():
                nbytes = norm_cost(rows.m, rows.n, ITEMSIZE, kind, **parts).bytes
                cases.append(Case(f"{kind} {name}", str(rows), nbytes, partial(make, rows)))
    return cases


def activation(name: str, gated: bool, backward: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """Backwards also rebuild the activation, for the weight's gradient."""
    *gradient, x, gate = rows.random(2 + backward, device, dtype)
    inputs = (*gradient, x, name, gate if gated else None)
    direction = "activation_backward" if backward else "activation_forward"
    plain = getattr(formulas, direction)
    return Work(inputs, getattr(implementation("activation", x), direction), plain, {COMPILED: compiled(plain)})


def activation_cases(quick: bool) -> list[Case]:
    def features(name: str, m: int, ranks: int) -> Rows:
        return Rows(name if ranks == 1 else f"{name}/{ranks}", m, MODELS[name].ffn_size // ranks)

    llama = [features("8B", 32768, RANKS), features("8B", 8192, 1), features("70B", 16384, RANKS)]
    gpt = [features("GPT-3", 8192, RANKS), features("GPT-3", 2048, 1)]
    listed = [
        *(("silu", True, rows) for rows in llama),
        *(("gelu_tanh", False, rows) for rows in gpt),
        *((name, gated, llama[1]) for name, gated in (("gelu_tanh", True), ("gelu", False), ("relu2", False))),
    ]
    cases = []
    for name, gated, rows in listed[:1] if quick else listed:
        for backward in (False, True):
            nbytes = activation_cost(rows.m, rows.n, ITEMSIZE, gated, backward).bytes
            label = f"{'gated ' if gated else ''}{name} {'backward' if backward else 'forward'}"
            cases.append(Case(label, str(rows), nbytes, partial(activation, name, gated, backward, rows)))
    return cases


class Heads(NamedTuple):
    """Queries and keys of a model's attention."""

    model: str
    tokens: int
    queries: int
    keys: int
    dim: int

    def __str__(self) -> str:
        return f"{self.model} {self.tokens}x({self.queries}+{self.keys})x{self.dim}"


def rope(heads: Heads, interleaved: bool, inverse: bool, device: str, dtype: torch.dtype) -> Work:
    batch = max(1, heads.tokens // SEQUENCE)
    length = heads.tokens // batch
    table = rope_table(length, heads.dim, BASE, dtype, device)
    positions = torch.arange(length, device=device).repeat(batch)
    options: dict = {"device": device, "dtype": dtype}
    q, k = (torch.randn(heads.tokens, count, heads.dim, **options) for count in (heads.queries, heads.keys))
    plain = formulas.rope_rotate
    inputs = (q, k, table, positions, interleaved, inverse)
    return Work(inputs, implementation("rope", q).rope_rotate, plain, {COMPILED: compiled(plain)})


def rope_cases(quick: bool) -> list[Case]:
    cases = []
    for name, tokens in (("8B", 8192), ("70B", 8192))[: 1 if quick else 2]:
        config = MODELS[name]
        heads = Heads(name, tokens, config.n_heads, config.kv_heads, config.head_size)
        nbytes = rope_cost(tokens, heads.queries, heads.keys, heads.dim, ITEMSIZE).bytes
        for interleaved in (False, True):
            for inverse in (False, True):
                label = f"{'interleaved' if interleaved else 'half'} {'backward' if inverse else 'forward'}"
                cases.append(Case(label, str(heads), nbytes, partial(rope, heads, interleaved, inverse)))
    return cases


def dropout(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    (x,), op = rows.random(1, device, dtype), implementation("dropout", torch.empty(0, device=device))
    theirs = compiled(lambda x, *_: F.dropout(x, P))
    return Work(
        (x, *dropout_of(rows, device)), op.dropout_apply, formulas.dropout_apply, {COMPILED: theirs}, random=True
    )


def finish_forward(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    x, residual = rows.random(2, device, dtype)
    finish = Finish(*rows.random_vectors(1, device, dtype), dropout_of(rows, device), residual)
    theirs = compiled(partial(formulas.finish_forward, drop=partial(F.dropout, p=P)))
    op = implementation("dropout", x).finish_forward
    return Work((x, finish), op, formulas.finish_forward, {COMPILED: theirs}, random=True)


def finish_backward(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """We draw the mask again; torch.compile reads the one that a forward would have stored."""
    (dz,), drawn = rows.random(1, device, dtype), dropout_of(rows, device)
    op, plain = implementation("dropout", dz).finish_backward, formulas.finish_backward
    inputs = (dz, formulas.kept(drawn, rows.n), P)
    return Work(inputs, lambda dz, *_: op(dz, drawn, True), plain, {COMPILED: compiled(plain)})


def dropout_cases(quick: bool) -> list[Case]:
    cases = []
    for rows in hidden_rows(quick):
        size = (rows.m, rows.n, ITEMSIZE)
        listed = {
            "dropout": (dropout, dropout_cost(*size)),
            "bias, dropout, residual": (finish_forward, finish_cost(*size, bias=True, dropout=True, residual=True)),
            "bias, dropout, backward": (finish_backward, finish_cost(*size, bias=True, dropout=True, backward=True)),
        }
        cases += [Case(name, str(rows), cost.bytes, partial(build, rows)) for name, (build, cost) in listed.items()]
    return cases


def cross_entropy(backward: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """The differentiable operation, from logits; backward: with its gradient."""
    (logits,), targets = rows.random(1, device, dtype), torch.randint(rows.n, (rows.m,), device=device)
    vocab = VocabSlice(0, rows.n, rows.n)
    upstream = torch.ones(rows.m, device=device, dtype=torch.promote_types(dtype, torch.float32))

    def ours(logits: Tensor, targets: Tensor) -> Any:
        if not backward:
            return vocab_parallel_cross_entropy(logits, targets, vocab)
        leaf = logits.detach().requires_grad_()
        losses = vocab_parallel_cross_entropy(leaf, targets, vocab, in_place=True)
        return losses.detach(), torch.autograd.grad(losses, leaf, upstream)

    plain = formulas.cross_entropy_both if backward else formulas.cross_entropy_forward
    return Work((logits, targets), ours, plain, {COMPILED: compiled(plain)})


def with_gradients(loss: Callable[..., Tensor]) -> Function:
    """f(x, weight, targets) -> (loss, dx, dweight), by autograd."""

    def both(x: Tensor, weight: Tensor, targets: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        result = loss(*leaves, targets)
        return result.detach(), torch.autograd.grad(result, leaves)

    return both


def head(rows: Rows, hidden: int, device: str, dtype: torch.dtype) -> Work:
    """The loss fused with the output projection."""
    x = torch.randn(rows.m, hidden, device=device, dtype=dtype)
    weight = torch.randn(rows.n, hidden, device=device, dtype=dtype) * hidden**-0.5
    targets = torch.randint(rows.n, (rows.m,), device=device)
    ours, plain = partial(linear_cross_entropy, vocab=VocabSlice(0, rows.n, rows.n)), formulas.linear_cross_entropy
    theirs = with_gradients(compiled(plain))
    return Work((x, weight, targets), with_gradients(ours), with_gradients(plain), {COMPILED: theirs})


def cross_entropy_cases(quick: bool) -> list[Case]:
    config, tokens = MODELS["8B"], 4096
    assert config.vocab_size is not None
    cases = []
    for ranks in (RANKS,) if quick else (RANKS, 1):
        rows = Rows("8B" if ranks == 1 else f"8B/{ranks}", tokens, config.vocab_size // ranks)
        forward, gradient = (cross_entropy_cost(rows.m, rows.n, ITEMSIZE, way).bytes for way in (False, True))
        cases += [
            Case("cross entropy forward", str(rows), forward, partial(cross_entropy, False, rows)),
            Case("cross entropy forward, backward", str(rows), forward + gradient, partial(cross_entropy, True, rows)),
        ]
    sharded = Rows(f"8B/{RANKS}", tokens, config.vocab_size // RANKS)
    flops, build = 6 * sharded.m * sharded.n * config.hidden_size, partial(head, sharded, config.hidden_size)
    shape = f"{sharded}x{config.hidden_size}"
    return [*cases, Case("linear cross entropy forward, backward", shape, None, build, flops)]


CASES = {
    "norm": norm_cases,
    "activation": activation_cases,
    "rope": rope_cases,
    "dropout": dropout_cases,
    "cross_entropy": cross_entropy_cases,
    "route": experts.route_cases,
    "weighted_activation": experts.weighted_activation_cases,
    "combine": experts.combine_cases,
    "update": updates.update_cases,
}
