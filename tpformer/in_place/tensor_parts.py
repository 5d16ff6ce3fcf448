"""Whole tensors, and the parts of them that ranks hold: what functions of torch get and return in their place.

Belongs here: how tensors among arguments are sorted, made local, and laid out. Which function gets what is in
tensor_rules.py, and the class of the tensors in tensors.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from tpformer.torch_private import held_by, laid_out_as, own_slices

COPIED = "_tpformer_copied"  # an attribute of a view of a sharded tensor, which is none: what is written to it is lost
WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "copy_")
VIEWS = frozenset(
    "__getitem__ select narrow split split_with_sizes chunk tensor_split unbind diagonal unflatten view view_as "
    "reshape flatten expand transpose t permute squeeze unsqueeze swapaxes movedim detach hsplit vsplit".split()
)
BY_ELEMENT = ("_fused_sgd_", "_fused_adagrad_", "_foreach_copy_")  # of optimizers, which DTensor does not know
UNDIVIDED = ("_weight_norm", "prod", "cumprod", "cummax", "cummin")  # whose backward DTensor does not know
TABLES = ("embedding", "embedding_bag")  # with max_norm they write to the parameter before they read it
PATIENCE = 10  # seconds
TAKEN = "_taken_as_gradient"  # an attribute of a tensor that is some parameter's gradient


@contextmanager
def said(what: str, patience: float) -> Iterator[None]:
    """Within, a rank that waits for the others for longer than `patience` seconds says why, once."""
    words = f"{what} has waited {patience:g} s for other ranks: call it on all of them, not on one"
    timer = Timer(patience, warnings.warn, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_cut(x: Tensor) -> bool:
    if isinstance(x, DTensor):
        for place in x.placements:
            if type(place) is not Replicate:
                return True
    return False


def sorted_out(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[DTensor], list[DTensor]]:
    """(plain, whole, sharded) tensors among the arguments of a function of torch."""
    plain: list[Tensor] = []
    whole: list[DTensor] = []
    cut: list[DTensor] = []

    def sort(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, DTensor):
                (cut if is_cut(value) else whole).append(value)
            elif isinstance(value, Tensor):
                plain.append(value)
            elif isinstance(value, list | tuple):
                sort(value)

    sort(args)
    if kwargs:
        sort(kwargs.values())
    return plain, whole, cut


class Local(torch.autograd.Function):
    """to_local() of a whole tensor, whose gradient is memory of its own.

    DTensor's own wraps the gradient as it comes. `x + b + c` hands b and c one tensor, of which autograd would copy one
    if it saw that; clipping b's gradient in place would clip c's, too.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, written: bool) -> Tensor:
        """The local tensor. Autograd lets a function write to it only where it does not see that it is a view."""
        ctx.tensor, held = tensor, held_by(tensor)
        return held.detach() if written else held.view_as(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor, None]:
        """Its gradient, whole on this rank."""
        (gradient,) = gradients
        if gradient.layout is torch.sparse_coo:  # of a table with sparse=True: DTensor has no sparse ones
            gradient = gradient.to_dense()
        if gradient.stride() != held_by(ctx.tensor).stride() or hasattr(gradient, TAKEN):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        setattr(gradient, TAKEN, True)
        made = replicated if gradient.requires_grad else whole_result
        return made(gradient, ctx.tensor), None


class Whole(torch.autograd.Function):
    """redistribute() of a result whose terms lie on different ranks. Its gradient is whole.

    DTensor's own raises where the gradient's terms are of another kind, as a norm's and a sum's are.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, places: list[Any]) -> DTensor:
        """The result, whole."""
        ctx.places = places
        return tensor.redistribute(placements=places)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None]:
        """The whole gradient."""
        return gradients[0].redistribute(placements=ctx.places), None


def on_locals(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function makes of plain tensors and of the whole ones' local tensors."""
    replaced: dict[int, Any] = {}
    recorded, written = torch.is_grad_enabled(), getattr(function, "__name__", "") in TABLES

    def local(value: Any) -> Any:
        if isinstance(value, DTensor):
            own = Local.apply(value, written) if recorded else held_by(value)
            replaced[id(own)] = value
            return own
        return [local(part) for part in value] if isinstance(value, list | tuple) else value

    result = function(*[local(each) for each in args], **{name: local(each) for name, each in kwargs.items()})
    return replaced.get(id(result), result)  # itself, where the function works in place


def on_shards(function: Any, args: tuple, kwargs: dict[str, Any], plain: list[Tensor], cut: list[DTensor]) -> Any:
    """What DTensor makes of tensors among which some are sharded."""
    name = getattr(function, "__name__", str(function))
    if plain and (is_plain(args[0]) if is_written(name) else any(x.ndim for x in plain)):
        args, kwargs = settled(args, all_sums=True), dict(zip(kwargs, settled([*kwargs.values()], True), strict=True))
        if not (cut := sorted_out(args, kwargs)[2]):
            return on_locals(function, args, kwargs)

    def scalar(value: Any) -> Any:  # a loss, say: its gradient has to be plain again
        if isinstance(value, Tensor):
            recorded = value.requires_grad and value.ndim == 0 and not isinstance(value, DTensor)
            return replicated(value, cut[0]) if recorded else value
        return [scalar(part) for part in value] if isinstance(value, list | tuple) else value

    if plain:
        args, kwargs = tuple(scalar(args)), {name: scalar(value) for name, value in kwargs.items()}
    if name in BY_ELEMENT or (name == "__setitem__" and _is_mask(*args)):
        return on_locals(function, args, kwargs)
    if name in UNDIVIDED and (name != "prod" or len(args) + len(kwargs) > 1) and is_recorded(cut):
        raise _refusal(name, cut[0])
    try:
        if name == "__setitem__":
            check_writable(name, copies(args[0][args[1]], args[0]))
        return copies(function(*args, **kwargs), cut[0]) if name in VIEWS else settled(function(*args, **kwargs))
    except (RuntimeError, AssertionError) as error:
        if name in VIEWS and "unevenly sharded" in str(error):
            return copies(
                function(cut[0].redistribute(placements=[Replicate()] * cut[0].device_mesh.ndim), *args[1:]), None
            )
        if not plain and ("shard" in str(error).lower() or "DTensor" in str(error)):
            raise _refusal(name, cut[0], type(error)) from error
        if not plain:
            raise
        remedy = "use its .full_tensor(), or do this before parallelize"
        if name == "_foreach_norm":  # of torch's clipping
            remedy = "call tpformer.clip_grad_norm_, which takes both together"
        raise type(error)(
            f"{name} of a plain tensor {tuple(plain[0].shape)} and a parameter "
            f"{tuple(cut[0].shape)} that is cut over ranks: {remedy}"
        ) from error


def settled(value: Any, all_sums: bool = False) -> Any:
    """Results whose terms lie on different ranks, such as a largest value or a norm, made whole on all of them.

    DTensor goes on from them as if they were sums: it adds ranks' norms, and counts what is true on two ranks twice.
    all_sums: sums, too, which it handles well.
    Communication: an all-reduce for each, one for numbers of one list.
    """
    if isinstance(value, DTensor):
        places = _places(value, all_sums)
        if places == list(value.placements):
            return value
        with said(f"a result of {tuple(value.shape)} of which each rank has a term", PATIENCE):
            return Whole.apply(value, places)
    if not isinstance(value, list | tuple):
        return value
    terms = [x for x in value if isinstance(x, DTensor) and _places(x, all_sums) != list(x.placements)]
    if not terms:
        return value
    if len(terms) > 1 and not any(x.ndim for x in terms):
        made = {id(x): whole for x, whole in zip(terms, settled(torch.stack(terms), all_sums).unbind(), strict=True)}
        return type(value)([made.get(id(part), part) for part in value])
    return type(value)([settled(part, all_sums) for part in value])


def _places(tensor: DTensor, all_sums: bool) -> list[Any]:
    """The placements of a tensor, without terms, but for those of sums that are not to be made whole."""
    sums = () if all_sums or tensor.dtype is torch.bool else ("sum", "avg")
    terms = [isinstance(p, Partial) and not (type(p) is Partial and p.reduce_op in sums) for p in tensor.placements]
    return [Replicate() if term else p for p, term in zip(tensor.placements, terms, strict=True)]


def is_written(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name in WRITES or name[-1:] == "_" != name[-2:-1]


def is_recorded(tensors: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def is_recorded_write(target: Any, tensors: list[Any]) -> bool:
    """Whether autograd records what is written to a whole tensor, which writing to its local one would hide from it."""
    return isinstance(target, DTensor) and not (target.is_leaf and target.requires_grad) and is_recorded(tensors)


def is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def _is_mask(tensor: Any, index: Any, value: Any) -> bool:
    """Whether `tensor[index] = value` writes one number to elements that a tensor laid out alike chooses."""
    alike = isinstance(tensor, DTensor) and isinstance(index, DTensor) and index.dtype is torch.bool
    number = not isinstance(value, Tensor) or value.ndim == 0
    return alike and number and (index.shape, index.placements) == (tensor.shape, tensor.placements)


def _refusal(name: str, cut: DTensor, kind: type[Exception] = RuntimeError) -> Exception:
    return kind(
        f"torch cannot take {name} of a parameter {tuple(cut.shape)} that is cut over ranks: use its .full_tensor(), "
        f"or do this before parallelize"
    )


def check_writable(name: str, tensor: Any) -> None:
    """RuntimeError where what a function writes would be lost."""
    if hasattr(tensor, COPIED):
        raise RuntimeError(
            f"{name} of a part of a parameter that is cut over ranks would be lost, as that part is a copy: change its "
            f".full_tensor(), and give that to copy_()"
        )


def copies(result: Any, source: DTensor | None) -> Any:
    """Views of a sharded tensor. Those that DTensor has gathered are copies, and it writes to them without a word."""
    for x in result if isinstance(result, list | tuple) else (result,):
        if isinstance(x, DTensor):
            shared = source is not None and not hasattr(source, COPIED)
            if not shared or _memory(x) != _memory(source):
                setattr(x, COPIED, True)
    return result


def _memory(tensor: Any) -> int:
    return held_by(tensor).untyped_storage().data_ptr()


def whole_result(result: Any, like: DTensor) -> Any:
    """A result of operations on whole tensors: plain where autograd records it, as arithmetic goes on from it."""
    if type(result) in (list, tuple):
        return type(result)([whole_result(part, like) for part in result])
    if not isinstance(result, Tensor) or isinstance(result, DTensor) or result.requires_grad:
        return result
    held = held_by(like)
    same = result.shape == held.shape and result.dtype == held.dtype and result.stride() == held.stride()
    return laid_out_as(result, like) if same else replicated(result, like)


def of_class(value: Any, kind: type) -> Any:
    """The same value, in which all DTensors are of this class from now on."""
    if type(value) is DTensor:
        value.__class__ = kind
    elif isinstance(value, list | tuple):
        for part in value:
            of_class(part, kind)
    return value


def replicated(plain: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)


def part_of(whole: Tensor, like: DTensor) -> DTensor:
    """A tensor of the whole's shape, laid out as another one is."""
    if isinstance(whole, DTensor):
        return whole if whole.placements == like.placements else whole.redistribute(placements=like.placements)
    if whole.shape != like.shape:
        raise ValueError(
            f"a tensor of {tuple(whole.shape)} for one of {tuple(like.shape)} on ranks: give one of its global shape"
        )
    held = whole.detach()[own_slices(like.shape, like.device_mesh, like.placements)]
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
