"""Where each tensor-parallel rank is, and what it was given: compared in every forward, without waiting for a device.

Belongs here: the words that ranks send one another, and what it means if they differ.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.distributed.collectives import all_gather_single, gather_shared
from tpformer.distributed.dtensor import is_dtensor
from tpformer.distributed.groups import backend_of, collective_state, host_group

MOST = 1 << 18  # elements of a floating tensor that are looked at; of whole numbers all are
DIRECTIONS = 3  # in which values are projected
SEEN = 2 + 2 * DIRECTIONS  # numbers that digest() makes


@dataclass(frozen=True)
class Place:
    """How often a rank has called the model, and how it calls it now."""

    forwards: int
    backwards: int
    steps: int
    what: int  # names.get(what) is what is called, or what else is compared
    training: bool
    grad: bool

    @classmethod
    def read(cls, words: list[float]) -> Place:
        """The place that another rank has sent."""
        forwards, backwards, steps, what, training, grad = (int(word) for word in words[: len(fields(cls))])
        return cls(forwards, backwards, steps, what, bool(training), bool(grad))

    def sentence(self, names: Mapping[int, str]) -> str:
        """The place in words."""
        mode = ("training" if self.training else "evaluation") + " without gradients" * (not self.grad)
        return (
            f"in {names.get(self.what, 'another call')} in {mode}, after {self.forwards} forwards, {self.backwards} "
            f"backwards and {self.steps} optimizer steps"
        )


def number_of(name: str) -> int:
    """A name as a number."""
    return zlib.crc32(name.encode())


@torch.no_grad()
def digest(values: Iterable[Any]) -> Tensor:
    """Numbers, on the values' device, by which ranks compare tensors: (SEEN,) float64.

    Of whole numbers a sum weighted by the place; of floating ones, which may differ by rounding, projections, and how
    far rounding may move them.
    """
    tensors = [x.detach() for x in values if isinstance(x, Tensor) and not is_dtensor(x) and not x.is_meta]
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros(SEEN, dtype=torch.float64, device=device)
    total[0] = number_of(repr([(tuple(x.shape), x.dtype) for x in tensors]))
    for x in tensors:
        flat = (torch.view_as_real(x) if x.is_complex() else x).flatten()
        if not flat.is_floating_point():
            places = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=x.device)
            total[1] += flat.double().dot(places.sqrt_()).to(device)
            continue
        eps = torch.finfo(flat.dtype).eps ** 0.5
        flat = flat[:: -(-flat.numel() // MOST) or 1].double().nan_to_num()
        places = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=x.device)
        for index in range(DIRECTIONS):
            part = flat * torch.cos(places * (1 + index * 0.7))
            total[2 + index] += part.sum().to(device)
            total[2 + DIRECTIONS + index] += (part.norm() * eps).to(device)
    return total


class Exchange:
    """What one group of ranks sends one another. names: what a place's `what` is, in words."""

    def __init__(self, group: dist.ProcessGroup, names: dict[int, str]) -> None:
        self.shared, self.names = backend_of(group) == "shared", names
        self.group = group if self.shared else host_group(group)
        self.pending: deque[tuple[Any, Tensor, str]] = deque()

    def send(self, place: Place, of: int, seen: list[float], refusal: str, wait: bool) -> None:
        """Compare a place, and values of forward number `of` that digest() saw, with the other ranks'.

        wait: until they have sent theirs. Else a later call looks at them, so that no device runs dry. CPU processes of
              one machine always wait: memory that they share takes microseconds, and the rows come next anyway.
        Communicates: an all-gather of 120 bytes between hosts.
        Errors:  ValueError if ranks are at different places, or with this refusal if they have different values.
        """
        if self.group is None:
            return
        own = torch.tensor([*map(float, vars(place).values()), float(of), *(seen or [0.0] * SEEN)], dtype=torch.float64)
        if self.shared:
            self._compare(
                gather_shared(own, self.group, collective_state(self.group)).view(-1, own.numel()).tolist(), refusal
            )
            return
        rows = torch.empty((self.group.size(), own.numel()), dtype=torch.float64)
        work = all_gather_single(rows.view(-1), own, group=self.group, async_op=True)
        self.pending.append((work, rows, refusal))
        self.settle(wait)

    def settle(self, wait: bool = False) -> None:
        """Look at what has arrived, or wait for all of it."""
        while self.pending and (wait or self.pending[0][0].is_completed()):
            work, rows, refusal = self.pending.popleft()
            work.wait()
            self._compare(rows.tolist(), refusal)

    def _compare(self, rows: list[list[float]], refusal: str) -> None:
        count = len(fields(Place))
        for rank, row in enumerate(rows):
            if row[:count] != rows[0][:count]:
                first, second = (Place.read(each).sentence(self.names) for each in (rows[0], row))
                raise ValueError(
                    f"tensor-parallel ranks are not at the same place: rank 0 is {first}; rank {rank} is {second}: let "
                    f"all of them call the model, its backward and its optimizer together"
                )
            if row[count] != rows[0][count]:
                continue  # a device had not computed yet what this rank sees of that forward
            (kinds, whole, *projected), (kinds0, whole0, *projected0) = row[count + 1 :], rows[0][count + 1 :]
            pairs = zip(projected[:DIRECTIONS], projected0[:DIRECTIONS], projected0[DIRECTIONS:], strict=True)
            if (kinds, whole) != (kinds0, whole0) or any(abs(x - y) > slack for x, y, slack in pairs):
                raise ValueError(refusal)
