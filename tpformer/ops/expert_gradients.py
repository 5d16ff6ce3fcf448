"""What the backwards of `experts` and `exchanged_experts` have in common: the gradients of a router and of a norm.

Belongs here: gradients that a rank makes from its own rows. Nothing here communicates.
"""

from __future__ import annotations

from torch import Tensor

from tpformer.kernels.cast import cast
from tpformer.kernels.norm.reference import Statistics

from .implementation import implementation
from .norm import Norm
from .packing import unpacked
from .route import Decided, Policy, decide_backward
from .transports.products import Products


def routing_gradients(
    own: Tensor,
    drows: Tensor | None,
    dbalance: Tensor | None,
    decided: Decided,
    rows: Tensor,
    router_weight: Tensor,
    policy: Policy,
) -> tuple[Tensor | None, Tensor]:
    """(drows with the router's part, gradient of the router's weight), from the gradient `own` (M, K) of weights."""
    drouted, drouter = decide_backward(own, dbalance, decided, rows, router_weight, policy)
    if drows is not None:
        drows = cast(drouted.add_(drows), drows.dtype)
    return drows, cast(drouter, router_weight.dtype)


def norm_rebuilt(x: Tensor, norm: Norm | None, statistics: Statistics) -> Tensor:
    """norm(x), made again from an x that may be packed; x itself without a norm."""
    return unpacked(x) if norm is None else implementation("norm", x).norm_rebuilt(x, statistics, norm)


def norm_gradients(
    drows: Tensor | None, dcarried: Tensor | None, x: Tensor, norm: Norm | None, statistics: Statistics,
    products: Products, private: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of (x, norm weight, norm bias) from that of norm(x), which may be overwritten. dcarried: that of x as
    the residual; it is added. private: as of column_linear."""
    if norm is not None and drows is not None:
        return products.norm_gradients(drows, x, statistics, norm, dcarried, private)
    if drows is not None and dcarried is not None:
        drows += dcarried
    return drows, None, None
