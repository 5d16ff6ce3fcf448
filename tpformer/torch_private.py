"""The private names of torch that tpformer uses, each with what it is and why no public one serves.

The tests of layers, operations and kernels pass with torch 2.11 and with 2.13, so these names exist in both, where
nothing else is said. Three places keep private names beside what they serve:
distributed/symmetric.py (symmetric memory), parallel/zero.py (FSDP2) and planner/ (fake tensors, fake process groups).
tests/test_repo.py refuses private names everywhere else.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.modules import module as torch_module
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees operations below autocast

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# What torch.compile, activation checkpointing and FSDP1 put into the names of the modules that they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# The classes of torch's weight_norm: of torch.nn.utils.parametrizations, and the hook of torch.nn.utils.
WEIGHT_NORMS = ("_WeightNorm", "WeightNorm")


def plain_name(path: str) -> str:
    """The name of a module or parameter without the names of WRAPPERS."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def forward_pre_hooks(module: nn.Module) -> Mapping[int, Callable]:
    """The hooks that run before a module's forward. torch registers hooks in public, but does not list them."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> Mapping[int, Callable]:
    """The hooks that run after a module's forward."""
    return module._forward_hooks


def backward_hooks(module: nn.Module) -> Mapping[int, Callable]:
    """The hooks that run around a module's backward."""
    return {**module._backward_hooks, **module._backward_pre_hooks}


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules (torch.nn.modules.module.register_module_forward_hook, ...)."""
    return torch_module._has_any_global_hook()


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether module.compile() has replaced what a call of the module runs."""
    return module._compiled_call_impl is not None


def is_touched(module: nn.Module) -> bool:
    """Whether a call of the module runs more, or something else, than its class's forward. A forward asks it of every
    child, and each question of its own above would be a call."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or module._compiled_call_impl is not None or "forward" in module.__dict__ or torch_module._has_any_global_hook()
    )  # fmt: skip


def is_own_parameter(module: nn.Module, name: str) -> bool:
    """Whether the module holds this parameter itself; a parametrization or pruning computes it from others instead."""
    return name in module._parameters


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks run when a parameter gets its gradient. They stay with the tensor, not with its module."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# Nested containers of tensors, such as a module's arguments; torch's public module for them is newer than 2.13.
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map


def tree_map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """A tree with every leaf replaced by function(path, leaf); a path is written as ['key'][index]."""
    return _pytree.tree_map_with_path(lambda path, leaf: function(_pytree.keystr(path), leaf), tree)


def in_backward() -> bool:
    """Whether this thread is inside of a backward, as code is that a checkpoint recomputes."""
    return torch._C._current_graph_task_id() != -1


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """The (pack, unpack) hooks to which autograd hands what it saves, as in a region of torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def any_autocast() -> bool:
    """Whether autocast is on for some device. Every forward asks, and asking for one device takes ten times as long."""
    return torch._C._is_any_autocast_enabled()


def compiler_is_imported() -> bool:
    """Whether somebody has imported the compiler; where nobody has, nothing is being compiled."""
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules  # all of which it would trace


UNTRANSFORMED = (
    "torch.func's grad, vmap and jvp, and forward-mode AD do not enter {name}: take gradients by backward() or "
    "torch.autograd.grad, or put modules or functions of torch.nn in its place"
)


class Function(torch.autograd.Function):
    """torch.autograd.Function, for what the compiler does not trace: apply() takes 3.5 us of host time, not 6.7.

    torch's binds defaults and looks at each argument for a tensor that a finished torch.func transform left behind; a
    Function without setup_context has no defaults, and operations take such a tensor as they take others. Within a
    transform apply() raises RuntimeError, which says what to do; torch's names a method that the Function lacks.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._applied = super(torch.autograd.Function, cls).apply

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """What torch.autograd.Function.apply gives for these arguments. Errors: RuntimeError within a transform."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(UNTRANSFORMED.format(name=cls.__module__))
        return cls._applied(*args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """RuntimeError: forward-mode AD found a tangent among the arguments."""
        raise RuntimeError(UNTRANSFORMED.format(name=type(ctx)._forward_cls.__module__))


def in_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp), forward-mode AD or a tracer runs this code.

    The public questions take ten times as long, and forward-mode AD has none.
    """
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    return transforms or torch._C._is_tracing() or forward_ad._current_level >= 0


def refuse_replicas(model: nn.Module, refusal: str) -> None:
    """Let DistributedDataParallel raise ValueError for a model: it asks a model for the names that it should ignore."""
    model._ddp_params_and_buffers_to_ignore = Refusal(refusal)


class Refusal:
    """A list that nobody can read."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(self.words)


def stops_recomputation(error: BaseException) -> bool:
    """Whether an exception only ends the second run of torch.utils.checkpoint, which has all that it wants."""
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, _StopRecomputationError)


def leave_uncompiled(function: Callable, why: str) -> None:
    """Keep torch.compile out of a function, as torch.compiler.disable does, but without importing the compiler."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why  # type: ignore[attr-defined]


def leave_frame_uncompiled(function: Callable) -> None:
    """Keep the compiler, which has been imported, from compiling a function's own frame where it is not inlined."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set a process group's timeout. init_device_mesh makes groups with torch's defaults, 10 to 30 minutes."""
    _set_pg_timeout(timeout, group)


def view_of(mesh: DeviceMesh, axes: tuple[str, ...], sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The ranks of several axes of a mesh, in order, laid out on axes of other sizes and names. Collective.

    FSDP2 takes such a mesh beside tensor-parallel DTensors only if both come from one mesh. names: new ones.
    """
    return mesh[axes]._flatten("_".join(axes))._unflatten(0, sizes, names)


def forget_meshes() -> None:
    """Empty DTensor's caches: call it when the process group has been destroyed and another one follows.

    They are kept by mesh. A mesh of the next process group can be equal to an earlier one. DTensor would then find the
    earlier one's layouts, and use process groups that no longer exist. The caches also keep those groups from being
    freed, and gloo polls for each with three threads.
    """
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # torch 2.13
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # torch 2.13
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def own_part(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part of a tensor with these placements. DTensor computes it, but none is made."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # torch computes this with tensors, which have no values if the default device is meta
        return compute_local_shape_and_global_offset(shape, mesh, placements)


def own_slices(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[slice, ...]:
    """The slices of the whole tensor that are this rank's part, by these placements."""
    sizes, offset = own_part(shape, mesh, placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))


def foreach_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Sequence[Tensor]:
    """The norm of each tensor, in float32 or wider, by one launch a dtype on a GPU. torch's clip_grad_norm_ uses it."""
    places: dict[torch.dtype, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.dtype].append(place)
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    for dtype, own in places.items():
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([tensors[place] for place in own], norm_type, dtype=wide)
        for place, norm in zip(own, found, strict=True):
            norms[place] = norm
    return norms


def foreach_copy_(into: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy each tensor into its place, rounded to its dtype, in one launch on a GPU."""
    torch._foreach_copy_(into, tensors)


def foreach_multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place, by one launch a dtype on a GPU. A 0-dim factor stays on its device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for dtype, own in by_dtype.items():
        # of the tensors' dtype, torch multiplies all of them in one launch
        same = factor.to(dtype) if isinstance(factor, Tensor) and dtype.itemsize >= 4 else factor
        torch._foreach_mul_(own, same)


# Within, functions of torch take tensors of any class as they are, so that a class can call what it has overridden.
without_torch_function = torch._C.DisableTorchFunctionSubclass
with_torch_function = torch._C._EnableTorchFunction  # in what is called within the one above


def methods_of_the_object() -> Iterator[Any]:
    """Tensor's methods that torch asks for what a tensor is, such as is_contiguous() and its private _is_view()."""
    for name, method in vars(torch._C.TensorBase).items():
        if name.startswith("is_") or name[0] == "_" != name[1]:
            yield method


def held_by(tensor: DTensor) -> Tensor:
    """The very tensor that a DTensor holds. to_local() makes another object of the same memory for a parameter."""
    return tensor._local_tensor


def counted_alone(tensor: DTensor) -> DTensor:
    """The tensor, whose local one has the memory that it had, and a count of its own of what is written to it."""
    tensor._local_tensor = tensor._local_tensor.data
    return tensor


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp (batch, heads, queries)) of (batch, heads, tokens, head_dim) on a CPU. The public function
    gives no log-sum-exp. is_causal: query i sees the keys up to i; mask: what is added to scores, of q's dtype."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)


def flash_on_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of flash_on_cpu, whose result and log-sum-exp may be those over further keys, too."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    most: int,
    most_keys: int,
    window: int | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp (heads, tokens)) of (tokens, heads, head_dim) on CUDA: sequences between boundaries, whose
    last query is beside the last key. window: how many keys a query sees back from the one beside it, that one
    included; it sees all that come after it unless is_causal. torch.nn.attention.varlen has it with aux_request, but
    its backward takes no other log-sum-exp."""
    forward, lengths = torch.ops.aten._flash_attention_forward, (queries, keys, most, most_keys)
    return forward(q, k, v, *lengths, 0.0, is_causal, return_debug_mask=False, **_window_sizes(window, is_causal))[:2]


def flash_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    most: int,
    most_keys: int,
    window: int | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of flash_varlen."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of no dropout
    backward, lengths = torch.ops.aten._flash_attention_backward, (queries, keys, most, most_keys)
    return backward(dout, q, k, v, out, lse, *lengths, 0.0, is_causal, *state, **_window_sizes(window, is_causal))


def _window_sizes(window: int | None, is_causal: bool) -> dict[str, int]:
    """What flash attention takes for a window: how many keys before and after a query's own, -1 for all."""
    left = -1 if window is None else window - 1
    right = 0 if window is not None and is_causal else -1
    return {"window_size_left": left, "window_size_right": right}


unscale = torch._amp_foreach_non_finite_check_and_unscale_  # what GradScaler does to gradients


def laid_out_as(local: Tensor, like: DTensor, partial: bool = False) -> DTensor:
    """A DTensor with this local part, and all else as another one has it. from_local takes six times as long.

    partial: each rank's part is a partial sum over the mesh.
    """
    spec = like._spec
    if partial:
        from torch.distributed.tensor import Partial

        spec = type(spec)(spec.mesh, (Partial(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return type(like)(local, spec, requires_grad=False)


def allow_foreach(kind: type[Tensor]) -> None:
    """Let optimizers and clipping take tensors of this class to multi-tensor operations, as they do with DTensors."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in known:
            known.append(kind)


def allow_anomaly_mode() -> None:
    """Let detect_anomaly look for NaN in gradients that are DTensors: it asks them by an operation without a name."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.aten._is_any_true.default)(lambda x: [([Replicate()], [Replicate()])])


def is_fake(x: Tensor) -> bool:
    """Whether x is a FakeTensor, which has no values."""
    return type(x).__name__ == "FakeTensor"


def version_of(x: Tensor) -> int:
    """How many times autograd has seen x's memory written to; a view has its base's number."""
    return x._version


def base_of(x: Tensor) -> Tensor:
    """The tensor of which x is a view, or x. FSDP2 hands a module views of what it was called with."""
    return x if x._base is None else x._base


def is_view(x: Tensor) -> bool:
    """Whether autograd takes x for a view of another tensor, and so refuses to detach it in place."""
    return x._is_view()
