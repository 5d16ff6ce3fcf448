"""What every call of a model that was cut over ranks is asked, whichever of its modules is called, and how.

Belongs here: where a call begins and ends, and what is compared there: inputs, gradients, places and random numbers.
A module that holds cut linears has its forward wrapped, so model(x), model.encoder(x) and model.forward(x) are all
seen. A cut linear reports its own calls.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from tpformer.layers import ParallelModule, TensorParallel
from tpformer.layers.children import unwrapped
from tpformer.ops.uncompiled import uncompiled, untraced
from tpformer.torch_private import compiler_is_imported, in_backward, in_transform, leave_frame_uncompiled, tree_leaves

from .generators import Generators, numbers
from .places import Exchange, Place, digest, number_of
from .refusals import Refusals, is_part
from .regions import is_adapted, values_of
from .rehearsal import drawing

GUARD, OWN = "_tpformer_guard", "_tpformer_own_forward"  # attributes of a module whose forward is wrapped
LOOKS = 3  # forwards of one kind without random numbers, after which only the whole forward is looked at
OFTEN = 64  # from here on, values are compared in every so many forwards
INPUTS = (
    "tensor-parallel ranks got different inputs, but they compute one batch together: give all the same samples, by a "
    "sampler whose rank is that of the data-parallel axis"
)
GRADIENTS = (
    "tensor-parallel ranks got different gradients of the model's outputs, but they compute one batch together: let "
    "all compute the same loss, of the same targets"
)
STATES = (
    "tensor-parallel ranks have different random states, and would draw different {what}: call torch.manual_seed with "
    "the same number on all of them before {when}"
)

TRANSFORMED = (
    "torch.func's grad, vmap and jvp, forward-mode AD and tracers cannot go through a model that is cut over ranks: "
    "take its gradients by backward() or torch.autograd.grad, and transform or trace the model before parallelize"
)


class Frame(NamedTuple):
    """A call that is watched: of what, and the states of the generators when it began."""

    module: nn.Module
    states: tuple
    kind: tuple
    depth: int


class Guard:
    """One for a model and all of its modules. A copy of the model has its own; a copy of a part shares this one."""

    def __init__(self, tp: TensorParallel, divided: Iterable[nn.Module], partial_attention: bool) -> None:
        """divided: modules within which ranks compute with a part of the features or of the rows."""
        self.tp, self.divided, self.partial_attention = tp, set(divided), partial_attention
        self.forwards = self.backwards = self.steps = 0
        self.names: dict[int, str] = {}
        self.exchange = Exchange(tp.group, self.names)
        self.stack: list[Frame] = []
        self.known: set[tuple] = set()  # kinds of calls whose values have been compared
        self.quiet: dict[tuple, int] = {}  # forwards without random numbers, by their kind
        self.seen: tuple[int, list[float]] = (0, [])  # of which forward values were seen, and what
        self.coming: tuple[int, Tensor, Any] | None = None  # what a GPU is still computing
        self.optimizers: weakref.WeakKeyDictionary[optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        _guards().add(self)

    def __deepcopy__(self, memo: dict) -> Guard:
        """That of the copied model, in which the copies of modules are what they are in this one."""
        if (model := memo.get(id(self.model()))) is None:
            return self
        memo[id(self)] = own = object.__new__(type(self))
        vars(own).update(vars(self))
        own.model, own.stack, own.optimizers = weakref.ref(model), [], weakref.WeakKeyDictionary()
        own.known, own.quiet, own.seen, own.coming = set(self.known), dict(self.quiet), (0, []), None
        for name in ("divided", "name", "refusals", "generators"):
            setattr(own, name, copy.deepcopy(getattr(self, name), memo))
        _guards().add(own)
        return own

    def __reduce__(self) -> tuple[Any, tuple]:
        return type(None), ()  # what is read from a file is on no ranks

    def look(self, model: nn.Module) -> None:
        """Wrap the forwards of all modules that hold cut ones; again after adapters have been cut."""
        self.model, self.refusals = weakref.ref(model), Refusals(model, self.partial_attention, self.divided)
        self.generators = Generators(model)
        modules = dict(model.named_modules())
        self.name = {module: name or type(module).__name__ for name, module in modules.items()}
        self.names |= {number_of(name): name for name in self.name.values()}
        holders = {""}
        for name, module in modules.items():
            if isinstance(module, ParallelModule):
                module.guard = self
                parts = name.split(".")
                holders |= {".".join(parts[:depth]) for depth in range(len(parts))}
        for name in holders:
            module = modules[name]
            if unwrapped(module) is not module:
                continue
            if GUARD not in vars(module) and not is_adapted(module) and not isinstance(module, ParallelModule):
                _wrap(module)
            setattr(module, GUARD, self)

    @uncompiled
    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Frame | None:
        """A call begins. The frame of one that is watched is given back to `leave`."""
        if self.stack:
            if module not in self.divided or self.quiet.get(self.stack[0].kind, 0) >= LOOKS:
                return None
            frame = Frame(module, self.generators.tensors(), (), len(self.stack))
        elif _left_alone():
            return None
        elif in_transform():
            raise ValueError(TRANSFORMED)
        else:
            self.refusals.check(module, kwargs)
            kind = self._begin(module, (args, kwargs))
            frame = Frame(module, self.generators.all(), kind, 0)
        self.stack.append(frame)
        return frame

    @uncompiled
    def leave(self, frame: Frame, result: Any, failed: bool) -> None:
        """A watched call has ended, or has failed."""
        del self.stack[frame.depth :]
        if failed:
            return
        outermost = not self.stack
        states = self.generators.all() if outermost else self.generators.tensors()
        if states != frame.states:
            self._drawn(frame, states)
        if outermost:
            drawn = states != frame.states
            self.quiet[frame.kind] = 0 if drawn else self.quiet.get(frame.kind, 0) + 1
            self.exchange.settle()
            self._follow(frame.kind, result)

    def visit(self, layer: nn.Module) -> None:
        """A cut layer is called. ValueError if that is no part of a call of a module that holds it."""
        if self.stack:
            outermost = self.stack[0]
            if len(self.stack) == 1 and outermost.module not in self.divided and is_part(layer):
                if self.quiet.get(outermost.kind, 0) < LOOKS:
                    self.divided.add(outermost.module)  # it calls what holds the layer piece by piece
            return
        if _left_alone():
            return
        name = self.name.get(layer, type(layer).__name__)
        if is_part(layer):
            raise ValueError(
                f"{name} gives or takes one rank's part of the features, and was called by itself: call the module "
                f"that it is part of"
            )
        self._begin(layer, ())

    def check_random_states(self) -> None:
        """ValueError if ranks would draw different numbers from the generator of the device that they are on."""
        states = self.generators.all()
        on_gpu = self.tp.mesh is not None and self.tp.mesh.device_type == "cuda"
        self._compare_states(
            "generate()", [states[1 if on_gpu else 0]], STATES.format(what="tokens", when="generate()")
        )

    def _begin(self, module: nn.Module, inputs: Any) -> tuple:
        """Count a call, and compare it with the other ranks'. In the first one of its kind all wait for it."""
        self.forwards += 1
        name = self.name.get(module, type(module).__name__)
        kind = (name, module.training, torch.is_grad_enabled())
        new = kind not in self.known
        if new or self.forwards % OFTEN == 0 or not self.forwards & (self.forwards - 1):
            self._see(digest(tree_leaves(inputs)), wait=new)
        elif self.coming is not None and self.coming[2].query():
            self.seen, self.coming = (self.coming[0], self.coming[1].tolist()), None
        self.exchange.send(self._place(name, module.training), *self.seen, INPUTS, wait=new)
        self.known.add(kind)
        return kind

    def _see(self, values: Tensor, wait: bool) -> None:
        if wait or not values.is_cuda:
            self.seen, self.coming = (self.forwards, values.tolist()), None
            return
        there = values.to("cpu", non_blocking=True)
        self.coming = self.forwards, there, torch.cuda.Event()
        self.coming[2].record()

    def _place(self, name: str, training: bool) -> Place:
        what = number_of(name)
        self.names.setdefault(what, name)
        return Place(self.forwards, self.backwards, self.steps, what, training, torch.is_grad_enabled())

    def _drawn(self, frame: Frame, states: tuple) -> None:
        """Random numbers were drawn within a call. Right are those that all ranks draw alike, of whole tensors."""
        moved = [index for index, (x, y) in enumerate(zip(frame.states, states, strict=False)) if x != y]
        source, name = self.generators.names()[moved[0]], self.name.get(frame.module, type(frame.module).__name__)
        if len(self.stack) or frame.module in self.divided:
            suspects = [(f"{part}.{key}".lstrip("."), getattr(each, key)) for part, each, key in drawing(frame.module)]
            suspect = next((f", {key} is {p}" for key, p in suspects if p > 0), "")
            raise ValueError(
                f"{name} draws random numbers ({source}{suspect}), and each rank has only a part of its features: "
                f"tensor-parallel ranks would draw other masks than one process; set its dropout to 0, in a "
                f"transformers model by its config, or draw outside of it"
            )
        calls = self.quiet.get(frame.kind, 0)
        if calls >= LOOKS and moved != [len(states) - 1]:
            self.quiet[frame.kind] = 0
            raise ValueError(
                f"{name} draws random numbers ({source}) after {calls} calls without any, in which it was no longer "
                f"looked at where: call it again"
            )
        refusal = STATES.format(what=f"numbers ({source})", when=f"{name} is called")
        self._compare_states(name, [frame.states[index] for index in moved], refusal)

    def _compare_states(self, name: str, states: list, refusal: str) -> None:
        own = numbers(tuple(states))
        place = self._place(f"random numbers of {name}", False)
        self.exchange.send(place, self.forwards, [float(len(own)), float(sum(own)), *[0.0] * 6], refusal, wait=True)

    def _follow(self, kind: tuple, result: Any) -> None:
        """Let the backward of a call be counted, and the first one of its kind be compared."""
        if not torch.is_grad_enabled():
            return
        count = partial(self._backward, kind, [])
        for value in tree_leaves(values_of(result)):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(count)

    def _backward(self, kind: tuple, arrived: list, gradient: Tensor) -> None:
        if arrived:
            return
        arrived.append(True)
        self.backwards += 1
        if (*kind, "backward") not in self.known:
            self.known.add((*kind, "backward"))
            place = self._place(f"the backward of {kind[0]}", kind[1])
            self.exchange.send(place, -self.forwards, digest([gradient]).tolist(), GRADIENTS, wait=True)


def _left_alone() -> bool:
    """Whether a call is a recomputation, or is being captured: then it is compared as the call that it belongs to."""
    return in_backward() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@cache
def _guards() -> weakref.WeakSet[Guard]:
    """All guards, which count the steps of optimizers. No hook is removed later: torch may be calling them then."""
    register_optimizer_step_post_hook(_stepped)
    return weakref.WeakSet()


def _stepped(optimizer: optim.Optimizer, *_: Any) -> None:
    for own in list(_guards()):
        model = own.model()
        if model is not None and optimizer not in own.optimizers:
            held = {id(parameter) for parameter in model.parameters()}
            own.optimizers[optimizer] = any(id(p) in held for group in optimizer.param_groups for p in group["params"])
        own.steps += own.optimizers.get(optimizer, False)


def guard(model: nn.Module, tp: TensorParallel, divided: Iterable[str], partial_attention: bool) -> None:
    """Guard all calls of a model; the guard that it has looks at it again.

    divided: names of modules within which ranks compute with a part of the features or of the rows.
    """
    found = next((vars(part)[GUARD] for part in model.modules() if GUARD in vars(part)), None)
    if found is None:
        modules = set()
        for name in divided:
            while name and type(model.get_submodule(name)).forward is nn.Module.forward:  # a list is not called
                name = name.rpartition(".")[0]
            modules.add(model.get_submodule(name))
        found = Guard(tp, modules, partial_attention)
    found.look(model)


def _wrap(module: nn.Module) -> None:
    if "forward" in vars(module):
        setattr(module, OWN, module.forward)
    if type(module).forward is not nn.Module.forward or OWN in vars(module):  # a list of modules is not called
        module.forward = MethodType(_guarded(type(module).forward), module)
    if isinstance(module, nn.Sequential):  # the compiler calls its members one by one, unless it has a hook
        module.register_forward_pre_hook(_keep)


def _keep(module: nn.Module, args: tuple) -> None:
    """Changes nothing."""


@cache
def _guarded(own: Callable) -> Callable:
    """A forward, between the guard's two looks."""

    @wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compiler_is_imported():
            leave_frame_uncompiled(forward)  # the compiler compiles what is called here, not this
        attributes = vars(self)
        guard = attributes[GUARD]
        frame = None if guard is None else guard.enter(self, args, kwargs)
        call = attributes.get(OWN)
        failed = True
        try:
            result = type(self).forward(self, *args, **kwargs) if call is None else call(*args, **kwargs)
            failed = False
        finally:
            if frame is not None:
                guard.leave(frame, None if failed else result, failed)
        return result

    return untraced(forward)
