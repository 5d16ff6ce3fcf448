"""The ways in which a region might be cut over ranks, the likely ones first.

Belongs here: what a way consists of, and guesses by sizes and names. None is believed: trial.py tries it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from torch import nn

from .alone import SUMMED
from .regions import join

T = TypeVar("T")
Integers = dict[str, dict[str, int]]  # module: {name of an integer: its value}
OTHERS = 3  # as many integers that neither a name nor a size gives away are tried
NO_COUNT = ("dim", "size", "width", "d_head", "d_k")  # in names of integers that are no numbers of heads


@dataclass(frozen=True)
class Cut:
    """How a linear's output features are cut: blocks one after another, (features, parts) each.

    A rank takes one part of every block. With fewer parts than ranks, neighbours share one.
    """

    blocks: tuple[tuple[int, int], ...]

    def rows(self, rank: int, t: int) -> tuple[slice, ...]:
        """The output features of this rank, as slices one after another."""
        first, found = 0, []
        for size, parts in self.blocks:
            width, part = -(-size // parts), rank * parts // t
            found.append(slice(first + part * width, first + min((part + 1) * width, size)))
            first += size
        return tuple(found)

    def is_even(self, t: int) -> bool:
        """Whether each rank has a slice of its own, and these one after another are the whole."""
        return len(self.blocks) == 1 and self.blocks[0][1] == t


@dataclass(frozen=True)
class Way:
    """How a region is cut. Names are relative to its root while it is tried, then whole.

    attributes: for each module, the integers that become those of one rank.
    parts:      for each module, its own parameters and buffers of which a rank sees its part only: {name: dim}. That
                of x is x.unflatten(dim, (t, -1)).select(dim, rank).
    narrowed:   (module, argument) for a module that takes the size of one rank's features from the shape of what enters
                its columns; None if none does. It is called with that many features, its columns get all of them.
    summed:     parameters whose gradients have to be summed over ranks, because each rank uses them on its part.
    root:       the smallest module that holds the region.
    styles:     the style of each module of the region; empty while it is tried.
    """

    cuts: dict[str, Cut]
    attributes: Integers
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    narrowed: tuple[str, str] | None = None
    summed: tuple[str, ...] = ()
    root: str = ""
    styles: Mapping[str, str] = field(default_factory=dict)

    def within(self, root: str, row: str) -> Way:
        """The same way with whole names, for the region in `root` that ends in `row`."""

        def named(things: Mapping[str, T]) -> dict[str, T]:
            return {join(root, name): thing for name, thing in things.items()}

        entered = None if self.narrowed is None else (join(root, self.narrowed[0]), self.narrowed[1])
        summed = tuple(join(root, name) for name in self.summed)
        cuts = {name: "colwise" if len(cut.blocks) == 1 else "packed_colwise" for name, cut in self.cuts.items()}
        styles = cuts | dict.fromkeys(self.seen_by_rank(), SUMMED[0]) | {row: "rowwise"}
        return Way(named(self.cuts), named(self.attributes), named(self.parts), entered, summed, root, named(styles))

    def seen_by_rank(self) -> dict[str, dict[str, int | None]]:
        """{module: {own parameter or buffer: the dim of which a rank sees its part, None for all of it}}."""
        found: dict[str, dict[str, int | None]] = {}
        for key in self.summed:
            module, _, name = key.rpartition(".")
            found.setdefault(module, {})[name] = None
        for module, parts in self.parts.items():
            found.setdefault(module, {}).update(parts)
        return found


class Shown(NamedTuple):
    """What the run of all ranks has shown of a region.

    width:    the row's input features.
    integers: those that were read, of the modules in it.
    between:  parameters that are used between columns and row, and nowhere before.
    entered:  (module, argument) for a module that is called with what enters its columns.
    """

    width: int
    integers: Integers
    between: Collection[str]
    entered: tuple[str, str] | None


def guesses(root: nn.Module, outputs: Mapping[str, int], shown: Shown, t: int) -> Iterator[Way]:
    """Ways to cut the columns of root with these numbers of output features."""
    for cuts in _cuts(outputs, shown.width, t):
        for attributes in _attributes(root, cuts, shown, t):
            way = Way(cuts, attributes)
            if shown.entered is not None:
                yield from (way, replace(way, narrowed=shown.entered))
            else:
                yield way
            for parts in _parts(root, cuts, attributes, shown, t):
                yield replace(way, parts=parts)
                if shown.entered is not None:
                    yield replace(way, parts=parts, narrowed=shown.entered)


def _cuts(outputs: Mapping[str, int], width: int, t: int) -> Iterator[dict[str, Cut]]:
    """Ways to cut a region's columns, by their numbers of output features; width: the row's input features."""
    fewer = [n for n in range(t - 1, 0, -1) if t % n == 0]  # key-value heads that several ranks share
    even = {name: Cut(((size, t),)) for name, size in outputs.items()}
    if all(size > (t - 1) * -(-size // t) for size in outputs.values()):
        yield even
    most = max(outputs.values())
    if min(outputs.values()) < most and most % t == 0:
        for n in fewer:
            if all(size == most or size % n == 0 for size in outputs.values()):
                yield {name: Cut(((size, t if size == most else n),)) for name, size in outputs.items()}
    if width % t:
        return
    if any(size > width and size % width == 0 for size in outputs.values()):
        yield {
            name: Cut(((width, t),) * (size // width)) if size % width == 0 else even[name]
            for name, size in outputs.items()
        }
    for name, size in outputs.items():  # queries, keys and values in one, or keys and values
        rest = (size - width) // 2
        for n in (t, *fewer):
            if size > width and (size - width) % 2 == 0 and rest != width and rest % n == 0:
                yield even | {name: Cut(((width, t), (rest, n), (rest, n)))}
            if len(outputs) > 1 and size % (2 * n) == 0:
                yield even | {name: Cut(((size // 2, n),) * 2)}


def _attributes(root: nn.Module, cuts: Mapping[str, Cut], shown: Shown, t: int) -> Iterator[Integers]:
    """Values that integers may take on one rank: counts of heads by their names, numbers of features by their values,
    and others."""
    fewest = min(parts for cut in cuts.values() for _, parts in cut.blocks)
    sizes = {sum(size for size, _ in cut.blocks): sum(size // n for size, n in cut.blocks) for cut in cuts.values()}
    sizes |= {size: size // n for cut in cuts.values() for size, n in cut.blocks}
    sizes |= {shown.width: shown.width // t}
    kinds: dict[str, list[tuple[str, str, int]]] = {kind: [] for kind in ("heads", "groups", "widths", "others")}
    for holder, integers in shown.integers.items():
        for name, value in integers.items():
            own = value // t if value % t == 0 else 1 if t % value == 0 else value
            if ("group" in name or "rep" in name) and value * fewest // t != value:
                kinds["heads"].append((holder, name, value * fewest // t))  # query heads for each key-value head
                kinds["groups"].append((holder, name, own))  # or the number of key-value heads
            elif "head" in name and not any(word in name for word in NO_COUNT):
                kinds["heads"].append((holder, name, own))
            elif value in sizes and sizes[value] > 0:
                kinds["widths"].append((holder, name, sizes[value]))
            else:
                kinds["groups" if "group" in name else "others"].append((holder, name, own))
    heads, widths, groups = kinds["heads"], kinds["widths"], kinds["groups"]
    read = [shown.integers[holder][name] for holder, name, _ in kinds["others"]]
    choices = [heads, heads + widths, widths, [], heads + groups, heads + groups + widths]
    for base in (heads, widths):
        choices += [[each for each in heads + widths if each is not left] for left in base]
    for other in kinds["others"][: OTHERS * 2]:
        choices += [[*heads, other], [*heads, *widths, other], [other]]
    for first, value in zip(kinds["others"], read, strict=True):  # a number of heads, and another of heads as wide
        if shown.width % value == 0:
            alike = [
                other
                for other, number in zip(kinds["others"], read, strict=True)
                if other is not first and any(size % (shown.width // value * number) == 0 for size in sizes)
            ]
            choices += [[*heads, *widths[:n], first, *more] for more in (alike, *zip(alike)) for n in (0, None) if more]
    tried: list[Integers] = []
    for choice in choices:
        found: Integers = {}
        for holder, name, value in choice:
            if value != shown.integers[holder][name]:
                found.setdefault(holder, {})[name] = value
        if isinstance(root, nn.TransformerEncoderLayer):  # its fast path would not call its linears
            found.setdefault("", {})["activation_relu_or_gelu"] = 0
        if found not in tried:
            tried.append(found)
            yield found


def _parts(
    root: nn.Module, cuts: Mapping[str, Cut], attributes: Integers, shown: Shown, t: int
) -> Iterator[dict[str, dict[str, int]]]:
    """Parameters between the linears of which each rank may see its heads or features, and buffers with them."""
    counts = {
        value
        for holder, integers in shown.integers.items()
        for name, value in integers.items()
        if name in attributes.get(holder, ()) or ("head" in name and not any(word in name for word in NO_COUNT))
    }
    counts |= {size for cut in cuts.values() for size, parts in cut.blocks if parts == t}
    divisors = {value for integers in shown.integers.values() for value in integers.values()}
    counts |= {shown.width // value for value in divisors if shown.width % value == 0}  # of heads of that many features
    counts = {value for value in counts if value > 1 and value % t == 0}
    inside = tuple(f"{name}." for name in cuts)
    given: list[dict[str, dict[str, int]]] = [{}]
    for at in (0, -1):  # of several dims of such sizes the first one, then the last one
        parameters: dict[str, dict[str, int]] = {}
        buffers: dict[str, dict[str, int]] = {}
        for module, held in root.named_modules():
            if module in cuts or module.startswith(inside):
                continue
            own = [(name, p) for name, p in held.named_parameters(recurse=False) if join(module, name) in shown.between]
            beside = [(name, x) for name, x in held.named_buffers(recurse=False) if x.is_floating_point()]
            for found, tensors in ((parameters, own), (buffers, beside)):
                for name, x in tensors:
                    if dims := [dim for dim, size in enumerate(x.shape) if size in counts]:
                        found.setdefault(module, {})[name] = dims[at]
        both = {key: parameters.get(key, {}) | buffers.get(key, {}) for key in {**parameters, **buffers}}
        for each in (parameters, buffers, both):
            if each not in given:
                given.append(each)
                yield each
