"""How a layer uses its children: fused, if they are this library's and unchanged; otherwise called as modules.

Belongs here: when a child has to be called, and how. On any number of ranks a call gives the same as modules of
torch.nn that call one another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from tpformer import ops
from tpformer.torch_private import (
    WRAPPERS,
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    has_global_hooks,
    is_compiled_in_place,
    is_touched,
)

from .linear import ColumnParallelLinear, RowParallelLinear, project
from .module import ParallelModule
from .norm import LayerNorm, RMSNorm
from .tensor_parallel import TensorParallel

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
RUNS_WHOLE = "_runs_whole_on_every_rank"  # marks a child that every rank computes whole, so its gradients are equal


class Features(NamedTuple):
    """The output features of a column-parallel linear: those that this rank uses, and how many there are."""

    used: slice
    total: int


def why_called(child: nn.Module, *kinds: type[nn.Module]) -> str | None:
    """Why a child has to be called as a module; None if it is of these kinds and unchanged, so that it may be fused."""
    if type(child) not in kinds:
        return f"it is a {type(child).__name__}"
    if not is_touched(child):
        return None
    if forward_hooks(child) or forward_pre_hooks(child) or backward_hooks(child):
        return "it has hooks"
    if "forward" in child.__dict__ or is_compiled_in_place(child):
        return "its forward has been replaced"
    return "hooks are registered for all modules"


def unwrapped(child: nn.Module) -> nn.Module:
    """The module within wrappers such as torch.compile's, which give it the arguments that they get."""
    inner = next((each for name, each in child.named_children() if name in WRAPPERS), None)
    return child if inner is None else unwrapped(inner)


def others_hook(hooks: Mapping[int, Callable]) -> bool:
    """Whether some of a module's hooks are not FSDP2's, which return what they get without reading its values."""
    fsdp = (getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.") for hook in hooks.values())
    return not all(fsdp) or has_global_hooks()


def keeps(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether a module's methods of these names are those of this kind, though its class may be a subclass, as FSDP2
    makes them."""
    own = vars(module)
    return all(getattr(type(module), name) is getattr(kind, name) and name not in own for name in methods)


def fusable(kind: type[nn.Module], *children: nn.Module) -> bool:
    """Whether all these children are of this kind and unchanged."""
    for child in children:  # every forward asks, and why_called, or all() over a generator, would take twice the time
        if type(child) is not kind or is_touched(child):
            return False
    return True


def fusable_norm(norm: nn.Module) -> bool:
    """Whether a norm is this library's and unchanged."""
    return type(norm) in (LayerNorm, RMSNorm) and not is_touched(norm)


def enter(
    rows: Tensor,
    norm: nn.Module | None,
    columns: Sequence[tuple[nn.Module, Features]],
    tp: TensorParallel,
    *,
    normed: ops.Normed | None = None,
    carry: bool = False,
    private: bool = False,
) -> tuple[Sequence[Tensor], Tensor, bool]:
    """(outputs of column-parallel children for norm(rows), rows for the residual path, whether the children are fused).

    If they are, one gather serves all, no hook sees their outputs, the norm's output is not kept, and the norm's
    backward adds the residual path's gradient. private: as of ops.column_linear.
    """
    children = [child for child, _ in columns]  # of which two may be one module
    ours = fusable(ColumnParallelLinear, *children)
    if ours and (norm is None or fusable_norm(norm)):
        prologue = None if norm is None else norm.prologue(rows.shape[1])
        return *project(rows, children, prologue, normed, carry=carry, private=private), ours
    x = rows if norm is None else call_rows(norm, rows, tp)
    if ours:
        return project(x, children, None)[0], rows, ours
    return [call_column(child, x, tp, features) for child, features in columns], rows, ours


def leave(
    x: Tensor,
    row: nn.Module,
    tp: TensorParallel,
    k: int,
    *,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dropout: ops.Dropout | None = None,
    next_norm: nn.Module | None = None,
    private: bool = False,
) -> tuple[Tensor, ops.Normed | None]:
    """residual + dropout(row(act(x))), and its norm by next_norm; None if that is not made in the same pass.

    x (tokens, k / t): this rank's features. private: as of ops.row_linear. If row is fused, act(x) is not kept, and one
    pass over the reduced rows adds bias, dropout and residual, and makes the norm. An activation that row has itself is
    applied after this one, as where row is called.
    """
    if fusable(RowParallelLinear, row):
        if row.activation is not None:
            if activation is not None:
                x, gate, private = ops.activation(x, activation, gate), None, False
            activation = row.activation
        if next_norm is not None and (not fusable_norm(next_norm) or ops.autocast_dtype(x) is not None):
            next_norm = None  # under autocast the norm's rows are float32, and this linear's are not
        return row.reduced(
            x, activation, gate=gate, residual=residual, dropout=dropout,
            next_norm=None if next_norm is None else next_norm.prologue(row.out_features), private=private,
        )  # fmt: skip
    a = x if activation is None else ops.activation(x, activation, gate)
    y = ops.dropout(call_row(row, a, tp, k), dropout)
    return (y if residual is None else residual + y), None


def call_rows(child: nn.Module, x: Tensor, tp: TensorParallel, **options: Any) -> Tensor:
    """child(x) for a child that turns rows into rows: a norm, an attention, an MLP.

    A child without parallel layers gets all rows on every rank, so that its gradients are equal on all ranks. With
    sequence parallelism that takes an all-gather of x in the forward, and one in the backward.
    """
    if _works_on_shards(child, tp) or not tp.sharded:
        return child(x, **options)
    setattr(child, RUNS_WHOLE, True)
    return ops.scatter_rows(child(ops.gather_rows(x, tp.group), **options), tp.group)


def call_column(child: nn.Module, x: Tensor, tp: TensorParallel, features: Features, **options: Any) -> Tensor:
    """The output features of child(x) that this rank uses, (tokens, used).

    A child without parallel layers computes all features on every rank; one of ours may gather its output. Both take an
    all-reduce of the output's gradient in the backward, besides the all-gather of the rows.
    Errors: ValueError if it computes another number of features.
    """
    used = features.used.stop - features.used.start
    if _works_on_shards(child, tp):
        y = _of_shards(child, x, tp, **options)
        if y.shape[-1] == used and not (isinstance(child, ColumnParallelLinear) and child.gather_output):
            return y
    else:
        setattr(child, RUNS_WHOLE, True)
        y = child(ops.gather_rows(x, tp.group) if tp.sharded else x)
    if y.shape[-1] != features.total:
        raise ValueError(
            f"{type(child).__name__} computes {y.shape[-1]} features of {features.total}: a module that is not built "
            f"of this library's layers has to compute all of them, on every tensor-parallel rank"
        )
    return ops.take_columns(y, features.used, tp.group)


def call_heads(norm: nn.Module, x: Tensor, tp: TensorParallel, features: Features, first: int) -> Tensor:
    """norm(x) for this rank's heads x (batch, seq, heads, head_dim), whose features are `features.used`.

    first: the first feature that no lower rank uses; those from there on are this rank's to give to the others.
    A norm that is not of this library gets all heads on every rank, so that its gradients are equal on all ranks. That
    takes an all-reduce of all heads in the forward, and one in the backward.
    Errors: ValueError for a norm of this library that is not for heads: its gradients would miss other ranks' heads.
    """
    for part in norm.modules() if tp.size > 1 else ():
        if isinstance(part, LayerNorm | RMSNorm) and not (part.of_heads and part.tp.size == tp.size):
            raise ValueError(
                f"{type(part).__name__} norms one rank's heads of {tp.size}: build it with of_heads=True and this tp, "
                f"so that its gradients are summed over the ranks"
            )
    if _works_on_shards(norm, tp):
        return norm(x)
    setattr(norm, RUNS_WHOLE, True)
    given = x.flatten(0, 1).flatten(1)[:, first - features.used.start :]
    whole = ops.reduce_rows(F.pad(given, (first, features.total - features.used.stop)), tp.group, False)
    y = norm(whole.view(*x.shape[:2], -1, x.shape[3]))
    return ops.take_columns(y.reshape(whole.shape), features.used, tp.group).view(x.shape)


def call_row(child: nn.Module, x: Tensor, tp: TensorParallel, k: int) -> Tensor:
    """child(x) for this rank's features x (tokens, k / t). The result is a sequence shard, or equal on all ranks.

    A child without parallel layers gets all features on every rank, by an all-gather of x in the forward.
    """
    if _works_on_shards(child, tp):
        return _of_shards(child, x, tp)
    setattr(child, RUNS_WHOLE, True)
    y = child(ops.gather_columns(x, k, tp.group))
    return ops.scatter_rows(y, tp.group) if tp.sharded else y


def _works_on_shards(child: nn.Module, tp: TensorParallel) -> bool:
    """Whether a child is or contains parallel layers, which communicate by themselves. On one rank always True.

    Errors: ValueError if it draws dropout, because ranks with the same values would draw different masks.
    """
    if tp.size == 1:
        return True
    for part in child.modules():
        if isinstance(part, DROPOUTS) and part.training and part.p > 0:
            raise ValueError(
                f"{type(child).__name__} draws dropout (p={part.p}) from this rank's generator, and other ranks would "
                f"draw other masks for the same values: set p=0, or use ops.dropout with a DropoutKey's site"
            )
    return any(isinstance(part, ParallelModule) for part in child.modules())


def _of_shards(child: nn.Module, x: Tensor, tp: TensorParallel, **options: Any) -> Tensor:
    """child(x). ValueError if modules for all features meet layers that have one rank's, and shapes do not fit."""
    try:
        return child(x, **options)
    except RuntimeError as error:
        misfit = any(words in str(error) for words in ("must match the size", "cannot be multiplied"))
        if tp.size == 1 or isinstance(child, ParallelModule) or not misfit:
            raise
        raise ValueError(
            f"{type(child).__name__} has modules for all features beside layers that have those of one of {tp.size} "
            f"tensor-parallel ranks ({error}): take this library's layers, with tp=..., for modules that meet these "
            f"features; in LoRA these are B of a ColumnParallelLinear, A of a RowParallelLinear, and B, as an LMHead, "
            f"of an lm_head"
        ) from error
