"""Which slice of which tensor of theirs is which parameter of ours, checked as a whole and then read slice by slice.

Belongs here: places of tensors, the checks of names and shapes, and the filling of parameters in any layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpformer.config import GPTConfig
from tpformer.models import GPT
from tpformer.words import listed

from .family import Family, Tensors
from .files import Spec, TensorFiles

HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
ROWS = 2**12  # of two tables that are compared at a time


class Place(NamedTuple):
    """The place of a block of one of our parameters in a tensor of theirs: the rows from `first` on, once the tensor is
    transposed if it has to be.

    shape:   the block's, without the padding of a vocabulary.
    begin:   where the block begins in the parameter.
    of_expert: the parameter stacks experts, the block is one expert's, and their tensor has no dim for experts.
             Otherwise the block is the whole parameter.
    """

    theirs: str
    first: int
    shape: tuple[int, ...]
    transposed: bool
    begin: tuple[int, ...]
    of_expert: bool = False

    def slice(self, values: Any, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The part of the block between bounds of each dim, from what can be sliced as theirs."""
        (start, stop), *rest = bounds[1:] if self.of_expert else bounds
        dims = [slice(self.first + start, self.first + stop), *(slice(*bound) for bound in rest)]
        found = values[tuple(reversed(dims))].T if self.transposed else values[tuple(dims)]
        return found[None] if self.of_expert else found

    def whole(self, values: Any) -> Tensor:
        """All of the block, from what can be sliced as theirs."""
        return self.slice(values, [(0, size) for size in self.shape])


def parameter_shapes(config: GPTConfig, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """{name: global shape} of a whole model's parameters. padded: vocabulary tables are with their padding."""
    shapes = {name: tuple(tensor.shape) for name, tensor in GPT(config, device="meta").state_dict().items()}
    if padded:
        return shapes
    return shapes | {name: (config.vocab_size or 0, *shapes[name][1:]) for name in (TABLE, HEAD) if name in shapes}


def _rows(family: Family | None, config: GPTConfig) -> list[Tensors]:
    """The family's tensors in the order of its table, with those of a layer for each layer."""
    if family is None:
        return [Tensors(name, (name,)) for name in parameter_shapes(config)]
    return [
        row._replace(theirs=row.theirs.format(i, expert="{}"), ours=tuple(name.format(i) for name in row.ours))
        for in_layers, group in itertools.groupby(family.tensors, key=lambda row: "{}" in row.theirs)
        for rows in [list(group)]
        for i in range(config.n_layers if in_layers else 1)
        for row in rows
    ]


class TensorMap:
    """The tensors of theirs for an architecture, and the places of ours in them. family: None for an export of ours.

    places: {our name: the Places of its blocks}. shapes: {their name: shape}, in the order of the family's table.
    """

    def __init__(self, family: Family | None, config: GPTConfig) -> None:
        self.family, self.config = family, config
        self.places: dict[str, list[Place]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        ours = parameter_shapes(config)
        for row in _rows(family, config):
            if row.ours[0] not in ours:  # such as a bias that this model does not have
                continue
            if row.part is not None:
                self._add_experts(row, ours[row.ours[0]])
                continue
            first = 0
            for name in row.ours:
                begin = (0,) * len(ours[name])
                self.places[name] = [Place(row.theirs, first, ours[name], row.transposed, begin)]
                first += ours[name][0]
            shape = (first, *ours[row.ours[0]][1:])
            self.shapes[row.theirs] = tuple(reversed(shape)) if row.transposed else shape
        if lost := ours.keys() - self.places.keys():
            raise ValueError(f"{family.model_type if family else 'an export'} has no tensors for {listed(lost)}")

    def _add_experts(self, row: Tensors, shape: tuple[int, ...]) -> None:
        """The tensors of a row for each expert, each a block of a parameter that stacks the experts."""
        assert row.part is not None
        index, number = row.part
        experts, rows, columns = shape
        for expert in range(experts):
            theirs, begin = row.theirs.format(expert), (expert, index * rows // number, 0)
            block = Place(theirs, 0, (1, rows // number, columns), row.transposed, begin, of_expert=True)
            self.places.setdefault(row.ours[0], []).append(block)
            self.shapes[theirs] = block.shape[1:]

    def check(self, files: TensorFiles) -> dict[str, str]:
        """{our name for their tensor: its name in the files}. Buffers of the family are passed over.

        ValueError, with names, for tensors that are missing, unknown or of another shape, and for the table of a tied
        head that is another one than the embedding's. Only names and shapes are read, but for that table.
        """
        prefix, buffers = (self.family.prefix, self.family.buffers) if self.family else ("", ())
        skipped = {name.format(i) for name in buffers for i in range(self.config.n_layers)}
        known = self.shapes.keys() | skipped | {HEAD}
        names: dict[str, str] = {}
        for name in files.specs:
            ours = name if name in known or prefix + name not in known else prefix + name
            if ours in names:
                raise ValueError(f"{files.directory} has {names[ours]} and {name}, which are the same tensor")
            names[ours] = name
        if missing := self.shapes.keys() - names.keys():
            more = ", though tie_word_embeddings is false" if missing == {HEAD} else ""
            raise ValueError(f"{files.directory} has no {listed(missing)}{more}: it is incomplete, or of another model")
        if extra := {names[name] for name in names.keys() - known}:
            raise ValueError(f"{files.directory} has {listed(extra)}, which no part of this model takes")
        for name, shape in self.shapes.items():
            if (found := files.specs[names[name]].shape) != shape:
                raise ValueError(f"{files.directory} has {names[name]} as {found}, but config.json makes it {shape}")
        tied = self.config.tie_embeddings and HEAD in names
        if tied and not equal_on_disk(files, names[HEAD], names[self.places[TABLE][0].theirs]):
            raise ValueError(
                f"{files.directory} has a {HEAD} that differs from the embedding's table, though tie_word_embeddings "
                f"is true: set it to false in a copy of config.json if the head is to be used"
            )
        return names


def equal_on_disk(files: TensorFiles, one: str, other: str) -> bool:
    """Whether two tensors on disk are equal, read a few rows at a time."""
    if files.specs[one] != files.specs[other]:
        return False
    a, b = files.slice(one), files.slice(other)
    starts = range(0, files.specs[one].shape[0], ROWS)
    return all(torch.equal(a[first : first + ROWS], b[first : first + ROWS]) for first in starts)


def own_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this process's part of a parameter, where it begins in the whole)."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    chunks = parameter.__create_chunk_list__()
    return parameter.to_local(), tuple(chunks[0].offsets) if chunks else (0,) * parameter.ndim


def overlap(
    local: Tensor, offsets: Sequence[int], shape: Sequence[int], begin: Sequence[int] | None = None
) -> tuple[Tensor, list[tuple[int, int]]] | None:
    """(the part of `local` that a tensor of this shape reaches, its bounds in that tensor); None if it has none.

    begin: where the tensor begins in the whole of which `local` is a part; unset, where that does.
    """
    bounds, there = [], []
    for first, n, size, at in zip(offsets, local.shape, shape, begin or (0,) * local.ndim, strict=True):
        low, high = max(first, at), min(first + n, at + size)
        bounds.append((low - at, high - at))
        there.append(slice(low - first, max(low, high) - first))
    part = local[tuple(there)]
    return (part, bounds) if part.numel() else None


@torch.no_grad()
def fill(parameter: Tensor, places: Sequence[Place], read: Callable[[str], Any]) -> None:
    """Fill this process's part of a parameter, in its dtype, from what `read` can slice as each of their tensors.

    What no tensor of theirs reaches becomes zero: the rows that pad a vocabulary.
    """
    local, offsets = own_part(parameter)
    filled = 0
    for place in places:
        if (reached := overlap(local, offsets, place.shape, place.begin)) is not None:
            part, bounds = reached
            if part.numel() < local.numel() and not filled:
                local.zero_()
            part.copy_(place.slice(read(place.theirs), bounds))
            filled += part.numel()
    if not filled:
        local.zero_()


def load_part(part: GPT, tensors: TensorMap, files: TensorFiles, names: Mapping[str, str]) -> None:
    """Fill a GPT, or a part of one, in place. In any layout each rank reads its own slices. No communication."""
    for name, parameter in part.state_dict().items():
        fill(parameter, tensors.places[name], lambda theirs: files.slice(names[theirs]))


def their_specs(tensors: TensorMap, dtypes: Mapping[str, torch.dtype]) -> dict[str, Spec]:
    """{their name: Spec} for a model whose parameters have these dtypes. ValueError if parts of one tensor differ."""
    found: dict[str, torch.dtype] = {}
    for name, place in ((name, place) for name, places in tensors.places.items() for place in places):
        if found.setdefault(place.theirs, dtypes[name]) != dtypes[name]:
            raise ValueError(
                f"{place.theirs} is made of parameters in {found[place.theirs]} and {dtypes[name]}: give --dtype"
            )
    return {theirs: Spec(shape, found[theirs]) for theirs, shape in tensors.shapes.items()}
