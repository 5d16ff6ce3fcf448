"""TensorParallel: the ranks that layers lie on, and how rows travel between them. One object serves a whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import FP8, PRECISIONS, TRANSPORTS, check_choice
from tpformer.distributed.groups import REGISTRY
from tpformer.ops.autocast import autocast_dtype
from tpformer.ops.choice import Grouped, Request, column_request, open_transport, row_request
from tpformer.ops.context import Context
from tpformer.ops.transports.interface import Transport
from tpformer.ops.transports.sequential import LOCAL


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Which ranks layers lie on, and how rows and weights are divided among them.

    mesh: the tensor-parallel ranks, a 1-D DeviceMesh. None: one rank, with plain parameters and no process group.
    sequence_parallel: between linears each rank has rows of its own, a sequence shard (tokens / t, hidden). It is off
             by default, because a layer with it that is given all rows raises no error: its result is right, but its
             gradients are t times too large.
    transport: what carries the linears between the ranks (ops.choose_transport).
    context: the ranks that share the tokens of every sample, a 1-D DeviceMesh, whatever `mesh` is. Each has the tokens
             Positions.own_tokens of it; attention gathers keys and values over these ranks. Parameters are copies on
             them, as on data-parallel ranks. None: one rank has whole samples.
    experts: the ranks that share a layer's experts and exchange tokens, a 1-D DeviceMesh, whatever `mesh` is: each rank
             has tokens of its own and n_experts / ep whole experts. None: those of `mesh`, which gather tokens.
    precision: "16", or "fp8" for linears that multiply blocks of e4m3, the same ones on any number of ranks: a rank's
             features are multiples of 128. Heads and norms stay as they are (docs/fp8.md).
    Errors:  ValueError for a mesh of several axes, an unknown transport or precision, or `experts` where
             tensor-parallel ranks have the same tokens; TypeError for another kind of mesh.
    """

    mesh: DeviceMesh | None = None
    sequence_parallel: bool = False
    transport: str = "auto"
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    precision: str = "16"

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("precision", self.precision, PRECISIONS)
        meshes = ("tp", self.mesh, "tp"), ("context", self.context, "cp"), ("experts", self.experts, "ep")
        for name, mesh, axis in meshes:
            if mesh is not None and not isinstance(mesh, DeviceMesh):
                kinds = "a 1-D DeviceMesh, a TensorParallel or None" if name == "tp" else "a 1-D DeviceMesh or None"
                raise TypeError(f"{name}={mesh!r}, a {type(mesh).__name__}: give {kinds}")
            if mesh is not None and mesh.ndim != 1:
                axes = ", ".join(map(str, mesh.mesh_dim_names or mesh.shape))
                raise ValueError(
                    f"the mesh has {mesh.ndim} axes ({axes}) and layers lie on one: give that axis, as mesh['{axis}']"
                )
        if self.experts is not None and self.size > 1 and not self.sequence_parallel:
            raise ValueError(
                f"experts on {self.experts.size()} ranks that exchange tokens, and {self.size} tensor-parallel ranks "
                f"with the same tokens, which would count several times: set sequence_parallel=True, or leave the "
                f"argument experts out"
            )

    @classmethod
    def of(cls, tp: TensorParallel | DeviceMesh | None, *, sequence_parallel: bool = False) -> TensorParallel:
        """The TensorParallel of a constructor's `tp`. sequence_parallel is for a `tp` that is a mesh or None."""
        return tp if isinstance(tp, cls) else cls(tp, sequence_parallel)

    @cached_property
    def size(self) -> int:
        """t, the number of tensor-parallel ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    @cached_property
    def rank(self) -> int:
        """This rank among the tensor-parallel ranks."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The group that operations communicate over; None for one rank."""
        return None if self.mesh is None or self.size == 1 else self.mesh.get_group()

    @cached_property
    def sharded(self) -> bool:
        """Whether rows between linears are sequence shards, not all rows on every rank."""
        return self.sequence_parallel and self.size > 1

    @cached_property
    def shares_tokens(self) -> Context | None:
        """The context-parallel ranks; None for one rank, which has whole samples."""
        return None if self.context is None else Context.of(self.context.get_group())

    @cached_property
    def of_experts(self) -> TensorParallel:
        """The ranks that experts lie on: those of `experts`, each with all its rows, or these."""
        if self.experts is None:
            return self
        if self.experts.size() > 1:  # rows travel while fused kernels of other groups run, which leave them processors
            REGISTRY.beside.add(self.experts.get_group())
        return TensorParallel(self.experts, False, self.transport, precision=self.precision)

    @cached_property
    def alone(self) -> TensorParallel:
        """One rank of this precision, for what is multiplied between two exchanges."""
        return TensorParallel(precision=self.precision)

    @cached_property
    def with_all_rows(self) -> TensorParallel:
        """The same ranks and transport for layers whose rows are all on every rank: without sequence shards."""
        if not self.sequence_parallel:
            return self
        return TensorParallel(self.mesh, False, self.transport, self.context, precision=self.precision)

    @cached_property
    def in_16_bits(self) -> TensorParallel:
        """The same ranks for layers that are not quantised."""
        return self if self.precision == "16" else replace(self, precision="16")

    def agrees_with(self, other: TensorParallel) -> bool:
        """Whether layers on both can be parts of one module: of the same ranks, which divide rows in one way, and of
        one precision."""
        ranks = (self.size, self.sharded) == (other.size, other.sharded) and (self.size == 1 or self.mesh == other.mesh)
        if (self.experts, self.precision) != (other.experts, other.precision):
            return False
        return ranks and (self.shares_tokens is None and other.shares_tokens is None or self.context == other.context)

    @cached_property
    def _opened(self) -> dict[tuple, Transport]:
        return {}

    def column_transport(self, x: Tensor, width: int, grouped: Grouped | None = None) -> Transport:
        """The transport of an ops.column_linear from x (..., K) to `width` output features of one rank.

        grouped: of experts that have as much work. The choice is made once for each shape.
        Errors: ValueError for a transport that cannot run.
        """
        return self._transport(column_request, x, x.shape[-1], width, grouped)

    def row_transport(self, x: Tensor, width: int, n: int) -> Transport:
        """The transport of an ops.row_linear from rows x, `width` input features of one rank, to n output features."""
        return self._transport(row_request, x, width, n)

    def _transport(self, request: Callable[..., Request], x: Tensor, k: int, n: int, *more: Any) -> Transport:
        if self.size == 1 and self.precision == "16":
            return LOCAL
        rows, dtype = x.shape[:-1].numel(), autocast_dtype(x) or x.dtype
        key = (request, rows, k, n, dtype, x.device, *more)
        if key not in self._opened:
            self._opened[key] = open_transport(self.request(*key))
        return self._opened[key]

    def request(
        self, kind: Callable[..., Request], rows: int, k: int, n: int, dtype: torch.dtype, device: torch.device, *more
    ) -> Request:
        """What a linear on these ranks asks; kind: column_request or row_request, which say what rows, k and n are."""
        asked = kind(rows, k, n, dtype, device, self.group, self.sequence_parallel, self.transport, *more)
        return asked._replace(precision=self.precision)

    def __str__(self) -> str:
        context = "" if self.shares_tokens is None else f" and {self.shares_tokens.size} context-parallel ranks"
        experts = "" if self.experts is None else f" and experts on {self.experts.size()} ranks"
        shards = " with sequence shards" * self.sharded
        precision = ", in FP8" * (self.precision == FP8)
        return f"{self.size} tensor-parallel rank{'s' * (self.size > 1)}{shards}{context}{experts}{precision}"

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        return self  # a copy of a layer lies on the same ranks

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return TensorParallel, tuple(getattr(self, each.name) for each in fields(self))
