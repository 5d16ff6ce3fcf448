"""LoRA adapters of PEFT on linears that are tensor-parallel in place.

Belongs here: how an adapter's two matrices follow the linear that they adapt. PEFT is recognised by its attributes.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tpformer.distributed.collectives import all_reduce
from tpformer.layers import ColumnParallelLinear, ParallelModule, RowParallelLinear, TensorParallel

from .linears import make_column, make_row
from .regions import is_adapted

LINEARS = (ColumnParallelLinear, RowParallelLinear)


def cut_adapters(model: nn.Module) -> None:
    """Cut the adapters of all linears that are cut, where they are not yet.

    A column-parallel linear's lora_B gets the same output features, its lora_A stays whole; a row-parallel linear's
    lora_A gets the same input features, its lora_B stays whole. A matrix that PEFT has made for one rank's features,
    because the linear was cut before, is made anew for all of them.
    Errors:  ValueError for variants such as DoRA, for adapted linears on sequence shards, and for a matrix to be made
             anew that does not have PEFT's default values.
    """
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    found = {name: module for name, module in adapted.items() if isinstance(module.base_layer, LINEARS)}
    for name, module in found.items():
        base = module.base_layer
        if getattr(module, "lora_variant", None) or len(getattr(module, "lora_magnitude_vector", ())):
            raise ValueError(f"{name} is adapted by a variant of LoRA: on several ranks only plain LoRA is right")
        if base.tp.sharded:
            raise ValueError(
                f"{name} is adapted by LoRA and works on sequence shards: leave sequence_parallel out, because the "
                f"adapter's gradients would be those of one rank's tokens"
            )
        for part in _matrices(module):
            if isinstance(part, ParallelModule):
                continue
            if isinstance(base, ColumnParallelLinear):
                _make_whole(name, part, part.in_features, base.out_features, base.tp)
                make_column(part, base.tp, rows=base.rows, gather_output=base.gather_output)
            else:
                _make_whole(name, part, base.in_features, part.out_features, base.tp)
                make_row(part, base.tp, split_input=not base.input_is_parallel)
        module.in_features, module.out_features = base.in_features, base.out_features


def _matrices(module: nn.Module) -> list[nn.Module]:
    """The matrices of all adapters of a linear that is cut, as far as they have to be cut with it."""
    return list((module.lora_B if isinstance(module.base_layer, ColumnParallelLinear) else module.lora_A).values())


def cuts_adapters(module: nn.Module) -> bool:
    """Whether all adapters in a module that took the place of a cut linear are cut."""
    if not is_adapted(module) or not isinstance(module.base_layer, LINEARS):
        return True
    return all(isinstance(part, ParallelModule) for part in _matrices(module))


@torch.no_grad()
def _make_whole(name: str, part: nn.Linear, k: int, n: int, tp: TensorParallel) -> None:
    """Give lora_A or lora_B, made for one rank's features, all features: PEFT's default values, equal on all ranks."""
    if (part.in_features, part.out_features) == (k, n):
        return
    old = part.weight
    wide = n == part.out_features  # lora_A, which PEFT draws as nn.Linear draws its weight; lora_B and biases are zero
    zero = [x for x in (None if wide else old, part.bias) if x is not None]
    if any(bool(x.any()) for x in zero) or (wide and bool(old.abs().max() > part.in_features**-0.5)):
        raise ValueError(
            f"{name} got an adapter with other than PEFT's default values for one rank's features: call get_peft_model "
            f"before parallelize"
        )
    seed = int(all_reduce(torch.randint(2**31, (1,)).to(old.device), tp.group, "max"))
    weight = torch.zeros(n, k)
    if wide:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    part.in_features, part.out_features = k, n
    part.weight = nn.Parameter(weight.to(old), requires_grad=old.requires_grad)
    if part.bias is not None:
        part.bias = nn.Parameter(part.bias.new_zeros(n), requires_grad=part.bias.requires_grad)
