"""Optimizers that compute wrong steps on shards are refused when they step, whoever made them."""

from functools import cache
from typing import Any

from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpformer.distributed.dtensor import is_dtensor


@cache
def watch_optimizers() -> None:
    """From now on, refuse every step of an Adafactor on sharded parameters. Later calls do nothing.

    Adafactor's step sizes and factored statistics are those of whole tensors. For a sharded vector torch's Adafactor
    silently takes those of the shard; for a sharded matrix it raises from within. Optimizers that work element by
    element, such as AdamW, are exact.
    """
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if all(kind.__name__ != "Adafactor" for kind in type(optimizer).__mro__):  # transformers has one, too
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_dtensor(parameter) and any(place.is_shard() for place in parameter.placements):
                raise ValueError(
                    f"Adafactor cannot step a parameter of {tuple(parameter.shape)} that is sharded over ranks: "
                    f"its statistics are of whole tensors; use AdamW"
                )
