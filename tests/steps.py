"""One forward and backward of a module: its result and gradients, put together from ranks.

Belongs here: what tests of modules on one rank and on several share. tests/ops/shards.py is the same for operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import reduce_partial_gradients

Results = dict[str, Tensor | None]


def gradients(module: nn.Module, partial: Sequence[str] = ()) -> Results:
    """Whole gradients by name. partial: names of a user's own parameters whose gradients are summed, too."""
    reduce_partial_gradients(module, partial=partial)
    return {name: full_tensor(p.grad) for name, p in module.named_parameters()}


def step(module: nn.Module, x: Tensor, dy: Tensor, *, partial: Sequence[str] = (), **options: Any) -> Results:
    """Return y, dx and the gradients of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(module, partial)


def with_keys_in_one(results: Results) -> Results:
    """Join the gradients of each k_proj: its bias has one of zero but for rounding, in proportion to its weight's."""
    found = dict(results)
    for bias in [name for name in results if name.endswith("k_proj.bias")]:
        weight = bias.removesuffix("bias") + "weight"
        found[weight] = torch.cat([found[weight].flatten(), found.pop(bias).flatten()])
    return found


def joined(by_rank: list[Results], dim: int) -> list[Results]:
    """Each rank's results with the whole y and dx, of which the ranks had slices along dim."""
    rows = {name: torch.cat([each[name] for each in by_rank], dim) for name in ("y", "dx")}
    return [each | rows for each in by_rank]
