"""Optimizers that go wrong on shards are refused at their step, whoever made them."""

from functools import cache
from typing import Any

from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpformer.distributed.dtensor import is_dtensor


@cache
def watch_optimizers() -> None:
    """Have every later step of an Adafactor refused on sharded parameters. Nothing happens from the second call on.

    Its step sizes and factored statistics are of whole tensors. torch's takes a shard's own for a vector, without a
    word, and raises from within for a matrix. Optimizers that work by elements, such as AdamW, are exact on shards.
    """
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if all(kind.__name__ != "Adafactor" for kind in type(optimizer).__mro__):  # transformers has one, too
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_dtensor(parameter) and any(place.is_shard() for place in parameter.placements):
                raise ValueError(
                    f"Adafactor cannot step a parameter of {tuple(parameter.shape)} of which each rank holds a shard: "
                    f"its statistics are of whole tensors; use AdamW"
                )
