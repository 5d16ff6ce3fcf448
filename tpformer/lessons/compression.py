"""Sums of gradients over replicas in fewer bytes, with what was lost kept for the next step (error feedback).

Belongs here: what is rounded, cut off or approximated before it is sent, and the exchange that goes with it.
compressed.py has FSDP2 call it for one unit at a time.

In each of them all replicas end with the same bits, and the sum of all errors that are kept is the sum of the gradients
less what was given out: nothing is lost, it comes later.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed import all_gather, all_reduce
from tpformer.distributed.collectives import all_to_all, combine
from tpformer.distributed.encodings import ENCODINGS, Encoding


class Compression(ABC):
    """The sum of one unit's gradient shards over the replicas.

    state: tensors of this rank that the next step needs, by name; a checkpoint holds them. A step gives new ones, which
    take their place when `settle` says that the step counts, because a step that is skipped must not change them.
    Memory: 8 bytes for each element of the shard, and what a subclass says.
    """

    def __init__(self, group: ProcessGroup, feedback: bool, elements: int) -> None:
        self.group, self.feedback, self.ranks = group, feedback, group.size()
        self.elements = elements
        self.state: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that `state` may have."""
        return {"error": (self.elements,)} if self.feedback else {}

    @abstractmethod
    def add(self, x: Tensor) -> None:
        """x: (elements,) of at least float32, of this rank; then, in place, the sum over the ranks."""

    def settle(self, skipped: Tensor) -> None:
        """End a step. skipped: a scalar, 1 if the step changed nothing, else 0; the host does not wait for it."""
        for name, value in self._next.items():
            kept = self.state[name]
            torch.where(skipped.to(kept.device) > 0, kept, value, out=kept)
        self._next = {}

    def _with_error(self, x: Tensor, name: str = "error") -> Tensor:
        """x and what was lost of it before."""
        if not self.feedback:
            return x
        if name not in self.state:
            self.state[name] = torch.zeros_like(x)
        self.state[name] = self.state[name].to(x.device)  # a checkpoint's come from the host
        return x + self.state[name]

    def _lost(self, error: Tensor, name: str = "error") -> None:
        if self.feedback:
            self._next[name] = error


class Rounded(Compression):
    """Rounded to fewer bits twice: each rank's part of all values goes to that rank, which adds in rank order, and the
    sums come back. The second rounding's error is kept by the rank that made it.

    Communicates: an all-to-all and an all-gather, together 2 (P - 1) / P of the encoded values from each rank.
    Memory: 8 bytes more for each P-th element.
    Source: arXiv:2102.02888 (1-bit Adam), section 4.3, with other encodings.
    """

    encoding: Encoding

    @property
    def padded(self) -> int:
        """The elements of equal parts of the ranks."""
        unit = self.ranks * self.encoding.block
        return -(-self.elements // unit) * unit

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"error": (self.padded,), "second": (self.padded // self.ranks,)} if self.feedback else {}

    def add(self, x: Tensor) -> None:
        padded = x.new_zeros(self.padded, dtype=torch.float32)
        padded[: len(x)] = x
        values = self._with_error(padded).view(self.ranks, -1)
        codes = self.encoding.encode(values)
        self._lost((values - self.encoding.decode(codes)).flatten())
        total = self._with_error(
            combine(list(self.encoding.decode([self._exchange(each) for each in codes])), torch.add), "second"
        )
        codes = self.encoding.encode(total[None])
        self._lost(total - self.encoding.decode(codes)[0], "second")
        sums = self.encoding.decode([all_gather(each, self.group) for each in codes])
        x.copy_(sums.view(-1)[: len(x)])

    def _exchange(self, codes: Tensor) -> Tensor:
        """Row r to rank r, and its row for this rank back: all ranks' rows of this rank's part."""
        return all_to_all(codes.contiguous().view(torch.uint8), self.group).view(codes.dtype)


class BFloat16(Rounded):
    """2 bytes a value."""

    encoding = ENCODINGS["bfloat16"]


class Int8(Rounded):
    """1 byte a value, and 4 bytes for each block of 256."""

    encoding = ENCODINGS["int8"]


class TopK(Compression):
    """The largest magnitudes of each rank, with their places; the rest is error.

    Communicates: two all-gathers, of 4 bytes a value and 4 bytes a place.
    Source: arXiv:1712.01887 (deep gradient compression), without its momentum correction.
    """

    def __init__(self, group: ProcessGroup, feedback: bool, elements: int, share: float) -> None:
        super().__init__(group, feedback, elements)
        self.share = share

    def add(self, x: Tensor) -> None:
        values = self._with_error(x)
        places = values.abs().topk(max(1, math.ceil(self.share * len(x)))).indices
        chosen = values[places]
        self._lost(values.index_fill(0, places, 0.0))
        x.zero_()
        everyone = all_gather(chosen, self.group).view(self.ranks, -1)
        for own, at in zip(everyone, all_gather(places.int(), self.group).view(self.ranks, -1), strict=True):
            x.index_add_(0, at, own)


class PowerSGD(Compression):
    """Matrices as products of two thin ones, by one step of a power iteration from those of the step before.

    shapes: of the tensors whose elements x has one after another. Vectors, and matrices that would not become smaller,
    are sent whole.
    Communicates: three all-reduces, of `rank` values for each row of all matrices, for each column, and of the rest.
    Memory: 8 bytes for each column of a matrix and each of `rank`.
    Source: arXiv:1905.13727, algorithms 1 and 2.
    """

    def __init__(self, group: ProcessGroup, feedback: bool, rank: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self.rank, self.sizes = rank, [math.prod(shape) for shape in shapes]
        super().__init__(group, feedback, sum(self.sizes))
        self.matrices: dict[int, tuple[int, int]] = {}
        """(rows, columns) of the tensors that become smaller, by their number."""
        for number, (shape, size) in enumerate(zip(shapes, self.sizes, strict=True)):
            rows, columns = (size // shape[-1], shape[-1]) if len(shape) > 1 and size else (0, 0)
            if rank * (rows + columns) < rows * columns:
                self.matrices[number] = rows, columns

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        factors = {f"right.{number}": (columns, self.rank) for number, (_, columns) in self.matrices.items()}
        return super().shapes | factors

    def add(self, x: Tensor) -> None:
        values = self._with_error(x)
        pieces, outs = values.split(self.sizes), x.split(self.sizes)
        matrices = {number: pieces[number].view(shape) for number, shape in self.matrices.items()}
        left = self._summed([matrix @ self._right(number, matrix) for number, matrix in matrices.items()])
        bases = [torch.linalg.qr(each).Q for each in left]
        right = self._summed([matrix.T @ base for matrix, base in zip(matrices.values(), bases, strict=True)])
        rest = [number for number in range(len(pieces)) if number not in matrices]
        whole = self._summed([pieces[number] for number in rest])
        error = torch.zeros_like(values)
        errors = error.split(self.sizes)
        for number, base, other in zip(matrices, bases, right, strict=True):
            outs[number].copy_((base @ other.T).view(-1))
            errors[number].copy_(pieces[number] - outs[number] / self.ranks)
            # a column that is zero would stay zero: all that comes would be out of its reach
            seen = (other != 0).any(0, keepdim=True)
            self._next[f"right.{number}"] = torch.where(seen, other, self.state[f"right.{number}"])
        for number, total in zip(rest, whole, strict=True):
            outs[number].copy_(total)
        self._lost(error)

    def _right(self, index: int, matrix: Tensor) -> Tensor:
        """(columns, rank) of the step before, or the same random numbers on all ranks."""
        name = f"right.{index}"
        if name not in self.state:
            drawn = torch.randn(matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(index))
            self.state[name] = drawn.to(matrix.dtype)
        self.state[name] = self.state[name].to(matrix.device)
        return self.state[name]

    def _summed(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, by one all-reduce."""
        if not parts:
            return []
        total = all_reduce(torch.cat([part.reshape(-1) for part in parts]), self.group)
        return [each.view_as(part) for each, part in zip(total.split([p.numel() for p in parts]), parts, strict=True)]
