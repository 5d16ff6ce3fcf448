"""Which generators of random numbers have moved: those of torch, numpy and Python, and those that modules hold.

Belongs here: how a generator's state is read without waiting for a device, and cheaply, for every forward does it.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

MT19937 = 4 * 625  # bytes of the state of numpy's global generator: 624 words and a place
HELD = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)  # that a module may have of its own


def _torch_cpu() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _torch_cuda() -> Any:
    """Seed and offset, which the host has. A GPU's state as a tensor would be copied."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator.initial_seed(), generator.get_offset()


def _numpy() -> Any:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):  # as a dict it takes twenty times as long
        return ctypes.string_at(generator.ctypes.state_address, MT19937)
    return repr(generator.state)


def _state(generator: Any) -> Any:
    """The state of a generator that a module holds."""
    if isinstance(generator, torch.Generator):
        on_gpu = generator.device.type == "cuda"
        return (generator.initial_seed(), generator.get_offset()) if on_gpu else generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(
        generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state
    )


def _giver(generator: Any) -> Callable[[], None]:
    """What gives a generator that a module holds its state back."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())


SOURCES: dict[str, Callable[[], Any]] = {"torch": _torch_cpu, "torch.cuda": _torch_cuda, "numpy": _numpy}
NUMBERS = "random"  # Python's own, which draws one number at a time and takes longest to read


class Generators:
    """The generators that a model may draw from."""

    def __init__(self, model: nn.Module) -> None:
        self.held = [(f"{name}.{key}".lstrip("."), value) for name, part in model.named_modules()
                     for key, value in vars(part).items() if isinstance(value, HELD)]  # fmt: skip

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Afterwards all but torch's own, which torch.random.fork_rng gives back, are in the states of before."""
        bits, drawn = np.random.get_bit_generator(), random.getstate()  # type: ignore[attr-defined]
        state, own = bits.state, [_giver(each) for _, each in self.held]
        try:
            yield
        finally:
            bits.state = state
            random.setstate(drawn)
            for give_back in own:
                give_back()

    def tensors(self) -> tuple:
        """The states of the generators that whole tensors are drawn from."""
        own = [_state(each) for _, each in self.held]
        return (_torch_cpu(), _torch_cuda(), _numpy(), *own)

    def all(self) -> tuple:
        """The states of all."""
        return (*self.tensors(), random.getstate())

    def names(self) -> list[str]:
        """What each of the states belongs to."""
        return [*SOURCES, *(name for name, _ in self.held), NUMBERS]


def numbers(states: tuple) -> list[int]:
    """A number for each state, by which ranks compare it."""
    return [zlib.crc32(state if isinstance(state, bytes) else repr(state).encode()) for state in states]
