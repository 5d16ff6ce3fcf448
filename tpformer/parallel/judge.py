"""The experiment by which `verify`, `tpformer verify` and the trials of parallelize tell whether something parallel
computes what one process computes.

Belongs here: copies whose values hide nothing, a run forward and backward that somebody watches, and the one rule of
how far a tensor may be from that of one process. Who runs what as which rank is up to those who ask.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpformer.torch_private import TorchDispatchMode, plain_name, tree_leaves, tree_map

SEED = 15
DRAWS = 5
MULTIPLE = 6  # how many times as far as rounding moves it a tensor may be from one process
UNMEASURED = 13  # roundings of its largest value by which rounding is taken to move a tensor, if no noise was measured
FLOAT32 = torch.finfo(torch.float32).eps  # models compute norms and positions in float32 whatever their dtype is
T = TypeVar("T")
Seen = Callable[[str, Tensor, str], None]  # (what the tensor is, the tensor, the name of the module that made it)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each tensor within mappings, lists, tuples and dataclasses. The name is a dotted path."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type):
        value = vars(value)
    parts: Iterable = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in value.items() if isinstance(value, Mapping) else parts:
        yield from leaves(part, f"{name}.{key}" if name else str(key))


def copied(value: Any, wants_gradient: Callable[[Tensor], bool]) -> Any:
    """A copy of an argument, whose tensors are new leaves of autograd's graph. Mappings become dicts."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(wants_gradient(value))
    if isinstance(value, Mapping):
        return {key: copied(part, wants_gradient) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(part, wants_gradient) for part in value)
    return copy.deepcopy(value)


def is_floating(x: Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return x.is_floating_point() or x.is_complex()


class Arguments:
    """A copy of an example for one run: a tensor or a tuple are positional arguments, a mapping has arguments by name.

    If some of the example's tensors require a gradient, only those get one here, else all floating ones.
    """

    def __init__(self, example: Any) -> None:
        marked = any(x.requires_grad for _, x in leaves(example))
        made = copied(example, (lambda x: x.requires_grad) if marked else is_floating)
        self.by_name: dict[str, Any] = made if isinstance(made, dict) else {}
        self.positional = () if isinstance(made, dict) else tuple(made) if isinstance(made, list | tuple) else (made,)
        self.tensors = {f"input {name}": x for name, x in leaves(self.by_name or self.positional)}


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules but itself, by name."""
    return {plain_name(path): module for path, module in model.named_modules() if plain_name(path)}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by name. One that is tied stands under each of its names."""
    return {plain_name(path): p for path, p in model.named_parameters(remove_duplicate=False)}


def forward(
    model: nn.Module, arguments: Arguments, seen: Seen | None = None, inputs_of: Collection[str] = ()
) -> dict[str, Tensor]:
    """Call the model, and return the tensors of its output by name.

    seen: gets each module's outputs in the order of execution, before them the first argument of those in inputs_of.
    """
    calls: Counter[str] = Counter()

    def after(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        calls[name] += 1
        again = f" in call {calls[name]}" if calls[name] > 1 else ""
        if seen is not None:
            for kind, value in (
                (("input", args[:1]), ("output", output)) if name in inputs_of else (("output", output),)
            ):
                for part, x in leaves(value):
                    seen(f"{kind}{f' {part}' * bool(part)} of {name}{again}", x, name)

    watched = modules_of(model).items() if seen is not None else ()
    hooks = [module.register_forward_hook(partial(after, name)) for name, module in watched]
    try:
        output = model(*arguments.positional, **arguments.by_name)
    finally:
        for hook in hooks:
            hook.remove()
    return {f"output {name}".rstrip(): x for name, x in leaves(output)}


class OneProcess:
    """A model's tensors in one process, in the order of execution, and how far noise moves each.

    values: the outputs of all modules, the first arguments of those in inputs_of, the model's outputs, and in the order
    of the backward the gradients of inputs and parameters. All are copies.
    outputs: the names of the model's outputs.
    cotangents: the gradient of each output that has one, random. The backward starts from them.
    moved: the largest |change| of each tensor in DRAWS runs whose inputs, parameters and cotangents have relative noise
    of up to eps, so that each is rounded in another way.
    eps: that of the coarsest dtype in which the model computes anything.
    """

    def __init__(self, model: nn.Module, example: Any, inputs_of: Collection[str]) -> None:
        self.inputs_of = inputs_of
        self.values: dict[str, Tensor] = {}
        self.outputs: list[str] = []
        self.cotangents: dict[str, Tensor] = {}
        self.moved: dict[str, float] = {}
        before = random_states()
        with Coarsest() as computed:
            self._run(varied(model), Arguments(example), self._keep, None)
        self.eps = computed.eps
        if any(not torch.equal(state, now) for state, now in zip(before, random_states(), strict=True)):
            raise ValueError("the model draws random numbers, which ranks draw differently: call model.eval() first")
        for what, x in self.values.items():
            if (what in self.cotangents or what.startswith("gradient")) and bool(x.isnan().any()):
                raise ValueError(f"{what} has values in one process that are not numbers: give another example")
        self.moved = dict.fromkeys(self.values, 0.0)
        for draw in range(1, DRAWS + 1):
            noise, again, arguments = Noise(SEED + draw, self.eps), varied(model), Arguments(example)
            noise.add([*arguments.tensors.values(), *again.parameters()])
            self._run(again, arguments, self._move, noise)

    def _keep(self, what: str, x: Tensor, _: str) -> None:
        self.values[what] = x.detach().clone()

    def _move(self, what: str, x: Tensor, _: str) -> None:
        value = self.values.get(what)
        if value is not None:
            same = value.shape == x.shape
            self.moved[what] = max(self.moved[what], largest_difference(x, value) if same else math.inf)

    def _run(self, model: nn.Module, arguments: Arguments, seen: Seen, noise: Noise | None) -> None:
        outputs = forward(model, arguments, seen, self.inputs_of)
        for what, x in outputs.items():
            seen(what, x, "")
        needed = {what: x for what, x in outputs.items() if x.requires_grad}
        if not needed:
            raise ValueError(
                "no output of the model has a gradient: let it return tensors, or lists, tuples, mappings or "
                "dataclasses of them, and let some parameter or input require a gradient"
            )
        cotangents = [random_like(x, SEED + number) for number, x in enumerate(needed.values())]
        if noise is None:
            self.outputs, self.cotangents = list(outputs), dict(zip(needed, cotangents, strict=True))
        else:
            noise.add(cotangents)
        order: dict[str, Tensor] = {}
        for name, x in {**arguments.tensors, **dict(model.named_parameters())}.items():
            if x.requires_grad:
                x.grad = None
                x.register_post_accumulate_grad_hook(partial(order.setdefault, plain_name(name)))
        torch.autograd.backward(list(needed.values()), cotangents)
        for name, x in order.items():
            seen(f"gradient of {name}", x.grad, "")


class Coarsest(TorchDispatchMode):
    """Within, it finds the largest eps of the dtypes of operations' results: norms in float32, autocast's bfloat16."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at its results."""
        results = func(*args, **(kwargs or {}))
        for _, x in leaves(results):
            self.eps = max(self.eps, torch.finfo(x.dtype).eps if is_floating(x) else 0.0)
        return results


class Noise:
    """Relative noise of up to eps, or a tensor's own if that is larger. Each device has its own random numbers."""

    def __init__(self, seed: int, eps: float) -> None:
        self.seed, self.eps = seed, eps
        self.generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def add(self, tensors: Iterable[Tensor]) -> None:
        """Multiply each element of floating tensors by 1 plus its own noise."""
        for x in tensors:
            if is_floating(x):
                generator = self.generators.setdefault(x.device, torch.Generator(x.device).manual_seed(self.seed))
                wide = torch.promote_types(x.dtype, torch.float32)
                noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=wide.to_real()) * 2 - 1
                x.copy_(x.to(wide) * (1 + max(self.eps, torch.finfo(x.dtype).eps) * noise))


@torch.no_grad()
def varied(model: nn.Module) -> nn.Module:
    """A copy of a model, in which parameters whose elements are all equal have other values.

    Such are biases of zeros and norm weights of ones. There a gradient may be zero, and a part of a tensor equals every
    other part, so that faults do not show. Signs are kept, and all copies are equal.
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(SEED)
    for x in model.parameters():
        if is_floating(x) and x.numel() and bool((x == x.flatten()[0]).all()):
            noise = 0.05 + 0.1 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
            x.add_((noise * (1 - 2 * (x.real < 0).cpu())).to(x))
    return model


def random_states() -> list[Tensor]:
    """The states of torch's random generators, of the CPU and of the GPUs."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def random_like(x: Tensor, seed: int) -> Tensor:
    """Values like x from a normal distribution, and 1 for a scalar, which may be a loss."""
    if x.ndim == 0:
        return torch.ones_like(x)
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype).to(x.device)


# values that hide nothing


class Values:
    """Random values, in float64, equal wherever they are drawn in the same order. What is on meta gets some, too."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Of both signs, so that activations are not in their linear part alone; on the device of `like`."""
        drawn = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        return drawn.to("cpu" if like.is_meta else like.device)

    def parameter(self, name: str, like: Tensor) -> Tensor:
        """Norms and scales around one, biases around zero, others such that a linear keeps the scale."""
        shape = tuple(like.shape)
        if len(shape) < 2 and not name.endswith("bias"):
            drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.5
            return drawn.to("cpu" if like.is_meta else like.device)
        return self.normal(shape, like) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)

    def real(self, x: Tensor) -> Tensor:
        """A copy of a tensor's own values, in float64 if it holds floats. On meta it gets random ones, or true."""
        if x.is_meta:
            return self.parameter("", x) if x.is_floating_point() else torch.ones_like(x, device="cpu")
        return x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)


def copy_of(module: nn.Module, instead: Mapping[nn.Module, nn.Module] = MappingProxyType({})) -> nn.Module:
    """A copy that shares the configurations of transformers, which are large. instead: what stands for some modules."""
    configs: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    return copy.deepcopy(module, configs | {id(old): new for old, new in instead.items()})


@torch.no_grad()
def with_random_values(module: nn.Module, instead: Mapping[nn.Module, nn.Module] = MappingProxyType({})) -> nn.Module:
    """A copy in float64, in evaluation mode, whose parameters are random, so that no zero or one hides anything.

    instead: what stands in the copy for some modules, with the values that it has.
    """
    made, values = copy_of(module, instead).eval(), Values()
    done: dict[int, Tensor] = {id(x): x for new in instead.values() for x in new.parameters()}
    for part in made.modules():
        for name, x in part.named_buffers(recurse=False):
            setattr(part, name, values.real(x))
        for name, x in part.named_parameters(recurse=False):
            if id(x) not in done:  # one that is tied stays tied
                floats = x.is_floating_point()
                held = values.parameter(name, x) if floats else values.real(x)
                done[id(x)] = nn.Parameter(held, requires_grad=floats)
            setattr(part, name, done[id(x)])
    return made


class RecordedCall:
    """The arguments of one recorded call, in float64: random where they need gradients, else with their own values."""

    def __init__(self, call: tuple[tuple, dict]) -> None:
        values = Values(4)  # a stream of its own: copies of a module's values could hide what differs
        self.asked = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call)]

        def real(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return values.normal(x.shape, x) if x.requires_grad else values.real(x)

        self.values = tree_map(real, call)

    def fresh(self) -> tuple[Any, list[Tensor]]:
        """(args, kwargs) for one run, and the leaves of autograd's graph among them."""
        asked, leaves = iter(self.asked), []

        def copied(x: Any) -> Any:
            wanted = next(asked)
            if not isinstance(x, Tensor):
                return x
            leaves.extend([x.clone().requires_grad_()] if wanted else [])
            return leaves[-1].clone() if wanted else x.clone()  # a leaf itself must not be written in place

        return tree_map(copied, self.values), leaves


# the rule


def allowed(size: float, eps: float, moved: float | None = None) -> float:
    """How far a tensor whose largest value is `size` may be from one process.

    MULTIPLE times as far as rounding moves it, plus MULTIPLE roundings of its largest value. A right layout adds the
    same terms in another order, which rounds them otherwise; a fault misses, repeats or exchanges whole terms.
    eps:    of the coarsest dtype in which anything is computed.
    moved:  how far noise of eps moved the tensor. None: not measured. It is taken to be UNMEASURED roundings, and the
            whole to be no more than half of the digits, which counts for dtypes of few.
    """
    if moved is not None:
        return MULTIPLE * (moved + eps * size)
    return min(MULTIPLE * (UNMEASURED + 1) * eps, eps**0.5) * size


def departs(found: Tensor | None, expected: Tensor | None, rounding: float = 0.0, eps: float = FLOAT32) -> bool:
    """Whether a tensor is not that of one process, where noise was not measured. None is a gradient of zero.

    rounding: what is left of values that are zero, such as gradients of keys' biases. eps: of the run; trials run in
    float64, whatever a module casts to within.
    """
    if found is None or expected is None:
        some = expected if found is None else found
        return some is not None and not largest_difference(some, torch.zeros_like(some)) <= rounding
    if found.shape != expected.shape:
        return True
    return not largest_difference(found, expected) <= allowed(largest(expected), eps) + rounding


def same_values(found: Any, expected: Any) -> bool:
    """Whether tensors or numbers are equal, to the bit. Other objects are not compared, nor is what is on meta."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.is_meta:
            return True
        found = found.detach()
        equal = found.shape == expected.shape and ((found == expected) | ((found != found) & (expected != expected)))
        return bool(torch.as_tensor(equal).all())
    return not isinstance(found, int | float | str) or found == expected


def largest_difference(actual: Tensor, expected: Tensor, floor: float | None = None) -> float:
    """The largest |actual - expected|, 0 where both are the same infinity, and infinite where one is not a number.

    floor: each is then divided by |expected|, or by `floor` if that is larger.
    """
    if not actual.numel():
        return 0.0
    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float64)
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    if floor is not None:
        difference = difference / expected.abs().clamp(min=floor)
    return float(difference.nan_to_num(math.inf, posinf=math.inf).max())


def largest(x: Tensor) -> float:
    """The largest finite absolute value."""
    values = x.detach().to(torch.promote_types(x.dtype, torch.float64)).abs()
    return float(values.nan_to_num(0.0, posinf=0.0).max()) if x.numel() else 0.0


def from_ranks(value: T) -> list[T]:
    """Every rank's small object. Collective."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
