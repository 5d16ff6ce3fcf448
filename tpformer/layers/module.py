"""The base of every layer: parameters that are DTensors on the tp axis, and initial values that no layout changes.

Without a mesh parameters are plain tensors, and DTensor is not imported: a plain layer is then ready a second sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer.distributed.dtensor import check_own_part, is_dtensor, let_data_be_set
from tpformer.kernels.philox.reference import philox_key, random_normal
from tpformer.torch_private import is_own_parameter, own_part, own_slices, refuse_replicas

from .local_part import LocalPart
from .optimizers import watch_optimizers
from .tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution, drawn by global element index.

    Rows from `valid_rows` on, and row `zero_row`, are zero.
    """

    std: float
    valid_rows: int | None = None
    zero_row: int | None = None


@dataclass(frozen=True)
class Constant:
    """An initial value that all elements have."""

    value: float


Initializer = Normal | Constant


EXCHANGING = (
    "DistributedDataParallel would take the experts of one rank for those of all: lay the model out by FSDP2's "
    "fully_shard, or name the experts' parameters in _set_params_and_buffers_to_ignore_for_model(model, names) of "
    "DistributedDataParallel, and divide their gradients by its ranks, whose mean it takes of all others"
)


class ParallelModule(nn.Module):
    """A module that lies on tensor-parallel ranks. tp: a TensorParallel, or only its 1-D mesh, or None for one rank."""

    makes_whole_gradients = False  # whether a backward itself sums gradients of which each rank has a part
    exchanges = False  # whether it lies on the ranks of a TensorParallel that exchange tokens

    def __init__(self, tp: TensorParallel | DeviceMesh | None, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.tp = TensorParallel.of(tp, sequence_parallel=sequence_parallel)
        # cached now, because a compiler cannot enter cached_property's lock
        _ = self.tp.sharded, self.tp.group, self.tp.shares_tokens
        self.initial: dict[str, Initializer] = {}
        self.placements: dict[str, Any] = {}  # each parameter's placement on the tp axis
        self.shares_gather: tuple[str, ...] = ()  # names of its column-parallel layers that one gather serves

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._check_ranks(name, value)
        super().__setattr__(name, value)

    def _check_ranks(self, name: str, child: nn.Module) -> None:
        """ValueError for a child, or a layer within it, that lies on ranks in another way than this module.

        It would take sequence shards for all rows, or some features for all of them. A layer within the child may be on
        one rank.
        """
        for part in child.modules():
            if not isinstance(part, ParallelModule):
                continue
            if part.exchanges:
                refuse_replicas(self, EXCHANGING)
            own, theirs = self.tp.of_experts if part.exchanges else self.tp, part.tp
            if theirs is own or (part is not child and theirs.size == 1):
                continue
            if not own.agrees_with(theirs):
                raise ValueError(
                    f"{name}: a {type(part).__name__} on {theirs} cannot be part of a {type(self).__name__} on {own}: "
                    f"build it with the same tp"
                )

    def add_parameter(
        self, name: str, shape: tuple[int, ...], initial: Initializer, *, shard: int | None, device=None, dtype=None
    ) -> None:
        """Register a parameter of this global shape, sharded on dim `shard` over the tp axis (None: replicated)."""
        self.initial[name] = initial
        if self.tp.mesh is None:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            return
        from torch.distributed.tensor import DTensor, Replicate, Shard

        watch_optimizers()
        let_data_be_set().add(self.tp.mesh)
        if shard is not None and shape[shard] <= (self.tp.size - 1) * -(-shape[shard] // self.tp.size):
            raise ValueError(
                f"{name} has {shape[shard]} rows on its sharded dim, too few for {self.tp.size} tensor-parallel ranks: "
                f"at least one would hold none; lower tensor_parallel"
            )
        placement = self.placements[name] = Replicate() if shard is None else Shard(shard)
        local_shape, _ = own_part(shape, self.tp.mesh, [placement])
        local = torch.empty(local_shape, device=self.device_for(device), dtype=dtype)
        strides = torch.empty(shape, device="meta").stride()
        value = DTensor.from_local(
            local, self.tp.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides
        )
        self.register_parameter(name, nn.Parameter(value))

    def device_for(self, device: torch.device | str | None) -> torch.device | str:
        """The device of parameters: `device`, else torch's default if one is set, else the mesh's kind of device."""
        default = torch.get_default_device()
        if device is not None or self.tp.mesh is None or default.type != "cpu":
            return default if device is None else device
        return self.tp.mesh.device_type

    def local(self, name: str, partial: bool = False) -> Tensor | None:
        """This rank's part of a parameter. partial: each rank's gradient will be a partial sum over the tp axis.

        If the parameter is computed from others (parametrizations, pruning), it is computed now.
        Errors: ValueError on several ranks if it is a plain tensor.
        """
        computed = name not in (own := self._parameters)
        parameter = getattr(self, name) if computed else own[name]
        if parameter is None or self.tp.mesh is None:
            return parameter
        if not is_dtensor(parameter):
            if self.tp.size == 1:
                return parameter
            raise ValueError(  # nobody knows whether it is whole, or whether its gradient is a partial sum
                f"{name} is a plain tensor {tuple(parameter.shape)}, or one inside of torch.func, on {self.tp.size} "
                f"tensor-parallel ranks: give it as distribute_tensor(whole, tp.mesh, [{self.placements[name]!r}])"
            )
        if computed:  # DTensor may have laid the result out in another way
            parameter = parameter.redistribute(placements=[self.placements[name]])
        if torch.compiler.is_compiling():  # which knows to_local
            from torch.distributed.tensor import Partial

            return parameter.to_local(grad_placements=[Partial()] if partial else None)
        return LocalPart.apply(parameter, partial, name != "bias")

    @torch.no_grad()
    def accumulate(self, name: str, gradient: Tensor, rows: slice | None = None) -> None:
        """Add a gradient of `local(name)` to the parameter's .grad, as autograd would.

        rows: the gradient is of these rows only, and a partial sum over the tp axis.
        Errors: RuntimeError if the parameter is not laid out as it was in the forward.
        """
        parameter = self._parameters[name]
        assert parameter is not None
        sharded = is_dtensor(parameter)
        held = parameter.to_local() if sharded else parameter
        shape = held.shape
        if rows is not None:
            gradient, part = gradient.new_zeros(shape), gradient
            gradient[rows] = part
        if gradient.shape != shape or gradient.dtype != held.dtype:
            raise RuntimeError(
                f"{name} is {tuple(shape)} {held.dtype} on this rank, its gradient {tuple(gradient.shape)} "
                f"{gradient.dtype}: keep parameters unsharded from the backward until the weight gradients have run"
            )
        if not sharded:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            return
        from torch.distributed.tensor import Partial

        places = tuple(parameter.placements) if rows is None else (Partial(),)
        if parameter.grad is not None and parameter.grad.placements == places:
            parameter.grad.to_local().add_(gradient)
            return
        laid_out = _laid_out(gradient, parameter, places)
        # a gradient of other placements has been summed over the ranks
        parameter.grad = laid_out if parameter.grad is None else parameter.grad.add_(laid_out)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as nn.Module does, but cut a whole tensor to this rank's shard. No communication.

        Errors: ValueError for a shard that another rank has saved.
        """
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if value is not None:
                check_own_part(prefix + name, value)
            if not is_dtensor(parameter) or not isinstance(value, Tensor) or is_dtensor(value):
                continue
            if value.shape != parameter.shape:
                continue  # torch tells which do not fit
            if parameter.device_mesh != self.tp.mesh:
                raise RuntimeError(
                    f"{prefix}{name} is laid out by FSDP2, too, and the state_dict has it whole: load it with "
                    f"torch.distributed.checkpoint.state_dict.set_model_state_dict and "
                    f"StateDictOptions(full_state_dict=True)"
                )
            held = value.detach()[own_slices(parameter.shape, parameter.device_mesh, parameter.placements)]
            # A copy. With assign=True it becomes the parameter, and a view would keep the whole tensor alive.
            state_dict[prefix + name] = _laid_out(held.clone(), parameter, parameter.placements)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Do what nn.Module does. Errors: ValueError for a module that another rank has saved."""
        super().__setstate__(state)
        for name, parameter in self._parameters.items():
            check_own_part(f"{name} of {type(self).__name__}", parameter)

    def share_memory(self) -> Self:
        """Do what nn.Module does. Errors: ValueError on ranks, as torch would crash."""
        if any(is_dtensor(parameter) for parameter in self.parameters()):
            raise ValueError("parameters that lie on ranks cannot be moved to shared memory: share plain copies")
        return super().share_memory()

    def filled_from(self, plain: nn.Module) -> Self:
        """This layer, built on meta, with copies of a plain module's parameters, and with its mode."""
        own = dict(plain.named_parameters(recurse=False))
        copies = {name: p.detach() if self.tp.mesh else p.detach().clone() for name, p in own.items()}  # shards are cut
        self.load_state_dict(copies, assign=True)
        for name, parameter in own.items():
            self.get_parameter(name).requires_grad_(parameter.requires_grad)
        return self.train(plain.training)

    def reset_buffers(self) -> None:
        """Set buffers to their initial values, which no layout changes. Most layers have none."""

    def reset_parameters(self) -> None:
        """Set fresh random values. tp rank 0 draws their seed from torch's generator, so that all layouts agree.

        Communicates: one broadcast of 8 bytes over the tp axis.
        """
        if any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            return
        seed = torch.randint(2**62, (), device="cpu")
        if self.tp.group is not None:
            seed = seed.to(self.tp.mesh.device_type)  # type: ignore[union-attr]
            dist.broadcast(seed, dist.get_global_rank(self.tp.group, 0), group=self.tp.group)
        init_weights(self, int(seed))


def check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """TypeError unless a module computes what modules of this kind do, from parameters of its own."""
    changed = type(module).forward is not kind.forward or "forward" in module.__dict__
    if not isinstance(module, kind) or changed or not is_own_parameter(module, "weight"):
        raise TypeError(
            f"a {type(module).__name__} does not compute what nn.{kind.__name__} does, or computes its weight: give an "
            f"unchanged nn.{kind.__name__}"
        )


def _laid_out(local: Tensor, like: Tensor, placements: Sequence) -> Tensor:
    """A DTensor with this local part, and the shape and mesh of another one."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill the parameters of every layer from (seed, parameter name, global element index), equal in every layout.

    Each rank computes only its shard. Parameters of modules that are not this library's are left alone.
    """
    for path, module in model.named_modules():
        if isinstance(module, ParallelModule):
            module.reset_buffers()
            for name, initial in module.initial.items():
                parameter = getattr(module, name) if is_own_parameter(module, name) else None
                if parameter is not None:
                    _fill(parameter, initial, philox_key(seed, f"{path}.{name}" if path else name))


def _fill(parameter: Tensor, initial: Initializer, key: int, chunk: int = 2**22) -> None:
    local, offset = parameter, (0,) * parameter.ndim
    if is_dtensor(parameter):
        local = parameter.to_local()
        _, offset = own_part(parameter.shape, parameter.device_mesh, parameter.placements)
    if isinstance(initial, Constant):
        local.fill_(initial.value)
        return
    if local.ndim > 2:  # a stack of matrices, each filled as rows of the matrix that they make up together
        rows_of_one = parameter.shape[1]
        for index, matrix in enumerate(local.unbind()):
            first = (offset[0] + index) * rows_of_one + offset[1]
            _fill_rows(matrix, initial, key, (first, *offset[2:]), parameter.shape[2], chunk)
        return
    _fill_rows(local, initial, key, offset, parameter.shape[1], chunk)


def _fill_rows(local: Tensor, initial: Normal, key: int, offset: Sequence[int], columns: int, chunk: int) -> None:
    """Fill a block of a matrix with so many columns; offset: the block's first row and column."""
    rows, width = local.shape
    bounds = [*range(0, rows, max(1, chunk // width)), rows]
    for first, last in pairwise(bounds):
        row = torch.arange(offset[0] + first, offset[0] + last, device=local.device)
        values = random_normal(key, row * columns + offset[1], width) * initial.std
        if initial.valid_rows is not None:
            values[row >= initial.valid_rows] = 0
        if initial.zero_row is not None:
            values[row == initial.zero_row] = 0
        local[first:last] = values.to(local.dtype)
