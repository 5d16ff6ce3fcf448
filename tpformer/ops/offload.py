"""Offloading: what the backward needs waits in host memory. The copies run beside the computation, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tpformer.distributed.dtensor import is_dtensor

from .unsaved import Whole, check_saved, versions

SMALLEST = 1 << 20  # bytes of a storage; to copy a smaller one costs more than its memory is worth


class Offload:
    """Keeps saved tensors of a model's layers in pinned host memory. Use one object for one forward and its backward.

        offload = Offload()
        for layer in layers:
            with offload.layer(layer):
                x = layer(x)

    Give every layer in order: `moves=False` leaves a layer's tensors where they are, and its forward and backward are
    what the copies of the layer before it run beside.

    Autograd saves tensors in the context. Every storage of at least `smallest` bytes that it saves is copied to the
    host once, on a stream of its own, however many views are saved; the layer's parameters stay on the device.
    The copies of a layer may take as long as the next layer's forward; then the layer's device memory is freed. So two
    layers' memory is held at a time, and the last layer's stays. The backward of a layer first starts to fetch what the
    layer before it saved, so that these copies run beside its GEMMs. It frees a storage after the storage's last use.
    As without it, a backward raises RuntimeError if what was saved has been written in place: while a storage may still
    be copied, and whenever what stays on the device was.
    Host memory: the saved bytes, each storage rounded up to a power of two by torch's pinned allocator. The bytes cross
    the bus twice. On a CPU the copy saves nothing; it lets the code be tested.
    """

    def __init__(self, smallest: int = SMALLEST) -> None:
        self.smallest = smallest
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, *modules: nn.Module, moves: bool = True) -> Iterator[None]:
        """Offload what autograd saves in this context. It is fetched together, as one layer's. moves: see above."""
        if not moves and (self._last is None or not self._last.moves):
            self._last = None  # there is nothing to give back, and nothing to fetch
            yield
            return
        layer = _Layer(modules, self.smallest, self._last, moves)
        self._last = layer
        try:
            with saved_tensors_hooks(layer.pack, layer.unpack):
                yield
        finally:
            if layer.before is not None:
                layer.before.close()


class _View(NamedTuple):
    """The place of a saved tensor in an offloaded storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Layer:
    """The saved storages of what one `Offload.layer` context surrounds."""

    def __init__(self, modules: tuple[nn.Module, ...], smallest: int, before: _Layer | None, moves: bool) -> None:
        self.modules, self.smallest, self.before, self.moves = modules, smallest, before, moves
        self.parameters: set[int] | None = None
        # by address and version; the storages stay alive, so no other gets the same address
        self.open: dict[tuple[int, int], _Storage] = {}
        self.storages: list[_Storage] = []
        self.fetched = False

    def pack(self, x: Tensor) -> _View | Whole:
        if not self._is_moved(x):
            return Whole.of(x)
        place = _address(x), versions(x)[0]
        if place not in self.open:
            self.open[place] = _Storage(x)
            self.storages.append(self.open[place])
        storage = self.open[place]
        storage.uses += 1
        return _View(storage, x.dtype, x.size(), x.stride(), x.storage_offset())

    def _is_moved(self, x: Tensor) -> bool:
        """Whether a saved tensor is a view, and nothing else, of a storage that goes to the host."""
        if not self.moves or is_dtensor(x) or x.layout != torch.strided or x.is_nested or x.is_conj() or x.is_neg():
            return False
        if self.parameters is None:  # not sooner, because FSDP2 gathers them in a module's forward
            self.parameters = {_address(parameter) for module in self.modules for parameter in module.parameters()}
        return x.untyped_storage().nbytes() >= self.smallest and _address(x) not in self.parameters

    def close(self) -> None:
        """Give the device memory back: the next layer's forward has run beside the copies."""
        for storage in self.open.values():
            storage.release()
        self.open.clear()

    def unpack(self, packed: _View | Whole) -> Tensor:
        self.fetch()
        if self.before is not None:
            self.before.fetch()
            self.before = None  # otherwise a chain of all layers would outlive the backward
        if isinstance(packed, Whole):
            return packed.unpacked()
        x = packed.storage.take(packed)
        if packed.storage.uses == 0:
            self.storages.remove(packed.storage)
        return x

    def fetch(self) -> None:
        """Start to copy all that is still needed back to the device; once."""
        if not self.fetched:
            self.fetched = True
            for storage in self.storages:
                storage.fetch()


class _Storage:
    """One storage's bytes: on the device, on their way, or on the host."""

    def __init__(self, x: Tensor) -> None:
        self.uses = 0
        self.source: Tensor | None = x.detach()
        """What was saved, as long as its memory is `device`: it knows what is written to it."""
        self.version = self.seen = versions(x)[0]
        self.stream = _copy_stream(x.device)
        self.device: Tensor | None = x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        self.host = torch.empty(self.device.shape, dtype=torch.uint8, pin_memory=x.is_cuda)
        self.place = x.device
        self.arrived: Any = None
        self._copy(self.device, self.host)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self.arrived = self.stream.record_event()

    def _wait(self) -> None:
        """Make the current stream wait for the copy, so that the memory can be used, or freed and used again.

        Tensor.record_stream would keep the memory until the host sees the copy's end, and the host runs ahead.
        """
        if self.arrived is not None:
            torch.cuda.current_stream(self.place).wait_event(self.arrived)

    def _look(self) -> None:
        """See whether the memory that was saved has been written to, from which bytes may still be copied."""
        if self.source is not None:
            self.seen = versions(self.source)[0]

    def release(self) -> None:
        """Forget the device's bytes."""
        self._look()
        self._wait()
        self.device = self.source = None

    def __del__(self) -> None:
        if self.device is not None:  # the graph was dropped while the bytes were on their way
            self._wait()

    def fetch(self) -> None:
        if self.device is None:
            self.device = torch.empty_like(self.host, device=self.place, pin_memory=False)
            self._copy(self.host, self.device)

    def take(self, view: _View) -> Tensor:
        """The saved tensor, on the current stream. The last use frees the device's bytes with it."""
        self.fetch()
        assert self.device is not None
        self._wait()
        x = self.device.view(view.dtype).as_strided(view.size, view.stride, view.offset)
        self._look()
        check_saved(x, self.seen, self.version)
        self.uses -= 1
        if self.uses <= 0:  # below 0 in a second backward through a graph that was kept
            self.device = self.source = None
        return x


def _address(x: Tensor) -> int:
    return (x.to_local() if is_dtensor(x) else x).untyped_storage().data_ptr()


def _copy_stream(device: torch.device) -> Any:
    """The device's stream for these copies. It is one stream, so that copies end in the order in which they began."""
    if device.type != "cuda":
        return None
    if device not in STREAMS:
        STREAMS[device] = torch.cuda.Stream(device)
    return STREAMS[device]


STREAMS: dict[torch.device, Any] = {}
