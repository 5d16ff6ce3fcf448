"""Functions of torch that see something else of a GlobalTensor than its local tensor, or than a DTensor.

Belongs here: one rule for each kind of function, and the table of all. A rule is called with the function and its
arguments, outside of GlobalTensor's own handling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from tpformer.torch_private import counted_alone, held_by, methods_of_the_object, unscale, with_torch_function

from .tensor_parts import PATIENCE, is_cut, of_class, on_locals, part_of, replicated, said, sorted_out, whole_result


def _unchanged(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions that ask which tensor it is, not for its values."""
    return function(*args, **kwargs)


def _backward(function: Any, roots: Any, *args: Any, **kwargs: Any) -> None:
    """Functions that run a backward, of roots and inputs that torch does not ask, so that what runs within sees this
    class: hooks, and forwards that a checkpoint runs again."""
    inputs = kwargs.get("inputs")
    if inputs is not None and function is torch.autograd.backward:
        kwargs["inputs"] = _edges((inputs,) if isinstance(inputs, Tensor) else inputs)
    roots = _aliases(roots)
    with with_torch_function():
        function(roots, *args, **kwargs)


def _grad(function: Any, outputs: Any, inputs: Any, *, materialize_grads: bool = False, **kwargs: Any) -> Any:
    """torch.autograd.grad, likewise."""
    roots, edges = _aliases(outputs), _edges(inputs)
    kwargs["allow_unused"] = kwargs.get("allow_unused") or materialize_grads
    with with_torch_function():
        found = function(roots, edges, **kwargs)
        if materialize_grads:  # torch makes no zeros for edges
            options = {"requires_grad": kwargs.get("create_graph", False)}
            pairs = zip(inputs, found, strict=True)
            found = tuple(torch.zeros_like(x, **options) if y is None else y for x, y in pairs)
        return found


def _aliases(roots: Any) -> Any:
    """The same tensors, of which DTensors are of torch's class."""
    if isinstance(roots, list | tuple):
        return tuple(map(_aliases, roots))
    return roots.view_as(roots) if isinstance(roots, DTensor) else roots


def _edges(inputs: Sequence[Any]) -> Any:
    """The same inputs, of which DTensors are named by their edges. One that needs no gradient torch refuses."""
    return tuple(get_gradient_edge(x) if isinstance(x, DTensor) and x.requires_grad else _aliases(x) for x in inputs)


def _join(function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """cat and stack, of values that have been made of sharded and of whole parameters."""
    plain, whole, cut = sorted_out((tensors,), {})
    if cut:
        tensors = [x if isinstance(x, DTensor) else replicated(x, cut[0]) for x in tensors]
        return function(tensors, *args, **kwargs)
    result = on_locals(function, (tensors, *args), kwargs)
    return result if plain else whole_result(result, whole[0])


def _of_whole(function: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that take values out of torch."""
    if not is_cut(tensor):
        return function(held_by(tensor), *args, **kwargs)
    name = getattr(function, "__name__", "a value").strip("_")
    with said(f"{name}() of a tensor {tuple(tensor.shape)} that ranks share", PATIENCE):
        whole = tensor.full_tensor()
    return function(whole, *args, **kwargs)


def _view(function: Any, tensor: DTensor) -> Any:
    """Attributes that are tensors."""
    if is_cut(tensor):
        return function(tensor)
    return whole_result(on_locals(function, (tensor,), {}), tensor)


def _of_memory(function: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that ask for this rank's memory."""
    local = held_by(tensor)
    result = function(local, *args, **kwargs)
    return tensor if result is local else result


def _register(function: Any, tensor: DTensor, hook: Callable) -> Any:
    """register_hook(): the hook gets the gradient as this class has it."""
    return function(tensor, lambda gradient: hook(of_class(gradient, type(tensor))))


def _get_gradient(function: Any, tensor: DTensor) -> Any:
    gradient = function(tensor)
    if gradient is not None and not isinstance(gradient, DTensor):  # from a user's hook on this parameter
        gradient = tensor.grad = part_of(gradient, tensor)
    return gradient


def _set_gradient(function: Any, tensor: DTensor, value: Any) -> None:
    function(tensor, value if value is None or isinstance(value, DTensor) else part_of(value, tensor))


def _get_data(function: Any, tensor: DTensor) -> DTensor:
    """tensor.data: no backward minds what is written to it."""
    return counted_alone(_view(function, tensor))


@torch.no_grad()
def _set_data(function: Any, tensor: DTensor, value: Tensor) -> None:
    """tensor.data = value: its rank's part becomes this tensor's memory."""
    local, new = held_by(tensor), part_of(value, tensor).to_local()
    if (new.dtype, new.device) != (local.dtype, local.device):
        raise ValueError(
            f".data of a parameter on ranks stays {local.dtype} on {local.device}, and this is {new.dtype} on "
            f"{new.device}: use model.to(...)"
        )
    local.data = new.clone(memory_format=torch.contiguous_format) if is_cut(tensor) else new


@torch.no_grad()
def _copy(function: Any, tensor: Any, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, DTensor):
        return function(tensor, part_of(source, tensor), *args, **kwargs)
    return function(tensor, source.full_tensor(), *args, **kwargs)


def _draw(function: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Random values like a tensor: those that the first rank draws for the whole."""
    with torch.no_grad():
        like = tensor.full_tensor() if function in BY_VALUE else _empty(tensor)
        return part_of(_shared(function(like, *args, **kwargs), tensor), tensor)


def _fill(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Random values in place: those that the first rank draws for the whole."""
    tensor, rest = (args[0], args[1:]) if args else (kwargs.pop("tensor"), ())
    if tensor.is_meta:
        return tensor
    with torch.no_grad():
        return _take(tensor, _shared(function(_empty(tensor), *rest, **kwargs), tensor))


def _into(function: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Functions that nn.init calls with out=."""
    if not isinstance(out, DTensor):
        return function(*args, out=out, **kwargs)
    return _take(out, function(*args, out=_empty(out), **kwargs))


def _empty(like: DTensor) -> Tensor:
    """Memory for the whole of a tensor on this rank."""
    return torch.empty(like.shape, dtype=like.dtype, device=held_by(like).device)


def _shared(whole: Tensor, like: DTensor) -> Tensor:
    """The first rank's values, on all ranks."""
    mesh = like.device_mesh
    for dim in range(mesh.ndim):
        dist.broadcast(whole, group=mesh.get_group(dim), group_src=0)
    return whole


def _take(tensor: DTensor, whole: Tensor) -> DTensor:
    """The tensor, with this rank's part of the whole's values."""
    held_by(tensor).copy_(part_of(whole, tensor).to_local())
    return tensor


def _unscale(function: Any, gradients: Sequence[Any], found: Tensor, scale: Tensor) -> None:
    """GradScaler's. What is infinite on one rank is so for all: DTensor asks the first gradient only."""
    function([held_by(x) if isinstance(x, DTensor) else x for x in gradients], found, scale)
    first = next(x for x in gradients if isinstance(x, DTensor))
    for dim in range(first.device_mesh.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=first.device_mesh.get_group(dim))


BY_VALUE = (torch.bernoulli, Tensor.bernoulli)  # what draws by the probabilities in a tensor
_of_values = (
    "item is_nonzero tolist numpy __float__ __int__ __bool__ __index__ __complex__ __array__ __format__".split()
)
_of_places = "data_ptr is_shared share_memory_ is_pinned".split()
_drawn = "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
_same = [Tensor.detach_, Tensor.__hash__]
_same += [Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook]
_same += [Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.dim, Tensor.numel, Tensor.element_size]
_same += [Tensor.untyped_storage, Tensor.storage, Tensor.get_device, torch.is_floating_point, torch.is_complex]
_same += [*methods_of_the_object()]
RULES: dict[Any, Callable] = {
    **dict.fromkeys(_same, _unchanged),
    **{getattr(Tensor, name): _of_whole for name in _of_values},
    **{getattr(Tensor, name): _of_memory for name in _of_places},
    **{getattr(Tensor, name): _fill for name in _drawn},
    **dict.fromkeys((nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_), _fill),  # the others call Tensor's
    Tensor.grad.__get__: _get_gradient,
    Tensor.grad.__set__: _set_gradient,
    Tensor.data.__get__: _get_data,
    Tensor.data.__set__: _set_data,
    Tensor.copy_: _copy,
    Tensor.register_hook: _register,
    **dict.fromkeys((Tensor.backward, torch.autograd.backward), _backward),
    torch.autograd.grad: _grad,
    torch.eye: _into,
    unscale: _unscale,
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like, *BY_VALUE), _draw),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack), _join),
    **{getattr(Tensor, name).__get__: _view for name in ("T", "mT", "H", "mH", "real", "imag")},
}
