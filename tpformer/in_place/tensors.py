"""What a parameter of a cut model is: a DTensor with which people compute as they do in one process.

Belongs here: where torch's DTensor refuses plain arithmetic, or silently gives the numbers of this rank's part. Nothing
of modules, plans or layers: these take `to_local()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpformer.torch_private import (
    allow_foreach,
    held_by,
    laid_out_as,
    methods_of_the_object,
    own_part,
    without_torch_function,
)

from .replaced import Replaced

TAKEN = "_taken_as_gradient"  # an attribute of a tensor that is some parameter's gradient


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
    - a plain gradient, .data or source of copy_() has the whole's shape, and each rank takes its part.

    A sharded one and a plain tensor in one function are refused by torch, unless it is cat, stack, or of 0 dims.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Run a function of torch on what it should see of GlobalTensors."""
        kwargs = kwargs or {}
        with without_torch_function():
            rule = _RULES.get(function)
            if rule is not None:
                return _marked(rule(function, *args, **kwargs))
            if getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__"):  # what it is, not its values
                return _marked(function(*args, **kwargs))
            plain, whole, cut = _sorted(args, kwargs)
            if cut:
                return _marked(_on_shards(function, args, kwargs, plain, cut))
            result = _on_locals(function, args, kwargs)
            return result if plain else _whole(result, whole[0])

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
        """As DTensor's, for torch.compile."""
        return _marked(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride))


allow_foreach(GlobalTensor)


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


def _is_cut(x: Tensor) -> bool:
    if isinstance(x, DTensor):
        for place in x.placements:
            if type(place) is not Replicate:
                return True
    return False


def _sorted(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[DTensor], list[DTensor]]:
    """(plain, whole, sharded) tensors among the arguments of a function of torch."""
    plain: list[Tensor] = []
    whole: list[DTensor] = []
    cut: list[DTensor] = []

    def sort(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, DTensor):
                (cut if _is_cut(value) else whole).append(value)
            elif isinstance(value, Tensor):
                plain.append(value)
            elif isinstance(value, list | tuple):
                sort(value)

    sort(args)
    if kwargs:
        sort(kwargs.values())
    return plain, whole, cut


def _marked(value: Any) -> Any:
    """The same value, in which all DTensors are GlobalTensors."""
    if type(value) is DTensor:
        value.__class__ = GlobalTensor
    elif isinstance(value, list | tuple):
        for part in value:
            _marked(part)
    return value


def _as_dtensor(tensor: GlobalTensor, function: Callable[[], Any]) -> Any:
    """What torch does with a tensor that is of exactly the class that it knows."""
    tensor.__class__ = DTensor
    try:
        with without_torch_function():
            return function()
    finally:
        tensor.__class__ = GlobalTensor


class _Local(torch.autograd.Function):
    """to_local() of a whole tensor, whose gradient is memory of its own.

    DTensor's own wraps the gradient as it comes. `x + b + c` hands b and c one tensor, of which autograd would copy one
    if it saw that; clipping b's gradient in place would clip c's, too.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        """The local tensor."""
        ctx.tensor, held = tensor, held_by(tensor)
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> DTensor:
        """Its gradient, whole on this rank."""
        (gradient,) = gradients
        if gradient.stride() != held_by(ctx.tensor).stride() or hasattr(gradient, TAKEN):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        setattr(gradient, TAKEN, True)
        return _whole(gradient, ctx.tensor) if not gradient.requires_grad else _replicated(gradient, ctx.tensor)


def _on_locals(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function makes of plain tensors and of the whole ones' local tensors."""
    replaced: dict[int, Any] = {}
    recorded = torch.is_grad_enabled()

    def local(value: Any) -> Any:
        if isinstance(value, DTensor):
            own = _Local.apply(value) if recorded else held_by(value)
            replaced[id(own)] = value
            return own
        return [local(part) for part in value] if isinstance(value, list | tuple) else value

    result = function(*[local(each) for each in args], **{name: local(each) for name, each in kwargs.items()})
    return replaced.get(id(result), result)  # itself, where the function works in place


def _on_shards(function: Any, args: tuple, kwargs: dict[str, Any], plain: list[Tensor], cut: list[DTensor]) -> Any:
    """What DTensor makes of tensors among which some are sharded."""

    def scalar(value: Any) -> Any:  # a loss, say: its gradient has to be plain again
        if isinstance(value, Tensor):
            return value if isinstance(value, DTensor) or value.ndim else _replicated(value, cut[0])
        return [scalar(part) for part in value] if isinstance(value, list | tuple) else value

    if plain:
        args, kwargs = tuple(scalar(args)), {name: scalar(value) for name, value in kwargs.items()}
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not plain:
            raise
        raise type(error)(
            f"{getattr(function, '__name__', function)} of a plain tensor {tuple(plain[0].shape)} and a parameter "
            f"{tuple(cut[0].shape)} that is cut over ranks: use its .full_tensor(), or do this before parallelize"
        ) from error


def _whole(result: Any, like: DTensor) -> Any:
    """A result of operations on whole tensors: plain where autograd records it, as arithmetic goes on from it."""
    if type(result) in (list, tuple):
        return type(result)([_whole(part, like) for part in result])
    if not isinstance(result, Tensor) or isinstance(result, DTensor) or result.requires_grad:
        return result
    held = held_by(like)
    same = result.shape == held.shape and result.dtype == held.dtype and result.stride() == held.stride()
    return _marked(laid_out_as(result, like) if same else _replicated(result, like))


def _replicated(plain: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _part_of(whole: Tensor, like: DTensor) -> DTensor:
    """A tensor of the whole's shape, laid out as another one is."""
    if isinstance(whole, DTensor):
        return whole if whole.placements == like.placements else whole.redistribute(placements=like.placements)
    if whole.shape != like.shape:
        raise ValueError(
            f"a tensor of {tuple(whole.shape)} for one of {tuple(like.shape)} on ranks: give one of its global shape"
        )
    shape, offset = own_part(like.shape, like.device_mesh, like.placements)
    held = whole.detach()[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _unchanged(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions that ask which tensor it is, not for its values."""
    return function(*args, **kwargs)


def _join(function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """cat and stack, of values that have been made of sharded and of whole parameters."""
    plain, whole, cut = _sorted((tensors,), {})
    if cut:
        tensors = [x if isinstance(x, DTensor) else _replicated(x, cut[0]) for x in tensors]
        return function(tensors, *args, **kwargs)
    result = _on_locals(function, (tensors, *args), kwargs)
    return result if plain else _whole(result, whole[0])


def _of_whole(function: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that take values out of torch."""
    return function(tensor.full_tensor(), *args, **kwargs)


def _view(function: Any, tensor: DTensor) -> Any:
    """Attributes that are tensors."""
    if _is_cut(tensor):
        return function(tensor)
    return _whole(_on_locals(function, (tensor,), {}), tensor)


def _of_memory(function: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that ask for this rank's memory."""
    local = held_by(tensor)
    result = function(local, *args, **kwargs)
    return tensor if result is local else result


def _get_gradient(function: Any, tensor: DTensor) -> Any:
    gradient = function(tensor)
    if gradient is not None and not isinstance(gradient, DTensor):  # from a user's hook on this parameter
        gradient = tensor.grad = _part_of(gradient, tensor)
    return gradient


def _set_gradient(function: Any, tensor: DTensor, value: Any) -> None:
    function(tensor, value if value is None or isinstance(value, DTensor) else _part_of(value, tensor))


@torch.no_grad()
def _set_data(function: Any, tensor: DTensor, value: Tensor) -> None:
    """tensor.data = value: its rank's part becomes this tensor's memory."""
    local, new = held_by(tensor), _part_of(value, tensor).to_local()
    if (new.dtype, new.device) != (local.dtype, local.device):
        raise ValueError(
            f".data of a parameter on ranks stays {local.dtype} on {local.device}, and this is {new.dtype} on "
            f"{new.device}: use model.to(...)"
        )
    local.data = new


@torch.no_grad()
def _copy(function: Any, tensor: Any, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, DTensor):
        return function(tensor, _part_of(source, tensor), *args, **kwargs)
    return function(tensor, source.full_tensor(), *args, **kwargs)


def _fill(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Random values in place: each rank draws the whole tensor, and the first rank's is taken."""
    tensor, rest = (args[0], args[1:]) if args else (kwargs.pop("tensor"), ())
    if tensor.is_meta:
        return tensor
    mesh = tensor.device_mesh
    with torch.no_grad():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
        function(whole, *rest, **kwargs)
        for dim in range(mesh.ndim):
            dist.broadcast(whole, group=mesh.get_group(dim), group_src=0)
        tensor.to_local().copy_(_part_of(whole, tensor).to_local())
    return tensor


_of_values = (
    "item is_nonzero tolist numpy __float__ __int__ __bool__ __index__ __complex__ __array__ __format__".split()
)
_of_places = "data_ptr is_shared share_memory_ is_pinned".split()
_drawn = "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
_same = [torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.detach_, Tensor.__hash__]
_same += [Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
_same += [Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.dim, Tensor.numel, Tensor.element_size]
_same += [Tensor.untyped_storage, Tensor.storage, Tensor.get_device, torch.is_floating_point, torch.is_complex]
_same += [*methods_of_the_object()]
_RULES: dict[Any, Callable] = {
    **dict.fromkeys(_same, _unchanged),
    **{getattr(Tensor, name): _of_whole for name in _of_values},
    **{getattr(Tensor, name): _of_memory for name in _of_places},
    **{getattr(Tensor, name): _fill for name in _drawn},
    **dict.fromkeys((nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_), _fill),  # the others call Tensor's
    Tensor.grad.__get__: _get_gradient,
    Tensor.grad.__set__: _set_gradient,
    Tensor.data.__set__: _set_data,
    Tensor.copy_: _copy,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack), _join),
    **{getattr(Tensor, name).__get__: _view for name in ("data", "T", "mT", "H", "mH", "real", "imag")},
}
