"""Packed activations: what autograd saves of bfloat16 waits for the backward in 12.1 bits a value, without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tpformer.distributed import indexed
from tpformer.distributed.dtensor import is_dtensor
from tpformer.kernels.pack.format import RUN, SLOTS, Packed, pays
from tpformer.torch_private import base_of, in_backward, is_fake, top_saved_tensors_hooks, version_of

from .implementation import implementation
from .unsaved import Whole

TALLIED = 256  # tensors whose counts are added up at once


class View(NamedTuple):
    """The place of a saved tensor in a storage that is packed.

    An example: h is bfloat16 (64, 256), 16,384 values, which fill one group of 32,768 bytes.
        h is saved            a View of a packed buffer of 24,736 bytes: size (64, 256), stride (256, 1), offset 0
        h.t() is saved, too   a View of the same buffer, stride (1, 256): nothing is packed again
        h[:33] is saved       a View of that buffer as well
        h[:32] is saved       Whole: it is half of its storage, and two halves would each unpack all of it
        8 values are saved    Whole: their group would be padded to 24,736 bytes
        h.add_(1), h saved    another version, so another buffer; the first one still gives the old values
    """

    buffer: Any
    """The packed storage, or what hooks around these made of it."""
    values: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class PackingReport(NamedTuple):
    """What this process has packed since the last report. Tensors are int64 scalars on the device."""

    values: int
    """Values that were packed."""
    escapes: Tensor
    """How many of them needed a slot."""
    kept: int
    """Tensors that would have overflowed, and were left as they are: the host knew, as on a CPU."""
    overflows: Tensor
    """Groups that overflowed where the host did not know: gradients from them are NaN, and the step must be repeated
    in `unpacked_activations`."""


class Tally:
    """What has been packed on a device since the last report."""

    def __init__(self) -> None:
        self.values, self.kept = 0, 0
        self.totals: Tensor | None = None
        self.counts: list[Tensor] = []

    def add(self, values: int, counts: Tensor) -> None:
        """Count a tensor that was packed. counts: the escapes of its groups."""
        self.values += values
        self.counts.append(counts)
        if len(self.counts) == TALLIED:  # nobody may ask for reports
            self._sum()

    def leave_as_it_is(self) -> None:
        """Count a tensor that is not packed, because it would overflow."""
        self.kept += 1

    def _sum(self) -> None:
        """Add up the counts, in a few launches for all tensors, and without waiting."""
        counts = torch.cat(self.counts)
        found = torch.stack([counts.sum(), (counts > SLOTS).sum()])
        self.totals = found if self.totals is None else self.totals + found
        self.counts.clear()

    def report(self, device: torch.device) -> PackingReport:
        """What was packed."""
        if self.counts:
            self._sum()
        totals = torch.zeros(2, dtype=torch.int64, device=device) if self.totals is None else self.totals
        return PackingReport(self.values, totals[0], self.kept, totals[1])


TALLIES: dict[torch.device, Tally] = {}


def packing_report(device: torch.device | str) -> PackingReport:
    """The PackingReport of what this process has packed on a device, whose counts then begin anew.

    A training loop on a GPU asks for it once a step, because only the device knows whether a tensor overflowed there.
    """
    place = indexed(torch.device(device))
    return TALLIES.pop(place, Tally()).report(place)


class _Packing:
    """The hooks of one `packed_activations` context."""

    def __init__(self, modules: tuple[nn.Module, ...], held: Sequence[Tensor]) -> None:
        self.modules, self.held = modules, {_identity(x) for x in held}
        self.parameters: set[int] | None = None
        self.outer: tuple[Callable, Callable] | None = top_saved_tensors_hooks()
        # A weak reference keeps a storage's identity from being used again, and not its memory. By version, because
        # what has been written to a storage since it was packed is another tensor.
        self.known: dict[tuple[int, int], tuple[StorageWeakRef, Tensor | None]] = {}

    @property
    def is_innermost(self) -> bool:
        """Whether autograd hands what it saves to these hooks: not to those of a checkpoint in this context."""
        top = top_saved_tensors_hooks()
        return top is not None and top[0] == self.pack

    def pack(self, x: Tensor) -> View | Whole:
        """The pack hook. Hooks around these see what is kept."""
        buffer = self.buffer_of(x)
        keep = self.outer[0] if self.outer is not None else _as_is
        if buffer is None:
            return Whole.of(x) if self.outer is None else Whole(keep(x), version_of(x))
        values = x.untyped_storage().nbytes() // x.itemsize
        return View(keep(buffer), values, x.size(), x.stride(), x.storage_offset())

    def unpack(self, kept: View | Whole) -> Tensor:
        """The unpack hook. RuntimeError for a tensor that was written to, which autograd leaves to hooks to find."""
        give = self.outer[1] if self.outer is not None else _as_is
        if isinstance(kept, Whole):
            return kept.unpacked() if self.outer is None else give(kept.x)
        buffer = give(kept.buffer)
        whole = unpack(Packed(buffer, (kept.values,)))
        return whole.as_strided(kept.size, kept.stride, kept.offset)

    def packed(self, x: Tensor | None) -> Packed | None:
        """x in packed form, if it is all of a storage and kernels can read its rows; None otherwise."""
        if x is None or not x.is_contiguous() or x.storage_offset() or x.shape[-1] % RUN:
            return None
        if x.untyped_storage().nbytes() != x.nbytes:
            return None
        buffer = self.buffer_of(x)
        return None if buffer is None else Packed(buffer, tuple(x.shape))

    def buffer_of(self, x: Tensor) -> Tensor | None:
        """The packed storage of x.

        None if it is not packed: it is not of bfloat16, too small, half of its storage or less, a parameter or a
        buffer, held by others, or it would overflow.
        """
        if x.dtype != torch.bfloat16 or is_dtensor(x) or x.layout != torch.strided or x.is_meta or x.is_neg():
            return None
        values = x.untyped_storage().nbytes() // x.itemsize
        # of several parts of a storage each would unpack all of it
        if not values or not pays(values) or 2 * x.numel() <= values or isinstance(base_of(x), nn.Parameter):
            return None
        if self.parameters is None:  # not sooner, because FSDP2 gathers them in a module's forward
            tensors = (each for module in self.modules for each in (*module.parameters(), *module.buffers()))
            self.parameters = {_identity(each) for each in tensors}
        reference = StorageWeakRef(x.untyped_storage())
        if reference.cdata in self.parameters or reference.cdata in self.held:
            return None
        key = reference.cdata, version_of(x)
        if key not in self.known:
            self.known[key] = reference, pack_storage(x)
        return self.known[key][1]


def _as_is(x: Any) -> Any:
    return x


def _identity(x: Tensor) -> int:
    """A number that no other storage has while this one exists."""
    return StorageWeakRef((x.to_local() if is_dtensor(x) else x).untyped_storage()).cdata


def pack_storage(x: Tensor) -> Tensor | None:
    """The packed storage of x; None if the host knows that it overflows."""
    with torch.no_grad():
        flat = x.new_empty(0).set_(x.untyped_storage())
        packed, counts = implementation("pack", flat).pack(flat)
        if is_fake(counts):  # a dry run's: none overflows
            return packed.buffer
        tally = TALLIES.setdefault(x.device, Tally())
        if host_knows(counts) and int(counts.max()) > SLOTS:
            tally.leave_as_it_is()
            return None
    tally.add(len(flat), counts)
    return packed.buffer


def host_knows(counts: Tensor) -> bool:
    """Whether to read counts takes no time."""
    return counts.device.type == "cpu"


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed."""
    return implementation("pack", packed).unpack(packed)


def unpacked(x: Any) -> Any:
    """x as a tensor; None stays None."""
    return unpack(x) if isinstance(x, Packed) else x


_ACTIVE: ContextVar[_Packing | None] = ContextVar("packing", default=None)
_ALLOWED: ContextVar[bool] = ContextVar("packing_allowed", default=True)


@contextmanager
def packed_activations(*modules: nn.Module, held: Sequence[Tensor] = ()) -> Iterator[None]:
    """What autograd saves of bfloat16 in this context is kept in packed form, and comes back with the same bits.

    It surrounds one forward of the modules, and no backward: a storage is packed once, and a second tensor of the same
    memory at the same version is taken to have the same values. 12.08 bits for each value (kernels/pack/format.py).
    The modules' parameters and buffers are not packed, nor what `held` tensors share memory with: others hold them.
    A storage that overflows is kept as it is where the host knows, on a CPU. On a GPU the device alone knows: gradients
    are then NaN, and packing_report has overflows. Repeat that step in unpacked_activations.
    Hooks around this context, as of Offload, get the packed bytes.
    """
    packing = _Packing(modules, held)
    token = _ACTIVE.set(packing)
    try:
        with saved_tensors_hooks(packing.pack, packing.unpack):
            yield
    finally:
        _ACTIVE.reset(token)
        packing.known.clear()


def may_pack() -> bool:
    """Whether a forward here should pack what it saves.

    Not in unpacked_activations, without gradients, or in torch.utils.checkpoint, by which regions are recomputed, too.
    It keeps inputs alone, and in the second run, maybe in another thread, as much must be saved as in the first.
    """
    if not (_ALLOWED.get() and torch.is_grad_enabled()) or in_backward():
        return False
    top = top_saved_tensors_hooks()
    return top is None or getattr(top[0], "__module__", "") != "torch.utils.checkpoint"


@contextmanager
def unpacked_activations() -> Iterator[None]:
    """In this context nothing is packed."""
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def has_other_hooks() -> bool:
    """Whether autograd hands what it saves to hooks besides those of packed_activations, as in a checkpoint."""
    packing = _ACTIVE.get()
    if packing is not None and packing.is_innermost:
        return packing.outer is not None
    return top_saved_tensors_hooks() is not None


def keep(ctx: Any, *tensors: Tensor | None, readable: int) -> None:
    """ctx.save_for_backward(*tensors). If activations are packed, the first `readable` of them come back as Packed from
    `kept`, where that is possible: the backward reads them in that form."""
    packing, given = _ACTIVE.get(), list(tensors)
    ctx.shapes = {}
    if packing is not None and packing.is_innermost:
        for i, x in enumerate(tensors[:readable]):
            if (packed := packing.packed(x)) is not None:
                given[i], ctx.shapes[i] = packed.buffer, packed.shape
    ctx.save_for_backward(*given)


def kept(ctx: Any) -> list[Any]:
    """What `keep` was given, as tensors and Packed."""
    return [Packed(x, ctx.shapes[i]) if i in ctx.shapes else x for i, x in enumerate(ctx.saved_tensors)]
