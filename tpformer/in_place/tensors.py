"""What a parameter of a cut model is: a DTensor with which people compute as they do in one process; and what the old
parameter is, which others may still hold.

Belongs here: where torch's DTensor refuses plain arithmetic, or silently gives the numbers of this rank's part. Nothing
of modules, plans or layers: these take `to_local()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpformer.torch_private import (
    allow_anomaly_mode,
    allow_foreach,
    held_by,
    in_backward,
    top_saved_tensors_hooks,
    tree_leaves,
    without_torch_function,
)

from .tensor_parts import (
    COPIED,
    VIEWS,
    check_writable,
    copies,
    is_plain,
    is_recorded_write,
    is_written,
    of_class,
    on_locals,
    on_shards,
    replicated,
    sorted_out,
    whole_result,
)
from .tensor_rules import RULES

OF_SHARDS = "_tpformer_of_shards"  # an attribute of a parameter whose module sees a part of the sequence

# functions of torch that look at a tensor and not at its values
ASKED = frozenset(
    "__get__ __set__ __repr__ __hash__ __format__ __deepcopy__ __reduce_ex__ size dim numel stride detach "
    "is_contiguous is_floating_point is_complex data_ptr untyped_storage storage_offset element_size".split()
)
REPLACED_BY = "_replaced_by"  # on a parameter: the DTensor that has taken its place, for modules that are tied


class GlobalTensor(DTensor):
    """A DTensor with which one computes as in one process.

    It is one for every optimizer, checkpoint and list of parameters. Beyond a DTensor:
    - one that each rank has whole is a plain tensor to every function of torch that gets no sharded one:
      `x * (1 + norm.weight)` means what it did. Results that autograd records, and those with a plain tensor among the
      arguments, are plain, others are GlobalTensors again, and so is its gradient;
    - what Python takes out of it (item(), float(), numpy(), tolist()) is of the whole: partial sums are reduced before.
      Communication: an all-reduce, or an all-gather of what is sharded, on all ranks of the mesh;
    - random values that are filled in (normal_(), nn.init) are those that the first rank draws for the whole.
      Communication: a broadcast of the whole;
    - a plain gradient, .data or source of copy_() has the whole's shape, and each rank takes its part;
    - a slice of a sharded dim is a copy, and writing to it is refused, as it would be lost.

    A sharded one and a plain tensor in one function are refused by torch, unless it is cat, stack, or of 0 dims.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Run a function of torch on what it should see of GlobalTensors."""
        kwargs = kwargs or {}
        with without_torch_function():
            name = getattr(function, "__name__", "")
            writes, target = is_written(name), None
            if writes:
                target = args[0] if args else kwargs.get("tensor")
                check_writable(name, target)
            rule = RULES.get(function)
            if rule is not None:
                return _marked(_noted(name, target, rule(function, *args, **kwargs)))
            if name in ("__get__", "__set__", "__delete__"):  # what it is, not its values
                return _marked(function(*args, **kwargs))
            plain, whole, cut = sorted_out(args, kwargs)
            if cut:
                return _marked(_noted(name, target, on_shards(function, args, kwargs, plain, cut)))
            if writes and args and is_recorded_write(args[0], plain + whole):
                return _marked(function(*[replicated(x, whole[0]) if is_plain(x) else x for x in args], **kwargs))
            if plain and any(hasattr(x, OF_SHARDS) for x in whole) and _detached_before():
                raise RuntimeError(
                    f"a checkpoint with use_reentrant=True computes {name} again with a parameter of a layer on "
                    f"sequence shards, where nothing would sum its gradient over ranks: set use_reentrant=False"
                )
            result = on_locals(function, args, kwargs)
            if not plain:
                result = _marked(whole_result(result, whole[0]))
                return copies(result, None) if name in VIEWS and hasattr(whole[0], COPIED) else result
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of this class; torch's copies what clone() makes, and asks for the same class."""
        if id(self) not in memo:
            memo[id(self)] = _marked(_as_dtensor(self, lambda: DTensor.__deepcopy__(self, memo)))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It is saved as a DTensor, so that reading a file needs torch alone."""
        return _as_dtensor(self, lambda: DTensor.__reduce_ex__(self, protocol))

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        """A GlobalTensor of what DTensor makes, for torch.compile."""
        return _marked(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride))


allow_foreach(GlobalTensor)
allow_anomaly_mode()


class Parameters(dict):
    """The parameters of a module: what files hold and what FSDP2 gathers for a forward are DTensors, which become
    GlobalTensors here."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _marked(value) if type(value) is DTensor and value.device_mesh.ndim == 1 else value)


def parameter_from(value: DTensor, like: nn.Parameter) -> nn.Parameter:
    """A DTensor as the parameter that takes the place of another one, with its attributes."""
    parameter = _marked(nn.Parameter(value, requires_grad=like.requires_grad))
    parameter.__dict__.update(like.__dict__)
    return parameter


class Replaced(nn.Parameter):
    """What a parameter is when a DTensor has taken its place: it never gets a gradient, and says so when it is asked.

    An optimizer that was made before, a list of parameters to clip, or a forward that keeps parameters in a list, a
    dict or a closure would go on without a word.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """ValueError for what computes with it, and for its gradient; what it is may be asked."""
        asked = getattr(function, "__name__", "")
        if function == Tensor.grad.__get__ or asked not in ASKED:
            shape = next(tuple(each.size()) for each in tree_leaves((args, kwargs)) if isinstance(each, Replaced))
            raise ValueError(
                f"the model no longer has this parameter of {shape}, because it has been cut over ranks: make "
                f"optimizers, and lists of parameters, after parallelize, and let the forward read it from its module"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


@torch.no_grad()
def globalize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every plain parameter of a model a GlobalTensor that each rank of the mesh has whole.

    Names, shapes, ties, memory and attributes stay. Communicates nothing.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        held = vars(module)["_parameters"]
        if held and not isinstance(held, Parameters):
            held = vars(module)["_parameters"] = Parameters(held)
        for name, parameter in list(held.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
                made[parameter] = parameter_from(whole, parameter)
            setattr(module, name, made[parameter])  # torch's RNNs hear of it by this
    for parameter in made:
        parameter.__class__ = Replaced


def _detached_before() -> bool:
    """Whether a checkpoint with use_reentrant=True runs again: a backward makes a graph, and no hook saves."""
    return in_backward() and torch.is_grad_enabled() and top_saved_tensors_hooks() is None


def _marked(value: Any) -> Any:
    return of_class(value, GlobalTensor)


def _noted(name: str, written: Any, result: Any) -> Any:
    """The result of a function that may have written to a tensor, or to those of a list. DTensor writes below autograd,
    and counts that for itself alone, while a forward keeps its local tensor: without a count there no backward would
    see the change. What torch does not count either, such as fused updates, is not counted here."""
    if written is not None and name not in ("requires_grad_", "share_memory_") and not name.startswith("_fused"):
        targets = written if isinstance(written, list | tuple) else (written,)
        local = [held_by(x) for x in targets if isinstance(x, DTensor)]
        torch.autograd.graph.increment_version([x for x in local if not x.is_inference()])
    return result


def _as_dtensor(tensor: GlobalTensor, function: Callable[[], Any]) -> Any:
    """What torch does with a tensor that is of exactly the class that it knows."""
    tensor.__class__ = DTensor
    try:
        with without_torch_function():
            return function()
    finally:
        tensor.__class__ = GlobalTensor
