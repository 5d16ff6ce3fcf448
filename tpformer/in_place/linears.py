"""Linears and embeddings of a model that exists become tensor-parallel where they stand.

Belongs here: one module at a time. Its class is swapped for one that derives from a layer of this library and from the
module's own class, so its name, its hooks, its attributes and isinstance stay. Its parameters become DTensors with the
global shapes that they had. All gradients are whole after the backward, whatever optimizer or loop follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.distributed.collectives import all_gather, all_reduce
from tpformer.distributed.dtensor import is_dtensor
from tpformer.layers import (
    ColumnParallelLinear,
    ParallelModule,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from tpformer.layers.embedding import check_lookup
from tpformer.layers.optimizers import watch_optimizers
from tpformer.ops.moves import Moves, move_rows
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import has_gradient_hooks, is_own_parameter, own_slices

from .tensors import REPLACED_BY, Replaced, parameter_from

CONV1D = ("transformers.pytorch_utils", "Conv1D")  # transformers' linear with a weight (in_features, out_features)
FALCON = ("transformers.models.falcon.modeling_falcon", "FalconLinear")  # an nn.Linear that adds its bias by itself


def make_column(
    module: nn.Module,
    tp: TensorParallel | DeviceMesh | None,
    *,
    rows: Sequence[slice] | None = None,
    gather_output: bool = False,
    sequence_dim: int | None = None,
) -> None:
    """Shard the output features of an nn.Linear, or of a Conv1D of transformers, in place.

    Shapes:  x (..., in_features), equal on all ranks; result (..., this rank's output features), with gather_output
             (..., out_features). weight and bias keep their global shapes and become DTensors, Shard over the output
             features in chunks of ceil(out_features / t), the last maybe smaller.
    rows:    this rank's output features, in the order of its result, where they are not the chunk that it holds: blocks
             of a fused projection, or key-value heads that ranks share. The bias is whole on every rank (Replicate).
    sequence_dim: with tp.sequence_parallel x is this rank's shard along that dim, and the result has all of it.
    Communication, per rank: forward that of ops.column_linear, and for gather_output an all-gather of the result;
             backward an all-reduce of x's gradient (a reduce-scatter with sequence shards). With `rows` also
             ops.move_rows of the weight, both ways, and an all-reduce of the bias's gradient; the call itself
             gathers 16 bytes for each slice, and all-reduces 8.
    Errors:  TypeError for another class. ValueError for parameters that have been replaced, have gradients or are
             DTensors already, for a rank that would hold no rows, for `rows` outside the weight, and for `rows` with
             gather_output.
    """
    tp = _check(module, tp, nn.Linear)
    n, k = _features(module)
    _check_share(module, "output features", n, tp)
    moves, width = None, -(-n // tp.size)
    if rows is not None:
        rows = tuple(rows)
        if gather_output:
            raise ValueError("rows with gather_output: ranks may compute the same rows, so leave one of them out")
        if not rows or any(not 0 <= part.start < part.stop <= n or part.step not in (None, 1) for part in rows):
            raise ValueError(f"rows={rows} have to be slices with a start and a stop within {n} output features")
        wanted = _of_all_ranks(rows, tp)
        moves = Moves.of(wanted, tp.rank, width)
        width = max(sum(part.stop - part.start for part in parts) for parts in wanted)  # all choose one transport
    placements = lay_out(module, tp, {"weight": int(_is_conv1d(type(module))), "bias": None if rows is not None else 0})
    options: dict[str, Any] = {"gather_output": gather_output, "sequence_dim": sequence_dim, "used_rows": None}
    sizes = {"out_features": n, "in_features": k, "width": width}
    own = tp if sequence_dim is not None else tp.with_all_rows
    _swap(module, Column, own, rows=rows, moves=moves, placements=placements, **options, **sizes)


def make_row(
    module: nn.Module,
    tp: TensorParallel | DeviceMesh | None,
    *,
    split_input: bool = False,
    sequence_dim: int | None = None,
) -> None:
    """Shard the input features of an nn.Linear, or of a Conv1D of transformers, in place.

    Shapes:  x (..., this rank's chunk of the in_features), with split_input (..., in_features), equal on all ranks;
             result (..., out_features), equal on all ranks. weight becomes a DTensor, Shard over the input features in
             chunks of ceil(in_features / t); bias one that is Replicate, and is added once, after the reduction.
    sequence_dim: with tp.sequence_parallel the result is this rank's shard along that dim.
    Communication, per rank: forward that of ops.row_linear; backward an all-gather of the result's gradient and an
             all-reduce of the bias's with sequence shards, and an all-reduce of x's gradient with split_input.
    Errors:  as in make_column; ValueError in the forward for a sequence that t does not divide.
    """
    tp = _check(module, tp, nn.Linear)
    n, k = _features(module)
    _check_share(module, "input features", k, tp)
    placements = lay_out(module, tp, {"weight": 0 if _is_conv1d(type(module)) else 1, "bias": None})
    width = -(-k // tp.size)
    columns = slice(tp.rank * width, min((tp.rank + 1) * width, k))
    options: dict[str, Any] = {"activation": None, "input_is_parallel": not split_input, "sequence_dim": sequence_dim}
    sizes = {"out_features": n, "in_features": k, "width": width, "columns": columns}
    own = tp if sequence_dim is not None else tp.with_all_rows
    _swap(module, _Row, own, placements=placements, **options, **sizes)


def make_embedding(
    module: nn.Module,
    tp: TensorParallel | DeviceMesh | None,
    *,
    sequence_dim: int | None = None,
    derived: bool = False,
) -> None:
    """Shard the vocabulary of an nn.Embedding in place, in chunks of ceil(num_embeddings / t) rows.

    Shapes:  ids (...) int64, equal on all ranks; result (..., embedding_dim), equal on all ranks; weight a DTensor,
             Shard(0), with the global shape that it had.
    sequence_dim: with tp.sequence_parallel the result is this rank's shard along that dim.
    derived: takes a class that derives from nn.Embedding, too. Its forward may add to what nn.Embedding's gives, and
             must not use the weight otherwise.
    Communication, per rank: forward an all-reduce of the result, backward none; with sequence shards a reduce-scatter,
             and an all-gather.
    Errors:  as in make_column; ValueError for max_norm, scale_grad_by_freq and sparse, and for ids outside the table.
    """
    tp = _check(module, tp, type(module) if derived and isinstance(module, nn.Embedding) else nn.Embedding)
    assert isinstance(module, nn.Embedding)
    check_lookup(module)
    n = module.num_embeddings
    _check_share(module, "rows", n, tp)
    placements = lay_out(module, tp, {"weight": 0})
    sizes = {"vocab_size": n, "hidden_size": module.embedding_dim, "rows": n, "width": -(-n // tp.size)}
    own = tp if sequence_dim is not None else tp.with_all_rows
    _swap(module, _Embedding, own, placements=placements, sequence_dim=sequence_dim, **sizes)


class _InPlace(ParallelModule):
    """A layer in the place of a plain module, all of whose gradients are whole after the backward."""

    makes_whole_gradients = True
    guard: Any = None  # the Guard of the model that it is part of
    sequence_chain: Any = None  # the Chain whose forwards decide whether it runs on sequence shards
    transposed: bool  # whether the weight is (in_features, out_features), as in a Conv1D

    def local(self, name: str, partial: bool = False) -> Tensor | None:
        """This rank's part of a parameter, of a weight (out_features, in_features). partial: the gradient is summed.

        A plain tensor for one that is whole, such as functional_call may give, is what every rank computed of the whole
        one: GlobalTensors mix with plain tensors, and their results are plain.
        """
        value = self._parameters.get(name)
        if value is None or is_dtensor(value) or not self.placements[name].is_replicate():
            value = super().local(name)
        if partial and value is not None:
            value = ops.sum_gradient(value, self.tp.group)
        return value.t() if self.transposed and name == "weight" and value is not None else value

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's forward, contiguous as that of the module whose place it took.

        The compiler has nothing to gain inside, and would compile it anew for each layer.
        """
        self.report()
        return super().forward(*args, **kwargs).contiguous()

    def report(self) -> None:
        """Tell the guard and the chain, if there are some, that this layer is called."""
        if self.guard is not None:
            self.guard.visit(self)
        if self.sequence_chain is not None:
            self.sequence_chain.check_recompute()

    @property
    def qconfig(self) -> Any:
        """What torch.ao.quantization gives each module before it replaces some; it would leave this one as it is."""
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise ValueError(
            f"a {type(self).__name__} is cut over ranks, and torch's quantization would silently leave it as it is: "
            f"quantize before parallelize, which then leaves quantized linears whole"
        )

    def reset_parameters(self) -> None:
        """Draw the whole tensors by torch's generator, as the module did whose place this one took."""
        self.swapped[1].reset_parameters(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)


class Column(_InPlace, ColumnParallelLinear):
    """A linear of a model that has become column-parallel (make_column)."""

    rows: tuple[slice, ...] | None
    moves: Moves | None  # how it gets these rows
    siblings: Any = None  # the Siblings that it shares its input with, where share_inputs has found some

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The result of ColumnParallelLinear, which a sibling that got the same x may have made already."""
        if self.siblings is None:
            return super().forward(x)
        self.report()
        self.check(x)
        return self.finished(self.siblings.rows_of(self, x), x).contiguous()

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        if self.rows is None:
            return super().local_parameters()
        weight, bias = self.local("weight"), self.local("bias", partial=True)
        assert weight is not None and self.moves is not None
        if self.tp.group is None:
            weight = torch.cat([weight[part] for part in self.rows])
        else:
            weight = move_rows(weight, self.moves, self.tp.group)
        return weight, None if bias is None else torch.cat([bias[part] for part in self.rows])

    def defers(self) -> bool:
        return self.rows is None and not self.transposed and super().defers()


class _Row(_InPlace, RowParallelLinear):
    def defers(self) -> bool:
        return not self.transposed and super().defers()


class _Embedding(_InPlace, VocabParallelEmbedding):
    sequence_dim: int | None

    @uncompiled
    def forward(self, ids: Tensor) -> Tensor:
        if not self.tp.sharded:
            return super().forward(ids)
        self.report()
        assert self.sequence_dim is not None
        dim = self.sequence_dim % (ids.ndim + 1)
        if dim == ids.ndim or ids.shape[dim] % self.tp.size:
            raise ValueError(
                f"ids of shape {tuple(ids.shape)} cannot be shared along sequence_dim={self.sequence_dim} by "
                f"{self.tp.size} tensor-parallel ranks: pad the sequence to a multiple"
            )
        moved = ids.movedim(dim, 0)
        rows = super().forward(moved)
        return rows.view(-1, *moved.shape[1:], rows.shape[1]).movedim(0, dim).contiguous()

    def extra_repr(self) -> str:
        """Sizes, as repr() shows them."""
        return f"{self.vocab_size}, {self.hidden_size}, tp={self.tp.size}"


@cache
def class_of(kind: Any, own: Any) -> Any:
    """The class of a module of class `own` that has become a `kind`."""
    name = own.__name__ if kind.__bases__ == (nn.Module,) else kind.__bases__[-1].__name__
    names = {"__module__": own.__module__, "swapped": (kind, own), "transposed": _is_conv1d(own)}
    if kind is _Embedding and own is not nn.Embedding:  # its forward calls super().forward
        return type(own.__name__, (own, class_of(kind, nn.Embedding)), names)
    return type(name, (kind, own), names)


def _rebuilt(kind: Any, own: Any) -> nn.Module:
    swapped = class_of(kind, own)
    return swapped.__new__(swapped)


def reduced(module: Any, protocol: Any) -> Any:
    """What copy and pickle need: no module of Python holds the class by its name, so it is made anew."""
    usual = nn.Module.__reduce_ex__(module, protocol)
    if type(module) is not class_of(*module.swapped):  # FSDP2 has derived from it, and refuses copies
        return usual
    return _rebuilt, module.swapped, *usual[2:]


def is_linear(own: type[nn.Module]) -> bool:
    """Whether a class is nn.Linear, or one of transformers' that computes nothing else."""
    return own is nn.Linear or (own.__module__, own.__name__) in (CONV1D, FALCON)


def _is_conv1d(own: type[nn.Module]) -> bool:
    return (own.__module__, own.__name__) == CONV1D


def _features(module: nn.Module) -> tuple[int, int]:
    """(output features, input features) of a linear."""
    n, k = ("nf", "nx") if _is_conv1d(type(module)) else ("out_features", "in_features")
    return getattr(module, n), getattr(module, k)


def _check(module: nn.Module, tp: TensorParallel | DeviceMesh | None, kind: type[nn.Module]) -> TensorParallel:
    """tp, where a module is of exactly this kind and as its class made it."""
    own = type(module)
    if own is not kind and not (kind is nn.Linear and is_linear(own)):
        raise TypeError(
            f"a {own.__name__} cannot be sharded in place: only an nn.{kind.__name__} itself can"
            f"{', or a Conv1D or FalconLinear of transformers' * (kind is nn.Linear)}, because the forward of another "
            f"class is unknown"
        )
    if "forward" in module.__dict__:
        raise ValueError(f"the forward of this {own.__name__} has been replaced: shard it in place before that")
    for name in ("weight", "bias")[: 1 if issubclass(kind, nn.Embedding) else 2]:
        if not is_own_parameter(module, name):
            raise ValueError(
                f"{name} of {own.__name__} is computed from other parameters: shard it in place before that"
            )
        parameter = getattr(module, name)
        if is_dtensor(parameter):
            raise ValueError(
                f"{name} of {own.__name__} is a DTensor already: call fully_shard after the sharding in place"
            )
        if parameter is None or isinstance(parameter, Replaced):  # tied, and asked before
            continue
        if parameter.grad is not None or has_gradient_hooks(parameter):
            raise ValueError(f"{name} of {own.__name__} has a gradient or hooks for it: shard it in place before that")
    return TensorParallel.of(tp)


def _check_share(module: nn.Module, what: str, n: int, tp: TensorParallel) -> None:
    if n <= (tp.size - 1) * -(-n // tp.size):
        raise ValueError(
            f"{type(module).__name__} has {n} {what}, too few for {tp.size} tensor-parallel ranks: at least one would "
            f"hold none; leave this module whole, or use fewer ranks"
        )


def _of_all_ranks(rows: Sequence[slice], tp: TensorParallel) -> list[list[slice]]:
    """Every rank's rows. Communicates: an all-reduce of 8 bytes, and an all-gather of 16 for each slice."""
    if tp.mesh is None:
        return [list(rows)]
    device = tp.mesh.device_type
    most = int(all_reduce(torch.tensor([len(rows)], device=device), tp.group, "max"))
    own = torch.zeros(1, most, 2, dtype=torch.int64)
    own[0, : len(rows)] = torch.tensor([[part.start, part.stop] for part in rows])
    found = all_gather(own.to(device), tp.group).tolist()
    return [[slice(start, stop) for start, stop in parts if start < stop] for parts in found]


def lay_out(module: nn.Module, tp: TensorParallel, shards: dict[str, int | None]) -> dict[str, Any]:
    """Make each parameter a DTensor, sharded on that dim (None: Replicate), and return their placements."""
    if tp.mesh is None:
        return {}
    from torch.distributed.tensor import Replicate, Shard

    watch_optimizers()
    placements = {name: Replicate() if dim is None else Shard(dim) for name, dim in shards.items()}
    found = {name: getattr(module, name) for name in placements}
    laid_out = {name: _laid_out(name, p, tp.mesh, placements[name]) for name, p in found.items() if p is not None}
    for name, parameter in laid_out.items():
        setattr(found[name], REPLACED_BY, parameter)
        found[name].__class__ = Replaced
        module.register_parameter(name, parameter)
    return placements


def _laid_out(name: str, whole: nn.Parameter, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    """The DTensor for a whole parameter, the same one for all modules that are tied by it."""
    from torch.distributed.tensor import DTensor

    tied = getattr(whole, REPLACED_BY, None)
    if tied is not None:
        if tied.device_mesh != mesh or tied.placements != (placement,):
            raise ValueError(
                f"{name} {tuple(whole.shape)} is tied to a parameter with {tied.placements} on {tied.device_mesh}, and "
                f"cannot become {placement} on {mesh}: shard both in the same way, or leave both whole"
            )
        return tied
    held = whole.detach()[own_slices(whole.shape, mesh, [placement])]
    local = held.clone() if held.is_meta else held.to(mesh.device_type, copy=True)
    value = DTensor.from_local(
        local.contiguous(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return parameter_from(value, whole)


def _swap(module: nn.Module, kind: Any, tp: TensorParallel, **attributes: Any) -> None:
    own: Any = type(module)
    module.__class__ = class_of(kind, own)
    for name, value in {"tp": tp, "initial": {}, "shares_gather": (), **attributes}.items():
        setattr(module, name, value)
