"""The tensors of a checkpoint by their global names, and what is checked of them.

Belongs here: what a model part, its optimizer and its exchange hold that has to be saved. Files are in
checkpoint_files.py, saving and loading in checkpoint.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpformer.parallel import Exchange, local_part
from tpformer.torch_private import foreach_norm
from tpformer.words import listed

from .checkpoint_files import MODEL, OPTIMIZER, REPLICA, SUMS, read_tensors, saved_tensors
from .checkpoint_metadata import CheckpointError
from .updates import LocalUpdate


def first_not_finite(parts: Sequence[nn.Module]) -> str | None:
    """The first parameter of which this rank holds a value that is not finite, or None.

    Cost: one pass over the parameters, in one launch for each device and dtype, and one wait for each device.
    """
    held = {name: local_part(x.detach()) for part in parts for name, x in part.named_parameters()}
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in held.items():
        if tensor.numel() and tensor.is_floating_point():
            by_device[tensor.device][name] = tensor
    for tensors in by_device.values():
        # the largest absolute value cannot overflow, as a sum could
        largest = torch.stack([norm.double() for norm in foreach_norm(list(tensors.values()), math.inf)])
        for name, value in zip(tensors, largest.tolist(), strict=True):
            if not math.isfinite(value):
                return name
    return None


def named_parameters(part: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """(name in the part, parameter) in the optimizer's order. ValueError for a parameter that is not in the part."""
    names = {id(parameter): name for name, parameter in part.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        raise ValueError("an optimizer has parameters that its model part does not have: give both in the same order")
    return [(names[id(parameter)], parameter) for parameter in parameters]


def model_tensors(part: nn.Module) -> dict[str, Tensor]:
    """A part's parameters and buffers by global name. They share memory with the part; DTensors stay DTensors."""
    return {MODEL + name: value for name, value in part.state_dict().items() if isinstance(value, Tensor)}


def optimizer_tensors(part: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by global name. ValueError for a value that is no tensor."""
    found = {
        f"{OPTIMIZER}{name}.{key}": value
        for name, parameter in named_parameters(part, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if wrong := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{listed(wrong)} cannot be saved: only tensors can, which load without running anything")
    return found


def check_pairs(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """ValueError unless each part has an optimizer."""
    if len(optimizers) != len(parts):
        raise ValueError(f"{len(optimizers)} optimizers for {len(parts)} model parts: give each part its own, in order")


def load_optimizer(path: Path, part: nn.Module, optimizer: Optimizer, prefix: str = "") -> None:
    """Replace the optimizer's state by the saved state of its parameters. Its hyperparameters stay as they are.

    prefix: of_replica's, where the states of several are saved.
    """
    saved: dict[str, dict[str, Any]] = defaultdict(dict)
    for full, entry in saved_tensors(path, prefix + OPTIMIZER).items():
        parameter, _, key = full.rpartition(".")
        saved[parameter][key] = entry
    state: dict[int, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(named_parameters(part, optimizer)):
        known = optimizer.state_names(parameter) if isinstance(optimizer, LocalUpdate) else saved.get(name, {}).keys()
        if other := saved.get(name, {}).keys() - set(known):
            raise CheckpointError(
                f"{path} holds {listed(sorted(other))} of {name}, which another optimizer has kept: go on with that "
                f"one (optimizer.name), or start a new run from the weights (model.init_from)"
            )
        state[number] = {
            key: torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
            if entry.size == parameter.shape
            else torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in saved.get(name, {}).items()
        }
        tensors |= {f"{prefix}{OPTIMIZER}{name}.{key}": value for key, value in state[number].items()}
    read_tensors(path, tensors)
    # torch moves what is not laid out as the parameter (AdamW's counter) to the device that its kernels need
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def state_tensors(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], exchange: Exchange) -> dict[str, Tensor]:
    """All that this rank saves, by global name: the model, which all replicas have in common, and the optimizers' and
    the exchange's state. Where replicas take steps by themselves, each has an optimizer's state of its own, and its own
    variant of the model unless that is the common one now."""
    own = dict[str, Tensor]()
    for part, optimizer in zip(parts, optimizers, strict=True):
        own |= model_tensors(part) | optimizer_tensors(part, optimizer)
    common = {MODEL + name: value for name, value in exchange.common().items()}
    if exchange.replica is not None:
        prefix, shared = of_replica(exchange.replica[0]), {name for name in own if name.startswith(MODEL)}
        shared -= common.keys() if exchange.apart else set()
        own = {name if name in shared else prefix + name: value for name, value in own.items()}
    return own | common | {SUMS + name: value for name, value in exchange.state().items()}


def of_replica(replica: int) -> str:
    """What the names of a replica's own tensors begin with."""
    return f"{REPLICA}{replica}."


def saved_replicas(path: Path) -> int:
    """How many replicas have tensors of their own in a checkpoint."""
    return 1 + max((int(name.partition(".")[0]) for name in saved_tensors(path, REPLICA)), default=-1)


def replicas_note(path: Path, exchange: Exchange | None) -> str | None:
    """A sentence, if a checkpoint has other replicas with an optimizer's state of their own than are here; else
    None."""
    here, saved = 0 if exchange is None or exchange.replica is None else exchange.replica[1], saved_replicas(path)
    if saved in (0, here):
        return None
    who = f"replica r of {here} takes that of r modulo {saved}" if here else "all ranks take that of replica 0"
    return f"{path} has an optimizer's state for each of {saved} replicas: {who}"


def load_own(path: Path, part: nn.Module, prefix: str) -> None:
    """Replace what a replica has of its own of a part's parameters and buffers, if anything."""
    saved = saved_tensors(path, prefix + MODEL)
    tensors = {prefix + name: value for name, value in model_tensors(part).items()}
    read_tensors(path, {name: value for name, value in tensors.items() if name.removeprefix(prefix + MODEL) in saved})


def load_exchange(path: Path, exchange: Exchange, step: int) -> None:
    """Give an exchange what the checkpoint has of it. step: that of the checkpoint. CheckpointError if it is of another
    layout, or of other rounds."""
    saved = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in saved_tensors(path, SUMS).items()
    }
    try:
        taken = exchange.load(saved)
        read_tensors(path, {SUMS + name: value for name, value in taken.items()})
        exchange.at(step)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from None
