"""Modules that take the size of one rank's features from the shape of their input, as in `B, T, C = x.shape`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .ways import Way


class Narrowed:
    """Calls a module with as many features as one rank has, and its column linears with all of them.

    The module reads the shape of that argument only, and hands it to its columns: the trial has shown that.
    module, argument: its name and that of the argument, a number if it is positional. columns: names of the linears.
    """

    def __init__(self, module: str, argument: str, columns: list[str], t: int) -> None:
        self.module, self.argument, self.columns, self.t = module, argument, columns, t
        self.given: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, way: Way, t: int) -> Iterator[Narrowed]:
        """The one of a region, if it has one. way: with names relative to the model."""
        if way.narrowed is not None:
            yield cls(*way.narrowed, list(way.cuts), t)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Register its hooks."""
        module = model.get_submodule(self.module)
        columns = [model.get_submodule(name) for name in self.columns]
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
            *(column.register_forward_pre_hook(self.restore) for column in columns),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"given": None}

    def enter(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The module is called."""
        place = None if self.argument in kwargs else int(self.argument)
        x = kwargs[self.argument] if place is None else args[place]
        part = x[..., : x.shape[-1] // self.t]
        self.given = part, x
        if place is None:
            return args, {**kwargs, self.argument: part}
        return (*args[:place], part, *args[place + 1 :]), kwargs

    def restore(self, _: nn.Module, args: tuple) -> tuple | None:
        """A column is called."""
        if self.given is None or args[0] is not self.given[0]:
            return None
        return (self.given[1], *args[1:])

    def leave(self, *_: Any) -> None:
        """The module has returned, or raised."""
        self.given = None
