"""route: which experts each token goes to, with which weights, decided once by the rank that has the token's row.

Belongs here: the router's GEMM, the decision and its gathering, the balance loss, and their gradients. How rows then
travel to experts is in dispatch.py.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce
from tpformer.kernels.cast import cast
from tpformer.kernels.operands import FLOATS, require
from tpformer.kernels.route.reference import Policy, check_policy
from tpformer.torch_private import Function

from .autocast import without_autocast
from .calls import called
from .first_derivative import first_derivative
from .implementation import implementation
from .recompute import once
from .transports.interface import REGISTRY
from .uncompiled import uncompiled


class Balance(NamedTuple):
    """The sequence-wise balance loss: coefficient * E / K * sum over experts of f_e p_e, times the sequence's tokens.

    f_e is the number of a sequence's tokens that go to expert e, over the sequence's tokens; p_e is the mean over the
    tokens of the share that e has of a token's scores. Only p_e has a gradient. Multiplied by the tokens, it is summed
    like the losses of tokens, and divided by the targets of the global batch like them.
    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2
    """

    coefficient: float
    samples: int
    sample: Tensor
    """(T,) int64: which of the samples a token of the whole group belongs to; `samples` for one that does not count."""
    groups: tuple[ProcessGroup, ...] = ()
    """Groups over whose ranks, one group after the other, the numbers of a sample's tokens at each expert are added up,
    because they have other tokens of the same samples: context-parallel ranks, and sequence shards of which each rank
    routes its own rows. Without any the router sees all tokens of each sample."""


class Router(NamedTuple):
    """How a layer's router decides. The tensors lie on the rows' device and are not differentiated.

    bias: (E,) in the dtype of scores, added to them for the choice only; None: nothing is added.
    load: (E,) int64, to which the number of tokens of each expert is added; None: they are not counted.
    counted: (T,) bool, the tokens of the whole group that are counted; None: all.
    balance: the balance loss, if it is wanted.
    """

    policy: Policy
    bias: Tensor | None = None
    load: Tensor | None = None
    counted: Tensor | None = None
    balance: Balance | None = None


class Routing(NamedTuple):
    """Where all tokens of a group go: experts (T, K) int32 in ascending order, weights (T, K) in at least float32."""

    experts: Tensor
    weights: Tensor


class Decided(NamedTuple):
    """What a router decided, and what its gradient needs. own: of the M tokens whose rows this rank has."""

    routing: Routing | None
    """The routing of all tokens; None in a backward."""
    own_experts: Tensor
    """(M, K) int32."""
    scores: Tensor
    """(M, E) in at least float32."""
    slopes: Tensor | None
    """(samples + 1, E): the balance loss's derivative by each share of a token of a sample."""
    own_sample: Tensor | None
    """(M,) int64."""
    balance_loss: Tensor | None = None
    """A scalar, of the own tokens."""

    @property
    def saved(self) -> tuple[Tensor | None, ...]:
        """What a backward needs, in the order of the fields after routing."""
        return self[1:5]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which routers compute: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def decide(
    rows: Tensor, weight: Tensor, router: Router, group: ProcessGroup | None, sequence_parallel: bool
) -> Decided:
    """The routing of all tokens of the group, from this rank's rows (M, H). Call it through `once`.

    Communication: with sequence_parallel one all-gather of 8 K bytes per token, 16 K in float64; otherwise none. With a
    balance loss an all-reduce of 8 E bytes a sample over each of its groups, whatever tokens this rank has.
    """
    _check(rows, weight, router, group if sequence_parallel else None)
    dtype = wide(rows.dtype)
    logits = cast(rows, dtype) @ cast(weight, dtype).t()
    experts, weights, scores = implementation("route", logits).route_forward(logits, router.policy, router.bias)
    routing = _gathered(experts, weights, group) if sequence_parallel else Routing(experts, weights)
    if router.load is not None:
        counted = routing.experts if router.counted is None else routing.experts[router.counted]
        index = counted.reshape(-1).long()
        router.load.scatter_add_(0, index, torch.ones_like(index))
    loss = slopes = own_sample = None
    if router.balance is not None:
        own_sample = router.balance.sample
        if sequence_parallel and group is not None:
            own_sample = own_sample.chunk(group.size())[group.rank()]
        slopes = _slopes(routing.experts, router.balance, scores)
        shares = implementation("route", scores).shares(scores)
        loss = (slopes[own_sample] * shares).sum()
    decided = Decided(routing, experts, scores, slopes, own_sample, loss)
    REGISTRY.routed.tell((router, decided))
    return decided


def _check(rows: Tensor, weight: Tensor, router: Router, group: ProcessGroup | None) -> None:
    """ValueError unless the policy can be followed, and all tensors have the shapes and dtypes that Router says."""
    count = weight.shape[0]
    tokens = (rows.shape[0] * (1 if group is None else group.size()),)
    check_policy(router.policy, count)
    require(
        "route", rows, ("weight", weight, (count, rows.shape[-1]), FLOATS),
        ("bias", router.bias, (count,), (wide(rows.dtype),)), ("load", router.load, (count,), (torch.int64,)),
        ("counted", router.counted, tokens, (torch.bool,)),
        ("sample", None if router.balance is None else router.balance.sample, tokens, (torch.int64,)),
    )  # fmt: skip


def record_routing() -> AbstractContextManager[list[tuple[Router, Decided]]]:
    """A context that gives a list, which gets a pair for each decision of a router in this process, in their order."""
    return REGISTRY.routed.listen()


def _gathered(experts: Tensor, weights: Tensor, group: ProcessGroup | None) -> Routing:
    """All ranks' experts and weights, by one all-gather of integers as wide as the weights."""
    if group is None:
        return Routing(experts, weights)
    integer = torch.int64 if weights.dtype == torch.float64 else torch.int32
    whole = all_gather(torch.cat([experts.to(integer), weights.view(integer)], 1), group)
    experts, weights = (half.contiguous() for half in whole.chunk(2, 1))
    return Routing(experts.to(torch.int32), weights.view(torch.promote_types(torch.float32, _float_of(integer))))


def _float_of(integer: torch.dtype) -> torch.dtype:
    return torch.float64 if integer == torch.int64 else torch.float32


def _slopes(experts: Tensor, balance: Balance, scores: Tensor) -> Tensor:
    """coefficient * E / (K * tokens of the sample) * the sample's tokens at each expert; (samples + 1, E), last 0."""
    n_experts, k = scores.shape[1], experts.shape[1]
    rows = balance.samples + 1
    index = (balance.sample[:, None] * n_experts + experts).reshape(-1)
    counts = torch.zeros(rows * n_experts, dtype=torch.int64, device=scores.device)
    counts = counts.scatter_add_(0, index, torch.ones_like(index)).view(rows, n_experts)
    for group in balance.groups:
        counts = all_reduce(counts, group)
    tokens = counts.sum(1, keepdim=True).clamp(min=1) / k
    slopes = counts.to(scores.dtype) * (balance.coefficient * n_experts / k) / tokens.to(scores.dtype)
    slopes[-1] = 0
    return slopes


def decide_backward(
    own: Tensor | None,
    dbalance: Tensor | None,
    decided: Decided,
    rows: Tensor,
    weight: Tensor,
    policy: Policy,
) -> tuple[Tensor, Tensor]:
    """(drows (M, H), dweight (E, H)) in at least float32, from the gradient (M, K) of the own tokens' weights."""
    if own is None:
        own = torch.zeros_like(decided.own_experts, dtype=decided.scores.dtype)
    dshares = None
    if dbalance is not None and decided.slopes is not None:
        dshares = decided.slopes[decided.own_sample] * dbalance
    backward = implementation("route", decided.scores).route_backward
    dlogits = backward(own, decided.own_experts, decided.scores, policy, dshares)
    return dlogits @ cast(weight, dlogits.dtype), dlogits.t() @ cast(rows, dlogits.dtype)


class RouteFunction(Function):
    """weights (T, K) of all tokens, and the balance loss, from x (M, H) and the router's weight W (E, H).

    forward   logits = x W^T, in at least float32; experts, weights and scores by kernels/route; gather to all ranks
    backward  dlogits by kernels/route from the gradients of the own tokens' weights; dx = dlogits W, dW = dlogits^T x
    """

    @staticmethod
    def forward(ctx, x, weight, router: Router, group, sequence_parallel: bool):
        decided = once(lambda: decide(x, weight, router, group, sequence_parallel))
        ctx.options = router.policy, group, sequence_parallel
        ctx.save_for_backward(x, weight, *decided.saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(decided.routing.experts)
        # a tensor that a region keeps must not become an output: autograd would tie it to this run
        loss = None if decided.balance_loss is None else decided.balance_loss.clone()
        return decided.routing.weights.clone(), decided.routing.experts, loss

    @staticmethod
    @first_derivative
    def backward(ctx, dweights, _, dbalance):
        x, weight, *saved = ctx.saved_tensors
        policy, group, sequence_parallel = ctx.options
        if dweights is not None and sequence_parallel and group is not None:
            dweights = dweights.chunk(group.size())[group.rank()]
        with without_autocast(x):
            dx, dweight = decide_backward(dweights, dbalance, Decided(None, *saved), x, weight, policy)
        return cast(dx, x.dtype), cast(dweight, weight.dtype), None, None, None


@uncompiled
def route(
    x: Tensor, weight: Tensor, router: Router, *, group: ProcessGroup | None = None, sequence_parallel: bool = True
) -> tuple[Routing, Tensor | None]:
    """(where all tokens of the group go, the balance loss of this rank's tokens or None).

    Shapes:  x (tokens / t, H) with sequence_parallel, else (tokens, H), equal on all ranks; weight (E, H), equal on all
             ranks. The routing is that of all tokens. It and its weights' gradients are equal on all ranks.
    Saves:   x, and 4 K + 4 E bytes a token: its experts and scores. A recomputed region keeps the decision, too.
    Communication, per rank, with sequence_parallel: an all-gather of 8 K bytes a token in the forward, 16 K in float64.
    The weight's gradient is, with sequence_parallel, a partial sum over this rank's rows.
    Errors:  ValueError for an unknown score, a policy that needs more experts than there are, and tensors of other
             shapes or dtypes, or on another device.
    Source:  kernels/route/reference.py
    """
    called(group, "route", x.shape, x.dtype, sequence_parallel, (), (), len(weight), router.policy)
    with without_autocast(x):
        weights, experts, loss = RouteFunction.apply(x, weight, router, group, sequence_parallel)
    return Routing(experts, weights), loss
