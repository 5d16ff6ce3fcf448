"""Which experts a token goes to, and with which weights: the specification (torch only), and the cost.

Letters: M tokens, E experts, K of them for each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cost import Cost
from ..operands import require, require_within, unknown

SCORES = ("softmax", "sigmoid")
LEAST_SUM = 1e-20  # added to a sum of scores before it divides, so that scores which are all 0 give weights of 0


class Policy(NamedTuple):
    """How experts are chosen and weighted.

    k: experts of a token. score: one of SCORES. normalised: the weights are divided by their sum. scale: multiplies
    them. groups, top_groups: the experts form `groups` groups of neighbours, and a token's experts are all in the
    `top_groups` groups whose two best experts have the largest sum (DeepSeek-V3).
    """

    k: int
    score: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


def check_policy(policy: Policy, experts: int) -> None:
    """ValueError for an unknown score, groups that do not divide the experts, and more choices than there are."""
    if policy.score not in SCORES:
        raise unknown("score", policy.score, SCORES)
    k, groups, top = policy.k, policy.groups, policy.top_groups
    if not 0 < top <= groups or experts % groups or not 0 < k <= experts // groups * top:
        raise ValueError(
            f"k={k} of {experts} experts, in the best {top} of {groups} groups: give a k from 1 to the "
            f"experts of so many groups, and groups that divide the experts"
        )


def check_operands(logits: Tensor, policy: Policy, bias: Tensor | None) -> None:
    """ValueError unless logits and bias have the shapes and dtypes below, and the policy can choose among them."""
    rows, experts = logits.shape[0], logits.shape[-1]
    check_policy(policy, experts)
    require(
        "route", logits, ("logits", logits, (rows, experts), (torch.float32, torch.float64)),
        ("bias", bias, (experts,), (logits.dtype,)),
    )  # fmt: skip


def check_gradients(dweights: Tensor, experts: Tensor, scores: Tensor, policy: Policy, dshares: Tensor | None) -> None:
    """ValueError unless all have the shapes and dtypes below, for a policy that route_forward takes."""
    rows, count = scores.shape[0], scores.shape[-1]
    check_policy(policy, count)
    require(
        "route", scores, ("scores", scores, (rows, count), (torch.float32, torch.float64)),
        ("dweights", dweights, (rows, policy.k), (scores.dtype,)),
        ("experts", experts, (rows, policy.k), (torch.int32,)), ("dshares", dshares, (rows, count), (scores.dtype,)),
    )  # fmt: skip
    require_within("experts", experts, 0, count)


def route_forward(logits: Tensor, policy: Policy, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(experts, weights, scores) of each token.

    Math:     scores s = softmax(logits) or sigmoid(logits). The experts are the K with the largest s + bias among the
              groups that are allowed; of equal ones those with lower indices. They are listed in ascending order.
              weights = scale * s[experts], divided by the sum of s[experts] if normalised. The bias does not enter them
    Shapes:   logits (M, E), bias (E,) of the same dtype; experts (M, K) int32; weights (M, K), scores (M, E)
    Numerics: in the dtype of the logits, which is float32 or float64
    Traffic:  route_cost
    Source:   Shazeer et al. 2017 (arXiv:1701.06538); bias: Wang et al. 2024 (arXiv:2408.15664); sigmoid and groups:
              DeepSeek-V3 (arXiv:2412.19437)
    """
    check_operands(logits, policy, bias)
    scores = logits.softmax(1) if policy.score == "softmax" else logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    if policy.top_groups < policy.groups:
        grouped = chosen_by.unflatten(1, (policy.groups, -1))
        best = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _first(best, policy.top_groups), True)
        chosen_by = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    experts = _first(chosen_by, policy.k).sort(1).values
    weights = scores.gather(1, experts)
    if policy.normalised:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return experts.to(torch.int32), weights * policy.scale, scores


def _first(values: Tensor, k: int) -> Tensor:
    """Indices (M, k) of the k largest values of each row, of equal ones the first: torch.topk promises no order."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]


def route_backward(
    dweights: Tensor, experts: Tensor, scores: Tensor, policy: Policy, dshares: Tensor | None = None
) -> Tensor:
    """The gradient of the logits (M, E), from those of the weights (M, K) and of each score's share of its row's sum.

    The choice of experts has no gradient.
    Math:     normalised: ds[e_k] = scale / S * (dw_k - sum_j dw_j s[e_j] / S), S = sum_j s[e_j]; else scale * dw_k.
              dshares (M, E): ds += (dshares - sum_e dshares_e s_e / P) / P, P = sum_e s_e.
              Then softmax s * (ds - sum_e ds_e s_e), or sigmoid s * (1 - s) * ds
    Shapes:   experts and scores as route_forward gives them
    """
    check_gradients(dweights, experts, scores, policy, dshares)
    index = experts.long()
    chosen = dweights * policy.scale
    if policy.normalised:
        picked = scores.gather(1, index)
        total = picked.sum(1, keepdim=True) + LEAST_SUM
        chosen = (chosen - (chosen * picked).sum(1, keepdim=True) / total) / total
    dscores = torch.zeros_like(scores).scatter_(1, index, chosen)
    if dshares is not None:
        total = scores.sum(1, keepdim=True) + LEAST_SUM
        dscores += (dshares - (dshares * scores).sum(1, keepdim=True) / total) / total
    if policy.score == "sigmoid":
        return dscores * scores * (1 - scores)
    return scores * (dscores - (dscores * scores).sum(1, keepdim=True))


def shares(scores: Tensor) -> Tensor:
    """Each score's share of its row's sum (M, E), which the balance loss takes the mean of."""
    return scores / (scores.sum(1, keepdim=True) + LEAST_SUM)


def route_cost(m: int, experts: int, k: int, backward: bool = False, itemsize: int = 4) -> Cost:
    """Forward reads the logits and writes scores, weights and indices. Backward reads scores, weights' gradients and
    indices, and writes the logits' gradients. FLOPs: 5 for each score, and a comparison for each expert chosen."""
    chosen = k * (itemsize + 4)
    return Cost(m * experts * (5 + (0 if backward else k)), m * (2 * experts * itemsize + chosen))
