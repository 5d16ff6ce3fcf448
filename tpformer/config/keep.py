"""What each layer of a model keeps for its backward: one way for each layer, whichever keys of [parallel] said so.

Belongs here: LayerKeep, its words, the keys that say it of layers, and the text of a memory budget. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from tpformer.words import shown

from .ranges import check_range

RECOMPUTE = ("none", "mlp", "full")
PLAIN, OFFLOAD, PACK = "keep", "offload", "pack"
UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


class LayerKeep(NamedTuple):
    """What one layer keeps of a microbatch.

    recompute: what its backward computes again instead of keeping: none, mlp or full. pack: whether what it keeps is
    packed. offload: whether that waits in host memory.
    """

    recompute: str = "none"
    pack: bool = False
    offload: bool = False

    def __str__(self) -> str:
        said = [OFFLOAD] * self.offload + [self.recompute] * (self.recompute != "none") + [PACK] * self.pack
        return "+".join(said) or PLAIN


def kept_layers(
    n_layers: int,
    *,
    keep: str = "",
    recompute: str = "none",
    recompute_layers: str = "",
    recompute_interval: int = 1,
    pack_activations: bool = False,
    pack_layers: str = "",
    offload_activations: bool = False,
) -> tuple[LayerKeep, ...]:
    """The LayerKeep of every layer of a model, from the keys of [parallel] of these names.

    ValueError for a text of `keep` that is none, or is of another number of layers, and beside any other key; for
    layers that are chosen for nothing, or do not exist; for an interval below 1, or of several layers that are not
    whole.
    """
    if keep:
        if recompute_interval != 1 or any(
            (recompute != "none", recompute_layers, pack_activations, pack_layers, offload_activations)
        ):
            raise ValueError(
                f"keep={shown(keep)} says what every layer keeps, and so do recompute, recompute_layers, "
                f"recompute_interval, pack_activations, pack_layers and offload_activations: leave these out, or keep"
            )
        return parsed_keep(keep, n_layers)
    if recompute_layers and recompute == "none":
        raise ValueError(
            f"recompute_layers={shown(recompute_layers)} chooses layers, but recompute is none: set it to mlp or full"
        )
    check_range("parallel.recompute_interval", recompute_interval, "recompute_interval")
    if recompute_interval > 1 and recompute != "full":
        raise ValueError(
            f"recompute_interval={recompute_interval} with recompute={recompute!r}: only whole layers can form a "
            f"region; set recompute to 'full', or recompute_interval to 1"
        )
    if pack_layers and not pack_activations:
        raise ValueError(
            f"pack_layers={shown(pack_layers)} chooses layers, but pack_activations is false: set it to true"
        )
    again = selected_layers(recompute_layers, n_layers) if recompute != "none" else set()
    packed = selected_layers(pack_layers, n_layers, "pack_layers") if pack_activations else set()
    return tuple(
        LayerKeep(recompute if layer in again else "none", layer in packed, offload_activations)
        for layer in range(n_layers)
    )


def parsed_keep(text: str, n_layers: int) -> tuple[LayerKeep, ...]:
    """The ways of a text such as "15*offload,9*mlp+pack,8*pack", first layers first; one way alone is every layer's.

    ValueError for a word that is none, and for another number of layers.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and "*" not in text:
        return (_parsed_way(text, parts[0]),) * n_layers
    found: list[LayerKeep] = []
    for part in parts:
        number, star, way = part.rpartition("*")
        count = number.strip() if star else "1"
        if not (count.isascii() and count.isdigit()) or not 0 < int(count) <= n_layers:
            raise ValueError(f"keep={shown(text)}: {shown(part)} is of no number of layers from 1 to {n_layers}")
        found += [_parsed_way(text, way)] * int(count)
    if len(found) != n_layers:
        raise ValueError(f"keep={shown(text)} is of {len(found)} layers, and the model has {n_layers}: say it of each")
    return tuple(found)


def keep_text(ways: Sequence[LayerKeep]) -> str:
    """The text that parsed_keep turns into these ways."""
    runs = [(way, len(list(some))) for way, some in groupby(ways)]
    return str(runs[0][0]) if len(runs) == 1 else ",".join(f"{number}*{way}" for way, number in runs)


def _parsed_way(text: str, way: str) -> LayerKeep:
    words = [word.strip() for word in way.split("+")]
    again = [word for word in words if word in RECOMPUTE[1:]]
    known = {*again[:1], OFFLOAD, PACK}
    if words != [PLAIN] and (len(set(words)) < len(words) or not known.issuperset(words)):
        raise ValueError(
            f"keep={shown(text)}: {shown(way.strip())} is no way to keep a layer; write keep, or one or several of "
            f"offload, mlp or full, and pack, such as offload+mlp"
        )
    return LayerKeep(again[0] if again else "none", PACK in words, OFFLOAD in words)


def selected_layers(pattern: str, n_layers: int, name: str = "recompute_layers") -> set[int]:
    """The layers that the setting `name` selects by comma-separated indexes or slices as in Python: "0:8", "::2".

    "" selects all, "0,5,-1" three. ValueError for a part that is neither, or that selects no layer.
    """
    layers, found = range(n_layers), set[int]()
    chosen: Sequence[int]
    for part in pattern.split(",") if pattern else ["::"]:
        try:
            numbers = [int(number) if number.strip() else None for number in part.split(":")]
            chosen = layers[slice(*numbers)] if len(numbers) > 1 else [layers[numbers[0]]]  # type: ignore[index]
        except (ValueError, TypeError, IndexError):
            chosen = ()
        if not chosen:
            raise ValueError(
                f"{name}={shown(pattern)}: {shown(part)} selects none of the {n_layers} layers; write comma-separated "
                f'indexes or slices as in Python, such as "0:8", "::2" or "0,5,-1"'
            )
        found.update(chosen)
    return found


def regions(part: Iterable[int], ways: Sequence[LayerKeep], interval: int) -> dict[str, int]:
    """{name of a layer: index of the first layer of its region}, of the layers of a part that are recomputed as one.

    A region has at most `interval` consecutive layers that are recomputed whole; without several there are none.
    """
    found: dict[str, int] = {}
    for index in part if interval > 1 else ():
        first = found.get(str(index - 1))
        if ways[index].recompute == "full":
            found[str(index)] = index if first is None or index - first == interval else first
    return found


def budget_bytes(text: str, device: float | None = None) -> float:
    """The bytes of a memory budget such as "40GiB", "40e9" or "80%". device: bytes of the device that a share is of.

    ValueError for a text that is none, and for a share where no device is known.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][0-9]+)?)\s*([A-Za-z]*|%)\s*", text)
    number, unit = (float(found[1]), found[2].upper()) if found else (0.0, "")
    if not 0 < number < 2.0**63 or unit not in ("", "%", *UNITS) or (unit == "%" and number > 100):
        raise ValueError(
            f"parallel.memory_budget={shown(text)} is no amount of memory: write bytes such as 40GiB or 40e9, or a "
            f"share of a GPU's such as 80%"
        )
    if unit == "" and number <= 1:
        raise ValueError(
            f"parallel.memory_budget={shown(text)} is {number:g} bytes: write {100 * number:g}% for a share of a GPU's "
            f"memory, or bytes such as 40GiB"
        )
    if unit != "%":
        return number * UNITS[unit or "B"]
    if device is None:
        raise ValueError(
            f"parallel.memory_budget={shown(text)} is a share of a GPU's memory, and there is none: write bytes, such "
            f"as 40GiB"
        )
    return number / 100 * device
