"""What a step says about experts: how many tokens each one had, and the biases that follow from that.

Belongs here: loads of the global batch, equal in every layout, and what is logged of them and of routers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpformer.config import GPTConfig, RunConfig
from tpformer.distributed import all_reduce
from tpformer.layers.router import Router, routers

from .model import ModelParts


def _routers_of_layers(model: ModelParts) -> dict[int, Router]:
    """The routers of this rank's layers, by the layer's index."""
    found = {}
    for part in model.parts:
        for name, layer in part.layers.items():
            for router in routers(layer).values():
                found[int(name)] = router
    return found


def router_notice(config: GPTConfig) -> str | None:
    """A sentence if the loss of tokens cannot teach the router anything, because all weights are 1; else None."""
    if config.n_experts is None or config.experts_per_token > 1 or not config.router_normalised:
        return None
    return (
        "model.experts_per_token=1 with model.router_normalised: the weight of a token's only expert is always 1, so "
        "the router gets no gradient from the loss of tokens; set router_normalised = false to train it"
    )


@torch.no_grad()
def settle_experts(model: ModelParts, skipped: Tensor) -> Tensor | None:
    """(layers * n_experts,) int64: the tokens of each expert in the step's global batch, 0 in layers without experts.

    Moves the routers' biases by them and by model.router_bias_rate, unless the step was skipped (1 in the scalar
    `skipped`). Equal on all ranks; None for a model without experts. Replicas that take steps by themselves each have
    those of their own samples.
    Communication: one all-reduce of 8 bytes an expert and layer per data-parallel, context-parallel and pipeline axis,
    and with expert_parallel over tensor-parallel ranks.
    """
    config = model.config
    if config.n_experts is None:
        return None
    own = _routers_of_layers(model)
    loads = torch.zeros(config.n_layers, config.n_experts, dtype=torch.int64, device=skipped.device)
    for layer, router in own.items():
        if router.load is not None:
            loads[layer] = router.load
    own_tokens = ("tp",) if model.layout.expert_parallel is not None else ()  # else each rank counts those of all
    for axis in ("dp_replicate", "dp_shard", "cp", "pp", *own_tokens):
        loads = all_reduce(loads, model.groups.get(axis))
    for layer, router in own.items():
        router.move_bias(loads[layer], model.router_bias_rate, skipped)
    return loads.flatten()


def _of_layers(config: RunConfig, loads: list[float]) -> dict[int, list[float]]:
    """The loads of each layer that has experts, from those of all layers one after another."""
    n = config.model.n_experts or 0
    layers = range(config.model.first_dense_layers, config.model.n_layers)
    return {layer: loads[layer * n : layer * n + n] for layer in layers}


def load_numbers(config: RunConfig, loads: list[float], samples: int) -> dict[str, float]:
    """What a row of metrics says of the loads of so many samples, which are settle_experts' one after another.

    expert_load: the tokens of the busiest expert over the mean of its layer, in the worst layer. expert_entropy: that
    of the loads over its maximum log(n_experts), the mean over layers; 1 if all experts have as many tokens.
    expert_dropped: tokens times experts of a token, less the loads; 0, as no token is dropped.
    """
    model = config.model
    layers = list(_of_layers(config, loads).values())
    most, entropies, counted = 0.0, [], 0.0
    for load in layers:
        total = sum(load)
        most = max(most, max(load) * len(load) / total)
        shares = [tokens / total for tokens in load if tokens]
        entropy = -sum(share * math.log(share) for share in shares)
        entropies.append(entropy / math.log(len(load)) if len(load) > 1 else 1.0)
        counted += total
    sent = len(layers) * samples * model.seq_length * model.experts_per_token
    return {
        "expert_load": most,
        "expert_entropy": sum(entropies) / len(entropies),
        "expert_dropped": sent - counted,
    }


def named_loads(config: RunConfig, loads: list[float]) -> dict[str, float]:
    """The tokens of each expert, by a name such as "load.layers.3.17"."""
    return {
        f"load.layers.{layer}.{expert}": tokens
        for layer, load in _of_layers(config, loads).items()
        for expert, tokens in enumerate(load)
    }
