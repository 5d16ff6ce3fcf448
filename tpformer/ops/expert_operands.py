"""The matrices of `experts`, and what it asks of its operands before anything is sent: shapes, dtypes, devices, and
experts that exist. What it casts under autocast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_range
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.operands import FLOATS, INTEGERS, require, require_within, unknown

from .autocast import cast, cast_back
from .norm import Norm
from .norm import norm as normalise
from .route import Router, Routing
from .weight_gradients import Deferred


class ExpertWeights(NamedTuple):
    """The matrices of this rank's experts, and of its part of the shared expert, if there is one.

    gate_up: (E, 2 F, H), the gate first; down: (E, H, F); shared_gate, shared_up: (F_s, H); shared_down: (H, F_s).
    """

    gate_up: Tensor
    down: Tensor
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None


def check_routing(
    rows: int,
    router_weight: Tensor | None,
    router: Router | None,
    routing: Routing | None,
    parts: int,
) -> None:
    """ValueError unless either a router is given, or a routing of the rows on all ranks, which have so many parts."""
    if (router is None) == (routing is None) or (router is None) != (router_weight is None):
        raise ValueError("experts takes router_weight and router, or a routing that was decided before: give one")
    if routing is not None and len(routing.experts) != rows * parts:
        raise ValueError(
            f"a routing of {len(routing.experts)} tokens for x with {rows} rows on each of {parts} ranks: give that of "
            f"all {rows * parts} tokens, in the order of ranks"
        )


def check_options(
    activation: str,
    dropout: Dropout | None,
    routing: Routing | None,
    n_experts: int,
    own: int,
    group: ProcessGroup | None,
) -> None:
    """ValueError for an unknown activation, dropout outside of [0, 1), matrices of another number of experts than this
    rank has, and on a CPU for an expert that does not exist."""
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if dropout is not None:
        check_range("model.dropout", dropout.p, "dropout")
    ranks = 1 if group is None else group.size()
    if own * ranks != n_experts:
        raise ValueError(
            f"matrices of {own} experts on each of {ranks} ranks, n_experts={n_experts}: give each its part"
        )
    if routing is not None:
        require_within("experts", routing.experts, 0, n_experts)


def check_operands(
    rows: Tensor, matrices: ExpertWeights, routing: Routing | None, router_weight: Tensor | None, finish: Finish,
    n_experts: int, autocast: torch.dtype | None,
) -> None:  # fmt: skip
    """ValueError unless all operands are as `experts` says, of rows (tokens / t, H)."""
    own, h, f = (rows.dtype,), rows.shape[-1], matrices.down.shape[-1]
    count, of_shared = matrices.gate_up.shape[0], 0 if matrices.shared_down is None else matrices.shared_down.shape[-1]
    finish.check("experts", rows)
    require(
        "experts", rows, ("x", rows, (rows.shape[0], h), FLOATS), ("gate_up", matrices.gate_up, (count, 2 * f, h), own),
        ("down", matrices.down, (count, h, f), own), ("shared_gate", matrices.shared_gate, (of_shared, h), own),
        ("shared_up", matrices.shared_up, (of_shared, h), own),
        ("shared_down", matrices.shared_down, (h, of_shared), own),
        ("router_weight", router_weight, (n_experts, h), FLOATS),
        ("residual", finish.residual, rows.shape, own if autocast is None else FLOATS),
    )  # fmt: skip
    if routing is not None:
        shape = (routing.experts.shape[0], routing.experts.shape[-1])
        require(
            "experts", rows, ("the routing's experts", routing.experts, shape, INTEGERS),
            ("the routing's weights", routing.weights, shape, FLOATS),
        )  # fmt: skip


def in_autocast(
    dtype: torch.dtype, rows: Tensor, matrices: ExpertWeights, norm: Norm | None, deferred: Deferred | None
) -> tuple[Tensor, ExpertWeights, Deferred | None]:
    """norm(rows), the matrices and where their gradients go, in autocast's dtype."""
    deferred = cast_back(deferred, [each for each in matrices if each is not None])
    rows = cast(rows if norm is None else normalise(rows, norm), dtype)
    return rows, ExpertWeights(*(cast(each, dtype) for each in matrices)), deferred


def within(routing: Routing, n_experts: int) -> Routing:
    """The routing, in which a choice of an expert that does not exist is one of expert 0 with weight NaN: so its token
    becomes NaN, and nobody waits for a device. `experts` has refused it where that takes no wait."""
    known = (routing.experts >= 0) & (routing.experts < n_experts)
    return Routing(torch.where(known, routing.experts, 0), routing.weights.masked_fill(~known, torch.nan))
