"""verify: compare anyone's parallel model with the same model in one process, tensor by tensor.

Belongs here: which tensors are compared, how closely, and the report. `tpformer verify` does the like for the layout of
a run's configuration, and compares steps of training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpformer.distributed.dtensor import full_tensor, is_dtensor
from tpformer.layers import ColumnParallelLinear, ParallelModule, RowParallelLinear, TensorParallel
from tpformer.parallel.judge import (
    Arguments,
    OneProcess,
    allowed,
    forward,
    from_ranks,
    is_floating,
    largest,
    largest_difference,
    leaves,
    modules_of,
    parameters_of,
    varied,
)

LOOSE = 0.25  # a tensor that may differ by this part of its largest value cannot be judged


class Compared(NamedTuple):
    """One tensor in both runs.

    error: the largest |difference|, on the rank where it is worst; allowed: how large it may be.
    size: the largest |value| in one process. note: what is wrong where there is no difference to measure, else "".
    """

    what: str
    error: float
    allowed: float
    size: float
    rank: int
    note: str = ""

    @property
    def departs(self) -> bool:
        """Whether it differs by more than rounding explains."""
        return not self.error <= self.allowed

    @property
    def loose(self) -> bool:
        """Whether rounding alone may change a large part of it, so that it says little."""
        return self.allowed > LOOSE * self.size

    @property
    def finding(self) -> str:
        """What was found, as the rest of a sentence about it."""
        measured = f"differs by {self.error:.2g}, where {self.allowed:.2g} is allowed and its largest value is"
        return self.note or f"{measured} {self.size:.2g}"


@dataclass(frozen=True)
class Report:
    """What verify found, equal on all ranks. str() is the sentence and a table of the tensors.

    tensors: what was compared, in the order of execution.
    skipped: outputs of modules that hold no contiguous part of one process's, so that only what follows is compared.
    ranks: how many took part.
    """

    tensors: list[Compared]
    skipped: list[str]
    ranks: int

    @property
    def ok(self) -> bool:
        """Whether every tensor is that of one process."""
        return not any(tensor.departs for tensor in self.tensors)

    @property
    def sentence(self) -> str:
        """The outcome, with the first tensor that departs from one process."""
        departing = [tensor for tensor in self.tensors if tensor.departs]
        if departing:
            first = departing[0]
            return (
                f"{first.what} is the first tensor that departs from one process: on rank {first.rank} it "
                f"{first.finding}; {len(departing)} of {len(self.tensors)} tensors depart"
            )
        loose = [tensor.what for tensor in self.tensors if tensor.loose]
        remark = (
            f", but {len(loose)} of them say little, because rounding may change them by more than {LOOSE:.0%}: "
            f"{', '.join(loose[:3])}{', ...' * (len(loose) > 3)}"
        )
        return f"all {len(self.tensors)} tensors on {self.ranks} ranks are those of one process{remark * bool(loose)}"

    def check(self) -> None:
        """RuntimeError with the sentence if a tensor departs from one process."""
        if not self.ok:
            raise RuntimeError(self.sentence)

    def __str__(self) -> str:
        width = max((len(tensor.what) for tensor in self.tensors), default=0)
        lines = [self.sentence, f"{'':{width}}  difference    allowed    largest"]
        for tensor in self.tensors:
            numbers = f"{tensor.error:10.1e} {tensor.allowed:10.1e} {tensor.size:10.1e}"
            lines.append(f"{tensor.what:{width}}  {numbers}{'  departs' * tensor.departs}")
        lines += [f"not compared, because it is no contiguous part of one process's: {what}" for what in self.skipped]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    parallel: Callable[[nn.Module], nn.Module],
    example: Any,
    *,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> Report:
    """Run a model in one process and in parallel, and compare outputs and gradients of all its parts. Collective.

        verify(model, lambda whole: parallelize(whole, tp), example).check()

    model:    whole, with values, equal on all ranks, and in eval() if it draws random numbers. It is left as it is.
    parallel: gets a copy of the model, and returns the parallel one with the copy's values under the same names: the
              copy itself, made parallel in place, or a model of its own that has loaded the copy's state_dict.
    example:  arguments of the forward, equal on all ranks: a tensor, a tuple, or a mapping for arguments by name. If
              some of its tensors require a gradient, theirs are compared, else those of all its floating tensors.
    after_backward: what the training loop calls on the parallel model after the backward to complete gradients of
              modules that this library does not know (parallel.reduce_partial_gradients with names).
    Compared are each parameter, exactly; the output of every module, or this rank's part of it; the inputs of
    row-parallel linears; the model's outputs; and, after a backward from random gradients of all outputs, the gradients
    of inputs and parameters. Parameters whose elements are all equal get other values first, in both models.
    Tolerance: the model runs in one process five times more, with relative noise on inputs, parameters and the outputs'
              gradients, of up to one eps of the coarsest dtype in which it computes anything. A tensor may be 6 times
              as far from one process as that moved it, plus 6 roundings of its largest value. A right layout adds the
              same terms in another order, which rounds them otherwise, but not worse than such noise; a fault misses,
              repeats or exchanges whole terms. float64 shows nearly every fault; bfloat16 may hide one that changes a
              tensor by some 10 %.
    Memory:   a rank holds two whole copies of the model at a time, a gradient of each parameter and a copy of every
              module's output: use a small example, and a small model of the same kind.
    Communication: an all-gather of each sharded parameter and gradient, one at a time, beside what the model does.
    Errors:   ValueError for a model without values (meta), that is parallel already, that is not equal on all ranks,
              that draws random numbers, or whose results are not numbers; TypeError if `parallel` returns no module.
    """
    _check_values(model, example)
    with _without_warnings():
        other = parallel(varied(model))
        if not isinstance(other, nn.Module):
            raise TypeError(f"parallel returned a {type(other).__name__}: let it return the parallel model")
        rows = [name for name, module in modules_of(other).items() if _takes_part(module)]
        found = _Findings(model, other)
        found.compare_parameters()
        found.one = OneProcess(model, example, rows)
        forward(other, Arguments(example), found.compare_output, rows)
        found.compare_gradients(Arguments(example), after_backward)
        return found.report()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within, torch does not warn about gathering whole tensors."""
    logger = logging.getLogger("torch.distributed.tensor")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_values(model: nn.Module, example: Any) -> None:
    """ValueError for a model that cannot be verified, or that differs between ranks."""
    named = {**parameters_of(model), **dict(model.named_buffers()), **{f"input {n}": x for n, x in leaves(example)}}
    for name, x in named.items():
        if x.is_meta:
            raise ValueError(f"{name} is on meta and has no values to verify: load the model first")
        if is_dtensor(x):
            raise ValueError(f"{name} is a DTensor: give verify the whole model, and let `parallel` make it parallel")
    sums = {name: str(x.detach().to(torch.promote_types(x.dtype, torch.float64)).sum()) for name, x in named.items()}
    for rank, theirs in enumerate(from_ranks(sums)):
        for name in sums:
            if theirs.get(name) != sums[name]:
                raise ValueError(
                    f"{name} has other values on rank {rank} than on rank {_rank()}: give all ranks the same model and "
                    f"the same example (load them, or call torch.manual_seed before they are made)"
                )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _takes_part(module: nn.Module) -> bool:
    """Whether a module's input is one rank's part, and known."""
    return isinstance(module, RowParallelLinear) and module.input_is_parallel and module.activation is None


class _Findings:
    """What one rank finds, by the tensors' names."""

    one: OneProcess

    def __init__(self, whole: nn.Module, other: nn.Module) -> None:
        self.whole, self.other = whole, other
        self.modules, self.parallel_modules = modules_of(whole), modules_of(other)
        self.parameters = parameters_of(other)
        tps = (module.tp for module in other.modules() if isinstance(module, ParallelModule))
        self.tp = next((tp for tp in tps if tp.size > 1), TensorParallel())
        self.found: dict[str, Compared] = {}
        self.skipped: list[str] = []

    def _note(self, what: str, note: str) -> None:
        self.found[what] = Compared(what, math.inf, 0.0, 0.0, _rank(), note)

    def _compare(self, what: str, actual: Tensor, part: tuple = ()) -> Compared:
        """Compare with a part of the tensor in one process. A gradient that is missing there is zero."""
        expected = self.one.values.get(what, torch.zeros_like(actual))
        if expected[part].shape != actual.shape:
            note = f"has the shape {tuple(actual.shape)}, and {tuple(expected[part].shape)} in one process"
            return Compared(what, math.inf, 0.0, 0.0, _rank(), note)
        size, floats = largest(expected), is_floating(expected)
        eps = max(self.one.eps, torch.finfo(actual.dtype).eps) if floats else 0.0
        limit = allowed(size, eps, self.one.moved.get(what, 0.0))
        return Compared(what, largest_difference(actual, expected[part]), limit, size, _rank())

    def compare_parameters(self) -> None:
        """Names, shapes and values have to be the same, and what is tied has to stay tied."""
        first: dict[int, str] = {}
        whole = parameters_of(varied(self.whole))
        for name, p in whole.items():
            what, q = f"parameter {name}", self.parameters.get(name)
            tied = first.setdefault(id(p), name)
            if q is None:
                self._note(what, "is missing")
            elif q.shape != p.shape or q.requires_grad != p.requires_grad:
                kinds = [f"{tuple(x.shape)}{', frozen' * (not x.requires_grad)}" for x in (q, p)]
                self._note(what, f"is {kinds[0]}, and {kinds[1]} in one process")
            elif q is not self.parameters.get(tied):
                self._note(what, f"is apart from {tied}, to which it is tied in one process")
            elif tied == name:
                error = largest_difference(full_tensor(q), p)
                self.found[what] = Compared(what, error, 0.0, largest(p), _rank())
        for name in self.parameters.keys() - whole.keys():
            self._note(f"parameter {name}", "does not exist in one process")

    def compare_output(self, what: str, actual: Tensor, name: str) -> None:
        """Compare a module's output or input, or this rank's part of it.

        It departs only where the module is of the class that it has in one process, and its part of it is known.
        """
        module, expected = self.parallel_modules[name], self.one.values.get(what)
        actual = full_tensor(actual)
        part = None if expected is None else _part(what, actual, expected, module, self.tp)
        if expected is not None and part is not None:
            compared = self._compare(what, actual, part)
            whole_or_ours = actual.shape == expected.shape or isinstance(module, ParallelModule)
            if not compared.departs or (whole_or_ours and isinstance(module, type(self.modules.get(name)))):
                self.found[what] = compared
                return
        self.skipped.append(what)

    def compare_gradients(self, arguments: Arguments, after_backward: Callable[[nn.Module], None] | None) -> None:
        """Run the parallel model without hooks, forward and backward, and compare its outputs and all gradients."""
        outputs = {what: full_tensor(x) for what, x in forward(self.other, arguments).items()}
        starts, cotangents = [], []
        parts = _contiguous_parts(outputs, self.one.values, self.tp)
        for what in self.one.outputs:
            if what not in outputs:
                self._note(what, "is missing")
                continue
            x, part = outputs[what], parts[what]
            self.found[what] = self._compare(what, x, part)
            if what in self.one.cotangents and self.found[what].note == "":
                if x.requires_grad:
                    starts.append(x)
                    cotangents.append(self.one.cotangents[what][part])
                else:
                    self._note(what, "has no gradient")
        torch.autograd.backward(starts, cotangents)
        if after_backward is not None:
            after_backward(self.other)
        named = {**arguments.tensors, **{name: self.parameters.get(name) for name, _ in self.whole.named_parameters()}}
        missing = {
            name
            for each in from_ranks([n for n, x in named.items() if x is not None and x.grad is None])
            for name in each
        }
        for name, x in named.items():
            what = f"gradient of {name}"
            if x is None:
                continue
            if name not in missing:
                self.found[what] = self._compare(what, full_tensor(x.grad))
            elif largest(self.one.values.get(what, torch.zeros(0))) > 0:
                self._note(what, "is missing")

    def report(self) -> Report:
        """All ranks' findings, the worst of each tensor. Collective."""
        everyone = from_ranks((self.found, self.skipped))
        skipped = {what: None for _, names in everyone for what in names}
        worst: dict[str, Compared] = {}
        for found, _ in everyone:
            for what, compared in found.items():
                if what not in skipped:
                    worst[what] = max(worst.get(what, compared), compared, key=_badness)
        order = {what: number for number, what in enumerate(self.one.values)}
        last = len(order)
        ordered = sorted(
            worst.values(), key=lambda each: order.get(each.what, -1 if each.what.startswith("parameter") else last)
        )
        return Report(ordered, list(skipped), len(everyone))


def _badness(compared: Compared) -> float:
    if not compared.error:
        return 0.0
    return compared.error / compared.allowed if compared.allowed else math.inf


def _part(what: str, actual: Tensor, expected: Tensor, module: nn.Module, tp: TensorParallel) -> tuple | None:
    """The index of this rank's part of a module's output or input, or None if none is known.

    The part is the layer's own rows, or an equal share of the one dim that differs.
    """
    if what.startswith("input"):
        return (..., module.columns)
    if isinstance(module, ColumnParallelLinear) and not module.gather_output:
        return (..., _own_features(module))
    if actual.shape == expected.shape:
        return ()
    if actual.ndim != expected.ndim:
        return None
    differing = [dim for dim in range(actual.ndim) if actual.shape[dim] != expected.shape[dim]]
    if len(differing) > 1:
        return None
    share = -(-expected.shape[differing[0]] // tp.size)
    part = slice(tp.rank * share, (tp.rank + 1) * share)
    index = (*[slice(None)] * differing[0], part)
    return index if expected[index].shape == actual.shape else None


def _own_features(module: ColumnParallelLinear) -> slice | Tensor:
    """The output features that this rank computes, in their order."""
    rows = getattr(module, "rows", None)  # of a layer in place: several slices
    if rows is not None:
        return torch.cat([torch.arange(part.start, part.stop) for part in rows])
    return module.used_rows or slice(module.tp.rank * module.width, (module.tp.rank + 1) * module.width)


def _contiguous_parts(outputs: dict[str, Tensor], values: dict[str, Tensor], tp: TensorParallel) -> dict[str, tuple]:
    """The index of this rank's part of each output: all of it, or ranks' parts follow one another. Collective."""
    shapes = [{what: x.shape for what, x in outputs.items()}]
    if tp.group is not None:
        shapes *= tp.size
        dist.all_gather_object(shapes, shapes[0], group=tp.group)
    parts: dict[str, tuple] = {}
    for what, x in outputs.items():
        whole = values[what].shape if what in values else x.shape
        parts[what] = ()
        for dim in range(x.ndim if x.ndim == len(whole) else 0):
            ends = [0, *accumulate(each[what][dim] for each in shapes)]
            if x.shape[dim] != whole[dim] == ends[-1]:
                parts[what] = (*[slice(None)] * dim, slice(ends[tp.rank], ends[tp.rank + 1]))
    return parts
