"""LoRA adapters of PEFT on linears that are tensor-parallel in place.

Belongs here: how an adapter's two matrices follow the linear that they adapt. PEFT is recognised by its attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

import torch
from torch import nn

from tpformer.distributed.collectives import all_reduce
from tpformer.layers import ColumnParallelLinear, ParallelModule, RowParallelLinear, TensorParallel

from .linears import make_column, make_row
from .ranks import check_equal
from .regions import is_adapted
from .tensors import globalize

LINEARS = (ColumnParallelLinear, RowParallelLinear)
ON_WHOLE_ROWS = ("LN_TUNING", "PROMPT_TUNING", "P_TUNING")  # what touches only values that every rank has whole
# fields of PEFT's LoraConfig that leave its adapters two matrices each, around linears
PLAIN = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "megatron_core", "qalora_group_size", "runtime_config", "lora_bias",
)  # fmt: skip
FOLLOWED = "_tpformer_follows"  # marks what follow_peft has put in the place of PEFT's method


def cut_adapters(model: nn.Module, configs: Mapping[str, Any] | None = None) -> None:
    """Cut the adapters of all linears that are cut, where they are not yet. configs: of the adapters, by name.

    A column-parallel linear's lora_B gets the same output features, its lora_A stays whole; a row-parallel linear's
    lora_A gets the same input features, its lora_B stays whole. A matrix that PEFT has made for one rank's features,
    because the linear was cut before, is made anew for all of them.
    Errors:  ValueError for variants such as DoRA, for adapted linears on sequence shards, and for adapters that have
             been added to a model that was cut, and of which that is not known to be right.
    """
    given = (getattr(part, "peft_config", None) for part in model.modules())
    configs = configs or next((each for each in given if isinstance(each, Mapping)), {})
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    found = {name: module for name, module in adapted.items() if isinstance(module.base_layer, LINEARS)}
    for name, module in found.items():
        base = module.base_layer
        if not _is_plain(module):
            raise ValueError(
                f"{name} is adapted by a variant of LoRA ({type(module).__name__}): on several ranks only plain LoRA "
                f"around linears is right"
            )
        if base.tp.sharded:
            raise ValueError(
                f"{name} is adapted by LoRA and works on sequence shards: leave sequence_parallel out, because the "
                f"adapter's gradients would be those of one rank's tokens"
            )
        for adapter, part in _matrices(module).items():
            if isinstance(part, ParallelModule):
                continue
            if isinstance(base, ColumnParallelLinear):
                _whole(module, adapter, part, part.in_features, base.out_features, configs)
                make_column(part, base.tp, rows=base.rows, gather_output=base.gather_output)
            else:
                _whole(module, adapter, part, base.in_features, part.out_features, configs)
                make_row(part, base.tp, split_input=not base.input_is_parallel)
        module.in_features, module.out_features = base.in_features, base.out_features


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA around a linear, or derives from it, as under FSDP2, and no variant of it."""
    if getattr(module, "lora_variant", None) or len(getattr(module, "lora_magnitude_vector", ())):
        return False
    return any((own.__module__, own.__name__) == ("peft.tuners.lora.layer", "Linear") for own in type(module).__mro__)


def _matrices(module: nn.Module) -> nn.ModuleDict:
    """The matrices of all adapters of a linear that is cut, as far as they have to be cut with it."""
    return module.lora_B if isinstance(module.base_layer, ColumnParallelLinear) else module.lora_A


def _whole(module: nn.Module, adapter: str, part: nn.Linear, k: int, n: int, configs: Mapping[str, Any]) -> None:
    if (part.in_features, part.out_features) == (k, n):
        return
    if adapter not in configs:
        raise ValueError(
            f"the adapter {adapter} was made for one rank's features: call get_peft_model before parallelize"
        )
    check_config(configs[adapter], module.base_layer.tp)
    _make_whole(module, adapter, part, k, n, configs[adapter].init_lora_weights)


def cuts_adapters(module: nn.Module) -> bool:
    """Whether all adapters in a module that took the place of a cut linear are cut."""
    if not is_adapted(module) or not isinstance(module.base_layer, LINEARS):
        return True
    return all(isinstance(part, ParallelModule) for part in _matrices(module).values())


@torch.no_grad()
def _make_whole(module: nn.Module, adapter: str, part: nn.Linear, k: int, n: int, first_values: Any) -> None:
    """Give lora_A or lora_B, made for one rank's features, all of them, and PEFT's first values, equal on all ranks."""
    seed = torch.randint(2**31, (1,)).to(part.weight.device)
    seed = int(all_reduce(seed, module.base_layer.tp.group, "max"))
    options = {"bias": part.bias is not None, "device": part.weight.device, "dtype": part.weight.dtype}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        whole, matrices = nn.Linear(k, n, **options | {"device": "cpu"}), (module.lora_A, module.lora_B)
        held = [each[adapter] for each in matrices]
        for each in matrices:
            if each[adapter] is part:
                each[adapter] = whole
        module.reset_lora_parameters(adapter, first_values)
        for each, before in zip(matrices, held, strict=True):
            each[adapter] = before
    for name, value in whole.named_parameters():
        own = part.get_parameter(name)
        setattr(part, name, nn.Parameter(value.to(own), requires_grad=own.requires_grad))
    part.in_features, part.out_features = k, n


def unknown(config: Any, tp: TensorParallel) -> str | None:
    """What of an adapter's config is not known to be right on a model that has been cut already; None if all is."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind in ON_WHOLE_ROWS and not tp.sharded:
        return None
    if kind != "LORA" or tp.sharded:
        return type(config).__name__ + ", with sequence_parallel=True" * tp.sharded
    if config.init_lora_weights not in (True, False, "gaussian"):
        return f"LoraConfig(init_lora_weights={config.init_lora_weights!r})"
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in PLAIN and value and value != field.default:
            return f"LoraConfig({field.name}={value!r})"
    return None


def check_config(config: Any, tp: TensorParallel) -> None:
    """ValueError for an adapter that cannot be added to a model that has been cut already."""
    what = unknown(config, tp)
    if what is not None:
        raise ValueError(
            f"{what} for a model that is tensor-parallel already: it would be made for one rank's features; call "
            f"get_peft_model before parallelize"
        )


def follow_peft() -> None:
    """Let PEFT, if it has been imported, ask before it adds adapters to a cut model, and cut those that it added.

    Its first values for some adapters are computed from the weights that it adapts, and end the process if these are
    DTensors. Weights that it loads next are for all features, so adapters are cut before.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None or hasattr(tuners.BaseTuner.inject_adapter, FOLLOWED):
        return
    own = tuners.BaseTuner.inject_adapter

    @wraps(own)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        part = next((each for each in model.modules() if getattr(each, "guard", None) is not None), None)
        if part is not None:
            check_config(self.peft_config[adapter_name], part.tp)
        own(self, model, adapter_name, *args, **kwargs)
        if part is not None:
            cut_adapters(model, self.peft_config)
            check_equal(dict(model.named_parameters()), part.tp)
            globalize(model, part.tp.mesh)

    setattr(inject_adapter, FOLLOWED, True)
    tuners.BaseTuner.inject_adapter = inject_adapter
