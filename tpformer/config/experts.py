"""Checks of the settings of a mixture of experts: those that contradict each other.

Belongs here: what the fields of GPTConfig about experts and routers must have in common, and with a layout.
"""

from typing import Any

from .checks import check_choice, check_positive

ROUTER_SCORES = ("softmax", "sigmoid")
GATED = ("swiglu", "geglu")


def check_experts(config: Any) -> None:
    """ValueError, with the numbers and the remedy, for a GPTConfig whose experts or router cannot be built."""
    if config.n_experts is None:
        _check_unused(config)
        return
    check_router(
        config.n_experts, config.experts_per_token, config.router_score, config.router_groups, config.router_top_groups
    )
    if config.activation not in GATED:
        raise ValueError(
            f"experts have gated activations, and activation={config.activation!r} is not: set it to one of "
            f"{', '.join(GATED)}"
        )
    if config.bias:
        raise ValueError(
            "experts have no biases, and bias=True: set bias=False; qkv_bias=True keeps those of queries, keys and "
            "values"
        )
    if config.first_dense_layers >= config.n_layers:
        raise ValueError(
            f"first_dense_layers={config.first_dense_layers} of n_layers={config.n_layers} leave no layer with "
            f"experts: lower it, or leave n_experts unset"
        )


def _check_unused(config: Any) -> None:
    """ValueError for a setting of experts that would do nothing, because there are none."""
    given = {
        "experts_per_token": config.experts_per_token != 2,
        "expert_ffn_size": config.expert_ffn_size is not None,
        "shared_expert_size": config.shared_expert_size > 0,
        "first_dense_layers": config.first_dense_layers > 0,
        "router_score": config.router_score != "softmax",
        "router_normalised": not config.router_normalised,
        "router_scale": config.router_scale != 1,
        "router_bias": config.router_bias,
        "router_groups": config.router_groups > 1,
        "router_top_groups": config.router_top_groups > 1,
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name}={getattr(config, name)} without experts would do nothing: set n_experts")


def check_router(experts: int, k: int, score: str, groups: int, top_groups: int) -> None:
    """ValueError, with the numbers and the remedy, unless a router can choose k of the experts in this way."""
    check_choice("router_score", score, ROUTER_SCORES)
    check_positive(n_experts=experts, experts_per_token=k, router_groups=groups, router_top_groups=top_groups)
    if k > experts:
        raise ValueError(f"experts_per_token={k} of n_experts={experts}: choose at most {experts}")
    if experts % groups:
        raise ValueError(f"n_experts={experts} cannot be divided into router_groups={groups} equal groups: change one")
    if top_groups > groups:
        raise ValueError(f"router_top_groups={top_groups} of router_groups={groups}: choose at most {groups}")
    if k > top_groups * (experts // groups):
        raise ValueError(
            f"experts_per_token={k} cannot be chosen from router_top_groups={top_groups} groups of {experts // groups} "
            f"experts: raise router_top_groups, or lower experts_per_token or router_groups"
        )


def check_expert_ranks(experts: int, ranks: int, name: str = "tensor_parallel") -> None:
    """ValueError unless so many ranks can hold the same number of whole experts each. name: the key that sets them."""
    if experts % ranks:
        fitting = [n for n in range(1, experts + 1) if experts % n == 0]
        exchange = ", or expert_parallel, whose ranks exchange tokens" if name == "tensor_parallel" else ""
        raise ValueError(
            f"n_experts={experts} cannot be divided among {name}={ranks} ranks, which hold whole experts: choose "
            f"{name}{exchange}, from {fitting}"
        )
