"""Models whose parameters have no values yet, and the values from safetensors files: each rank reads its own part.

Belongs here: parameters_on_meta, load_sharded, and how names in files become names in a model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from tpformer.weights.files import TensorFiles
from tpformer.weights.tensors import equal_on_disk, own_part
from tpformer.words import listed

from .tensors import parameter_from

META_COPY = "_meta_copy"  # on a parameter: the one without values that has taken its place


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, every parameter that a module is given has a shape and a dtype, but no values; buffers have values.

    For a model that no rank can hold as a whole: build it here, parallelize it, then fill it by load_sharded. Buffers,
    such as the frequencies of rotary positions, are in no file and stay real. Parameters that were one stay one.
    """

    def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        if not hasattr(parameter, META_COPY):
            copy = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            setattr(parameter, META_COPY, copy)
        return getattr(parameter, META_COPY)

    handle = register_module_parameter_registration_hook(without_values)
    try:
        yield
    finally:
        handle.remove()


class _Converted(NamedTuple):
    """Tensors of the files that transformers makes others of: [(name in the files, pattern that it matched)]."""

    converter: Any
    sources: list[tuple[str, str]]

    def targets(self, first: str, model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """{name in the model: tensor}, made of {name in the files: tensor} by transformers' own converter."""
        converter = deepcopy(self.converter)
        for source, pattern in self.sources:
            converter.add_tensor(first, source, pattern, values[source])
        try:
            made = converter.convert(first, model=model, config=model.config)
        except Exception as error:  # theirs, of any kind
            names = listed({source for source, _ in self.sources})
            raise ValueError(f"transformers cannot make {first} of {names}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@torch.no_grad()
def load_sharded(model: nn.Module, directory: str | Path) -> None:
    """Fill a model from a directory with model.safetensors, or with several files and model.safetensors.index.json.

    Each rank reads the slices of its own shards, in any layout (tensor-parallel, and FSDP2 before the first forward),
    so that no rank ever holds the whole. Parameters without values get them on their mesh's kind of device, else on
    torch's default device; others are filled in place. All are converted to the parameters' own dtypes.
    Names: those of model.state_dict(), with or without model.base_model_prefix. For a model of transformers also those
    that its from_pretrained knows; a tensor that transformers makes of others (the experts of Mixtral) is made whole,
    one at a time, before its part is kept. One name of several that are tied is enough.
    Communicates nothing.
    Errors, with names and before anything changes: FileNotFoundError and ValueError for files that are missing or
             damaged (TensorFiles); ValueError for tensors that are missing, unexpected or of another shape, for tied
             ones that differ in the files, and for buffers without values.
    """
    files = TensorFiles(Path(directory), integers=True)
    wanted = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    if empty := {name for name, buffer in model.named_buffers() if buffer.is_meta}:
        raise ValueError(
            f"the buffers {listed(empty)} have no values, and files do not have all buffers: build the model within "
            f"parameters_on_meta(), which leaves buffers real"
        )
    found, converted, unexpected = _named(model, files, wanted)
    shapes = {name: files.specs[key].shape for name, key in found.items()}
    for first, each in converted.items():
        empty_ones = {key: torch.empty(files.specs[key].shape, device="meta") for key, _ in each.sources}
        shapes |= {name: tuple(value.shape) for name, value in each.targets(first, model, empty_ones).items()}
    _check(model, files, wanted, shapes, unexpected)
    for name, key in found.items():
        if files.specs[key].dtype.is_floating_point != wanted[name].is_floating_point():
            raise ValueError(f"{files.directory} has {name} in {files.specs[key].dtype}, not {wanted[name].dtype}")
    filled: dict[int, str] = {}
    for name, key in found.items():
        if (first := filled.setdefault(id(wanted[name]), name)) != name and not equal_on_disk(files, key, found[first]):
            raise ValueError(f"{name} and {first} are tied in the model, but differ in {files.directory}: untie them")
    targets = _with_values(model, wanted)
    for name in filled.values():
        _fill(targets[name], files.slice(found[name]))
    for first, each in converted.items():
        whole = {key: files.slice(key)[...] for key, _ in each.sources}
        for name, value in each.targets(first, model, whole).items():
            _fill(targets[name], value)


def _fill(target: Tensor, values: Any) -> None:
    """Fill this rank's part of a parameter or buffer from what can be sliced as the whole."""
    local, offsets = own_part(target)
    if local.numel():
        local.copy_(
            values[tuple(slice(start, start + n) for start, n in zip(offsets, local.shape, strict=True)) or ...]
        )


def _named(
    model: nn.Module, files: TensorFiles, wanted: dict[str, Tensor]
) -> tuple[dict[str, str], dict[str, _Converted], set[str]]:
    """({name in the model: name in the files}, {first of the names made: what of}, names that are nowhere used).

    A model of transformers has its library loaded, so that library's own functions say what its files' names mean.
    """
    prefix = getattr(model, "base_model_prefix", None)
    loading: Any = sys.modules.get("transformers.core_model_loading")
    mapping: Any = sys.modules.get("transformers.conversion_mapping")
    theirs = prefix is not None and hasattr(loading, "rename_source_key")
    conversions = mapping.get_model_conversion_mapping(model) if theirs else []
    converters = [each for each in conversions if hasattr(each, "operations")]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    renamings = [each for each in conversions if not hasattr(each, "operations")]
    found: dict[str, str] = {}
    converted: dict[str, _Converted] = {}
    unexpected = set()
    for key in sorted(files.specs, key=loading.dot_natural_key if theirs else None):
        renamed, pattern = key, None
        if theirs:
            renamed, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
            if renamed not in wanted:
                renamed, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
        if renamed not in wanted:
            unexpected.add(key)
        elif pattern is not None:
            converted.setdefault(renamed, _Converted(by_pattern[pattern], [])).sources.append((key, pattern))
        elif renamed in found:
            raise ValueError(f"{files.directory} has {found[renamed]} and {key}, which are the same tensor")
        else:
            found[renamed] = key
    return found, converted, unexpected


def _check(
    model: nn.Module,
    files: TensorFiles,
    wanted: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    unexpected: set[str],
) -> None:
    """ValueError, with names, unless the tensors that were found are those that the model wants."""
    passed = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if strange := {key for key in unexpected if not any(re.search(pattern, key) for pattern in passed)}:
        raise ValueError(f"{files.directory} has {listed(strange)}, which no part of this {type(model).__name__} takes")
    present = {id(wanted[name]) for name in shapes if name in wanted}
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    buffers = {name for name, _ in model.named_buffers() if any(re.search(pattern, name) for pattern in optional)}
    if missing := {name for name, value in wanted.items() if id(value) not in present} - buffers:
        raise ValueError(f"{files.directory} has no {listed(missing)}, which this {type(model).__name__} needs")
    for name, shape in shapes.items():
        if name in wanted and (needed := tuple(wanted[name].shape)) != tuple(shape):
            raise ValueError(f"{files.directory} has {name} as {tuple(shape)}, but this model has it as {needed}")


def _with_values(model: nn.Module, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `wanted`; those on meta are replaced in the model by ones that have memory."""
    meshes = [value.device_mesh for value in wanted.values() if isinstance(value, DTensor)]
    default = torch.get_default_device()
    device = meshes[0].device_type if meshes and default.type == "cpu" else default
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta and id(parameter) not in made:
                made[id(parameter)] = parameter_from(_empty(parameter, device), parameter)
            if parameter.is_meta:
                setattr(module, name, made[id(parameter)])
    return {name: made.get(id(value), value) for name, value in wanted.items()}


def _empty(parameter: Tensor, device: torch.device | str) -> Tensor:
    """Memory for this rank's part of a parameter, laid out as the parameter is."""
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device)
    local = torch.empty_like(parameter.to_local(), device=device)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
