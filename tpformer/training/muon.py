"""Muon for the matrices of the layers, beside AdamW for all other parameters, in any layout.

Belongs here: which matrices, the update, and what is refused. Who computes with which matrix and how its parts travel
is in tpformer.parallel, the orthogonalisation in kernels/newton_schulz.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection, check_choice
from tpformer.distributed import all_reduce, indexed
from tpformer.distributed.groups import host_group
from tpformer.distributed.mesh import DEFAULT_TIMEOUT
from tpformer.distributed.shared_memory import torch_backend
from tpformer.kernels.newton_schulz.reference import (
    COEFFICIENTS,
    SCALES,
    muon_scale,
    newton_schulz,
    newton_schulz_cost,
)
from tpformer.parallel import WholeMatrices, local_part
from tpformer.parallel.owners import Laid, Matrix
from tpformer.parallel.whole_matrices import Groups
from tpformer.words import listed

from .updates import LocalAdamW

ROUTER = "mlp.gate.weight"  # a classifier of tokens, whose rows are experts


def hidden_matrices(part: nn.Module) -> dict[str, int]:
    """The parameters of a GPT, or of a part of one, that Muon takes: {name: matrices that stand in its rows}.

    Those of the layers with two dims or more, but for routers. Tables, positions, head, norms and biases are AdamW's.
    Experts have gate and up in one tensor, which are two linears.
    """
    return {
        name: 2 if name.endswith("gate_up_proj") else 1
        for name, parameter in part.named_parameters()
        if name.startswith("layers.") and parameter.ndim >= 2 and not name.endswith(ROUTER)
    }


class Muon(LocalAdamW):
    """Muon on named matrices and AdamW on all other parameters of a module, with one learning rate.

    A momentum b of each matrix, b = momentum b + gradient, is a DTensor laid out as the parameter. The step of a matrix
    is W -= lr (weight_decay W + scale NS(gradient + momentum b)), where NS orthogonalises the whole matrix once, on the
    rank that owns it, in `dtype`; the shape of the whole decides the scale. It works on parameters that tensor
    parallelism, FSDP2 or both have cut: those of a GPT, of drop-in layers, and of a model that tpformer.parallelize has
    cut.

        model = tpformer.parallelize(model, mesh, ...)
        matrices = [name for name, p in model.named_parameters() if "blocks." in name and p.ndim == 2]
        optimizer = tpformer.Muon(model, matrices, lr=1e-3)

    matrices: their names; or {name: how many linears stand one below the other in its rows}, such as 3 for a fused
    query, key and value: each is orthogonalised by itself. A parameter of 3 dims is that many matrices. lr,
    weight_decay, betas, eps: of both; vectors do not decay. newton_schulz: "quintic" or "polar_express". scale: "rms"
    or "spectral" (kernels/newton_schulz). dtype: unset, bfloat16 on CUDA, else the parameter's, or float32 for float16.
    groups, timeout: as of WholeMatrices; parts of a model share the first.
    Communicates: constructing it makes a process group of the ranks of each mesh with several axes, and on GPUs one of
    their hosts, so all ranks of it do that in the same order. A step: as WholeMatrices, in dtype; and before, between
    hosts, an all-reduce of a byte a matrix, beside what devices have still to do.
    Errors: ValueError for names that are no matrices of the module. RuntimeError on all ranks for a matrix that lacks
    its gradient on any, before anything else is sent.
    Source: Jordan et al. 2024; Liu et al., arXiv:2502.16982 (scale, and AdamW beside it with one rate).
    """

    def __init__(
        self,
        model: nn.Module,
        matrices: Iterable[str] | Mapping[str, int],
        *,
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        newton_schulz: str = "quintic",
        scale: str = "rms",
        dtype: torch.dtype | None = None,
        groups: Groups | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        matrices = [matrices] if isinstance(matrices, str) else matrices
        stacked = _checked(model, dict(matrices) if isinstance(matrices, Mapping) else dict.fromkeys(matrices, 1))
        check_choice("newton_schulz", newton_schulz, COEFFICIENTS)
        check_choice("scale", scale, SCALES)
        _check_numbers(momentum, weight_decay, dtype)
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        others = [each for name, each in named.items() if name not in stacked]
        # torch wants no group of plain parameters and DTensors
        kinds = [[each for each in others if isinstance(each, DTensor) is cut] for cut in (False, True)]
        self._names = [name for name in named if name in stacked]
        taken = [named[name] for name in self._names]
        made = [
            {"params": taken, "weight_decay": weight_decay, "muon": True},
            *({"params": [p for p in kind if p.ndim > 1], "weight_decay": weight_decay} for kind in kinds),
            *({"params": [p for p in kind if p.ndim <= 1], "weight_decay": 0.0} for kind in kinds),
        ]
        made = [group for group in made if group["params"]]
        super().__init__(made, lr=lr, betas=betas, eps=eps, fused=True)
        self.momentum, self.scale, self.dtype = momentum, scale, dtype
        self.coefficients, self._stacked = COEFFICIENTS[newton_schulz], [stacked[name] for name in self._names]
        groups = {} if groups is None else groups
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for index, parameter in enumerate(taken):
            by_ranks.setdefault(tuple(sorted(Laid.of(parameter).ranks)), []).append(index)
        self.sets = [(own, self._whole(own, taken, groups, timeout)) for own in by_ranks.values()]
        self._hosts = _hosts([whole for _, whole in self.sets])

    def _whole(self, own: list[int], taken: list[nn.Parameter], groups: Groups, timeout: timedelta) -> WholeMatrices:
        stacked = [self._stacked[index] for index in own]
        return WholeMatrices([taken[index] for index in own], stacked, cost, groups, timeout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = [[bool(group.get("muon")) for group in groups] for groups in (self._own(), state["param_groups"])]
        if marks[0] and marks[0] != marks[1]:
            raise ValueError(
                "this state is of an optimizer with other groups, so matrices would be AdamW's: load that of a "
                "tpformer.Muon with the same matrices"
            )
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's asks the state of every parameter for its "step"

    def _own(self) -> list[dict[str, Any]]:
        return getattr(self, "param_groups", [])  # a copy has none yet

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that AdamW trains, as torch's optimizers do. ValueError for matrices of Muon."""
        if param_group.get("muon") and self._own() and "muon" in self._own()[0]:
            raise ValueError("a group of matrices cannot be added to a Muon: give all their names when it is made")
        super().add_param_group(param_group)

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """The keys of the state that it may keep for a parameter."""
        taken = any(parameter is each for group in self.param_groups if group.get("muon") for each in group["params"])
        return ("momentum_buffer",) if taken else LocalAdamW.STATE_NAMES

    def _groups(self) -> Iterator[tuple]:
        self._check_gradients()
        yield from super()._groups()

    def _check_gradients(self) -> None:
        """RuntimeError on all ranks for a matrix that has no gradient on one. Others would wait for its parts."""
        taken = [group["params"] for group in self.param_groups if group.get("muon")]
        if list(map(len, taken)) != [len(self._names)] * bool(self._names):
            raise RuntimeError(
                f"the matrices of this Muon are in groups of {list(map(len, taken))}, and it was made with one of "
                f"{len(self._names)}: leave them there, where one learning rate serves all"
            )
        missing = [int(each.grad is None) for group in taken for each in group]
        for group in self._hosts:
            missing = all_reduce(torch.tensor(missing, dtype=torch.uint8), group, "max").tolist()
        if any(missing):
            names = [name for name, lacks in zip(self._names, missing, strict=True) if lacks]
            raise RuntimeError(
                f"{listed(names)} has no gradient, and Muon needs those of all its matrices on all ranks: freeze it "
                f"before the optimizer is made, or leave it out of the matrices"
            )

    def _step_group(self, kernels, group, parameters, options) -> None:
        if not group.get("muon"):
            super()._step_group(kernels, group, parameters, options)
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        copies = options.pop("copies")
        for own, whole in self.sets:
            rounded = None if copies is None else [copies[index] for index in own]
            update = _Update(self, whole, kernels, [parameters[index] for index in own], rounded, options)
            whole.run(update.prepare, update.compute, update.finish, update.like)


class _Update:
    """One step of the matrices that lie on the same ranks: what is done with them before, between and after."""

    def __init__(self, muon: Muon, whole: WholeMatrices, kernels: Any, parameters: list, copies: Any, options: dict):
        self.whole, self.kernels, self.copies, self.options = whole, kernels, copies, dict(options)
        self.lr, self.decay = self.options.pop("lr"), self.options.pop("weight_decay")
        self.momentum, self.scale, self.coefficients = muon.momentum, muon.scale, muon.coefficients
        self.held = [local_part(each.detach()) for each in parameters]
        self.gradients = [local_part(each.grad) for each in parameters]
        self.buffers = [local_part(muon.state[each]["momentum_buffer"]) for each in parameters]
        first, device = parameters[0], self.held[0].device
        if isinstance(first, DTensor) and first.device_mesh.device_type != device.type:
            device = indexed(torch.device(first.device_mesh.device_type))  # of offloaded shards
        dtype = muon.dtype or (torch.bfloat16 if device.type == "cuda" else _wide(self.held[0].dtype))
        self.like = torch.empty(0, dtype=dtype, device=device)

    def prepare(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Add this rank's parts of gradients to their momenta. What is to be orthogonalised, in the dtype of that."""
        gradients, buffers = (
            [self.whole.local(each, tensors[each.parameter]) for each in matrices]
            for tensors in (self.gradients, self.buffers)
        )
        found = [torch.zeros_like(each) for each in buffers]  # a step of SGD from here, with the rate -1
        kept, momentum = buffers if self.momentum else [], self.momentum
        self.kernels.sgd_(
            found, gradients, kept, None, lr=-1.0, weight_decay=0.0, momentum=momentum, nesterov=momentum > 0,
            **self.options,
        )  # fmt: skip
        return [each.to(self.like.dtype).to(self.like.device, non_blocking=True) for each in found]

    def compute(self, matrix: Matrix, whole: Tensor) -> Tensor:
        """Orthogonalise a whole matrix."""
        return newton_schulz(whole, self.coefficients)

    def finish(self, matrix: Matrix, part: Tensor) -> None:
        """Take the step of this rank's part, unless it is skipped."""
        held = self.whole.local(matrix, self.held[matrix.parameter])
        counts = 1 - self.options["skipped"].to(torch.float64)
        rate = counts * self.lr * muon_scale(matrix.rows, matrix.columns, self.scale)
        held.mul_(1 - counts * self.lr * self.decay)
        # a step that is skipped has zeros here: what was orthogonalised are zeros, too
        held.addcmul_(part.to(held.device, held.dtype), rate.to(held.dtype), value=-1)
        if self.copies is not None:
            self.whole.local(matrix, self.copies[matrix.parameter]).copy_(held)


def _hosts(sets: Sequence[WholeMatrices]) -> list[dist.ProcessGroup]:
    """Groups of hosts in which all ranks learn what any rank of a set knows: of the sets whose ranks are in no other's.
    Collective over the ranks of each."""
    several = [(set(whole.ranks), whole.group) for whole in sets if whole.group is not None]
    outermost = [group for ranks, group in several if not any(ranks < others for others, _ in several)]
    hosts = [group if torch_backend(group, "cpu") == "gloo" else host_group(group) for group in outermost]
    return [group for group in hosts if group is not None]  # a dry run has none


def cost(rows: int, columns: int) -> float:
    """FLOPs of a matrix's orthogonalisation, by which owners are chosen."""
    return float(newton_schulz_cost(rows, columns, 2).flops)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype  # in which small momenta are 0


def _check_numbers(momentum: float, weight_decay: float, dtype: torch.dtype | None) -> None:
    """ValueError for what no step can be taken with."""
    if not (0 <= momentum < 1 and weight_decay >= 0):
        raise ValueError(
            f"momentum={momentum}, weight_decay={weight_decay}: give a momentum from 0 to below 1 and a decay of at "
            f"least 0"
        )
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2 or _wide(dtype) != dtype):
        raise ValueError(f"dtype={dtype}: small momenta are 0 in it, so take torch.bfloat16, float32 or float64")


def _checked(model: nn.Module, stacked: dict[str, int]) -> dict[str, int]:
    """The matrices by the names that named_parameters gives. ValueError for what is none, or not as many as said."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Muon got a {type(model).__name__} where the model belongs: give Muon(model, names of its matrices), by "
            f"which it finds all parameters"
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    if not stacked:
        raise ValueError("Muon got no matrices: name some, or take AdamW")
    if unknown := sorted(stacked.keys() - named.keys()):
        raise ValueError(f"{listed(unknown)} is no parameter of the {type(model).__name__}: give names of its matrices")
    firsts = {parameter: name for name, parameter in model.named_parameters()}  # of one with several names
    stacked = {firsts[named[name]]: number for name, number in stacked.items()}
    for name, number in stacked.items():
        shape = tuple(named[name].shape)
        if len(shape) not in (2, 3) or number < 1 or shape[-2] % number:
            raise ValueError(f"{name} is {shape}, which is no {number} matrices of equal rows: leave it to AdamW")
    return stacked


def build_muon(part: nn.Module, config: OptimizerSection, groups: Groups | None, timeout: timedelta) -> Muon:
    """The optimizer of a part of a run's model. Collective over the ranks of its pipeline stage."""
    dtype = None if config.muon_dtype is None else getattr(torch, config.muon_dtype)
    return Muon(
        part,
        hidden_matrices(part),
        lr=config.lr,
        momentum=config.kept_momentum,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        newton_schulz=config.newton_schulz,
        scale=config.muon_scale,
        dtype=dtype,
        groups=groups,
        timeout=timeout,
    )
