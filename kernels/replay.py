"""Launchers that do again, with other tensors, what they did in an earlier call with equal sizes.

A launcher computes a tile, a grid and arguments from sizes. Triton then looks at each argument for the kernel that it
compiled for such arguments, and encodes a TMA descriptor of each operand. This takes the host many times as long as the
launch, and depends on no more than sizes, strides, dtypes, the last bits of addresses, and arguments that are no
tensors. `replayed` keeps what came of it, a CallPlan. A later call that agrees in all of these allocates its results,
puts its addresses into the plan, and launches.

Belongs here: what is kept, for how long, and when it may not be used. Nothing about any kernel.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from .description import Lasting, describe_call
from .launch import ALIGNMENT, is_interpreted, require_no_float64

PLANS = 256  # of a launcher, or of a Lasting; for one more the oldest is forgotten
STREAM, HEAD = 3, 9  # of the arguments of Triton's launcher: the stream's index, and how many are not the kernel's
MAPS = 512  # TMA descriptors of one argument of a plan, one for each address
KEY = "key"  # the parameter of kernels that is new in every call: the key of dropout

# What a launcher may do with tensors besides launching.
READS = {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
VIEWS = {"__getitem__", "contiguous", "flatten", "reshape", "view"}
ALLOCATIONS = {"empty", "empty_like", "new_empty"}


class Location(NamedTuple):
    """Where a tensor of a call begins: `offset` bytes into memory number `memory`. Numbers count the tensors that the
    call is given, then those that it allocates. None is a Lasting's memory, and `offset` then an address."""

    memory: int | None
    offset: int


class Prepared(NamedTuple):
    """A launch without the addresses that differ between calls."""

    run: Callable
    """Triton's launcher for these arguments."""
    arguments: list
    """Its arguments: HEAD of its own, with a gap for the stream, then the kernel's, without tuples, with gaps."""
    pointers: list[tuple[int, int, int]]
    """A row for each gap for an address: its index in `arguments`, and the two members of a Location."""
    maps: list[tuple[int, int, int, Callable[[int], Any]]]
    """The same row for each gap for a TMA descriptor, and the function that encodes it for an address."""
    keys: list[int]
    """The indices of gaps for the dropout's key."""


class CallPlan(NamedTuple):
    """What a launcher does in all calls of one description."""

    allocations: list[tuple]
    """(shape, strides, dtype, device) of each tensor that it allocates."""
    launches: list[Prepared]
    result: Callable[[list[Tensor]], Any]
    """The function that makes what it returns of the tensors that it is given and allocates."""


class Memory(int):
    """The number of a tensor in a result."""


class Unplanned(Exception):
    """A call did what a plan cannot do again."""


class Recording(TorchFunctionMode):
    """What a launcher does while this mode is active: with tensors, whose places it follows, and by `launch`."""

    def __init__(self, tensors: Sequence[Tensor], lasting: Lasting | None) -> None:
        super().__init__()
        self.memories = list(tensors)
        self.given = len(tensors)
        self.places: dict[int, Location] = {}
        self.followed: list[Tensor] = []  # while they are held, no other tensor has their id
        self.launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []
        self.obstacle = ""
        for number, x in enumerate(tensors):
            self.follow(x, Location(number, 0))
        for value in () if lasting is None else vars(lasting).values():
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, Tensor):
                    self.follow(x, Location(None, x.data_ptr()))

    def follow(self, x: Tensor, place: Location) -> None:
        self.followed.append(x)
        self.places[id(x)] = place

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = function(*arguments, **(options or {}))
        name = getattr(function, "__name__", "")
        if not isinstance(result, Tensor):
            if name not in READS:
                self.obstacle = name
        elif name in ALLOCATIONS:
            self.follow(result, Location(len(self.memories), 0))
            self.memories.append(result)
        elif name in VIEWS and id(arguments[0]) in self.places and shares_memory(result, arguments[0]):
            memory, offset = self.places[id(arguments[0])]
            self.follow(result, Location(memory, offset + result.data_ptr() - arguments[0].data_ptr()))
        else:
            self.obstacle = name
        return result

    def plan(self, result: Any, keys: list[int]) -> CallPlan:
        """Unplanned if the call cannot be done again."""
        if self.obstacle:
            raise Unplanned(self.obstacle)
        allocated = self.memories[self.given :]
        for x in allocated:
            if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
                raise Unplanned("memory with gaps, or at an address that later memory does not have")
        return CallPlan(
            [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in allocated],
            [prepared(compiled, grid, values, self.places, keys) for compiled, grid, values in self.launches],
            maker(mapped(self.numbered, result)),
        )

    def numbered(self, value: Any) -> Any:
        """Of a result: the Memory instead of a tensor."""
        if not isinstance(value, Tensor):
            return value
        place = self.places.get(id(value))
        if place is None or place.memory is None:
            raise Unplanned("a result that was neither given nor allocated")
        whole = self.memories[place.memory]
        if (value.shape, value.stride(), value.dtype, place.offset) != (whole.shape, whole.stride(), whole.dtype, 0):
            raise Unplanned("a result that is a part of a tensor")
        return Memory(place.memory)


RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)
"""The recording of the call that is under way."""


def replayed(launcher: Callable) -> Callable:
    """A launcher that keeps plans of its calls.

    It starts its kernels by `launch`, and what it does depends on nothing but its arguments. It may read sizes, take
    views and allocate memory. Calls in which it does anything else with a tensor, such as copying one, are not
    replayed; nor is any call in the interpreter, or while something else runs or watches Triton's launches.
    """
    if is_interpreted():
        return launcher
    own: dict[tuple, CallPlan | None] = {}

    @functools.wraps(launcher)
    def call(*arguments: Any, **options: Any) -> Any:
        driver = driver_of_launches()
        if driver is None or RECORDING.get() is not None:
            return launcher(*arguments, **options)
        device = driver.get_current_device()
        description: list = [launcher, driver, device, *options]
        tensors: list[Tensor] = []
        addresses: list[int] = []
        keys: list[int] = []
        lasting = describe_call((*arguments, *options.values()), description, tensors, addresses, keys)
        plans = own if lasting is None else lasting.plans
        wanted = tuple(description)
        try:
            plan = plans[wanted]
        except KeyError:
            result, plan = plan_call(launcher, arguments, options, tensors, keys, lasting)
            if len(plans) >= PLANS:
                plans.pop(next(iter(plans)), None)
            plans[wanted] = plan
            return result
        if plan is None:
            return launcher(*arguments, **options)
        return replay(plan, tensors, addresses, keys, driver.get_current_stream(device))

    call.plans = own  # type: ignore[attr-defined]  # of calls without a Lasting
    return call


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options), for launchers that are `replayed`. Errors: ValueError for float64."""
    require_no_float64(arguments)
    compiled = kernel[grid](*arguments, **options)
    recording = RECORDING.get()
    if recording is not None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        recording.launches.append((compiled, grid, {**named, **options}))


def driver_of_launches() -> Any:
    """Triton's driver; None while something else runs launches in place of Triton, or is told of each."""
    if JITFunction.run.__module__ != "triton.runtime.jit":
        return None
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    return triton.runtime.driver.active


def plan_call(
    launcher: Callable,
    arguments: tuple,
    options: dict[str, Any],
    tensors: list[Tensor],
    keys: list[int],
    lasting: Lasting | None,
) -> tuple[Any, CallPlan | None]:
    """(the launcher's result, the plan of this call or None)."""
    # One tensor may be given twice. Each time it becomes another object, so that it is known which of them is meant.
    aliases = [x.detach() for x in tensors]
    recording = Recording(aliases, lasting)
    following = iter(aliases)
    given = (arguments, tuple(options.values()))
    arguments, values = mapped(lambda value: next(following) if isinstance(value, Tensor) else value, given)
    token = RECORDING.set(recording)
    try:
        with recording:
            result = launcher(*arguments, **dict(zip(options, values, strict=True)))
    finally:
        RECORDING.reset(token)
    try:
        plan = recording.plan(result, keys)
    except Unplanned:
        plan = None
    originals = {id(alias): x for alias, x in zip(aliases, tensors, strict=True)}
    return mapped(lambda value: originals.get(id(value), value), result), plan


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples, named tuples and lists with `change` of each value, in the order of `describe_call`."""
    if not isinstance(value, tuple | list):
        return change(value)
    members = [mapped(change, member) for member in value]
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)


def maker(result: Any) -> Callable[[list[Tensor]], Any]:
    """The function that makes a result of a call's tensors. result: with a Memory instead of each tensor."""
    if isinstance(result, tuple | list):
        kind: Callable = getattr(result, "_make", type(result))  # a named tuple takes its members one by one
        makers = [maker(member) for member in result]
        return lambda memories: kind([make(memories) for make in makers])
    return operator.itemgetter(result) if type(result) is Memory else lambda memories: result


def shares_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Arguments:
    """The arguments of a recorded launch, flat, and the gaps among them."""

    def __init__(self, places: dict[int, Location], keys: list[int], encodings: Sequence) -> None:
        self.places, self.key, self.encodings = places, keys, iter(encodings)
        self.kinds: list[str] = []
        self.values: list = []
        self.gaps: tuple[list, list, list] = ([], [], [])

    def add(self, value: Any, kind: Any, name: str = "") -> None:
        """Append an argument of this kind, as Triton's signatures name kinds."""
        pointers, maps, keys = self.gaps
        at = HEAD + len(self.values)
        if isinstance(kind, tuple | list):
            for member, of_member in zip(value, kind, strict=True):
                self.add(member, of_member)
        elif kind.startswith("tensordesc"):
            memory, offset = self.place(value.base)
            encode = encoder(value, next(self.encodings))
            if memory is not None:
                maps.append((at, memory, offset, encode))
            dims = len(value.shape)
            self.kinds += ["nvTmaDesc", *["i32"] * dims, *["i64"] * dims]
            self.values += [encode(offset) if memory is None else None, *value.shape, *value.strides]
        elif kind != "constexpr":
            if kind.startswith("*"):
                memory, offset = self.place(value)
                if memory is None and value.is_pinned():
                    offset = value  # Triton's launcher asks the driver where the device sees it
                elif memory is not None:
                    pointers.append((at, memory, offset))
                value = offset
            elif name == KEY and self.key:
                if self.key != [value]:
                    raise Unplanned("a key that is made of several, or of none")
                keys.append(at)
            self.kinds.append(kind)
            self.values.append(value)

    def place(self, x: Tensor) -> Location:
        if id(x) not in self.places:
            raise Unplanned("a tensor that was neither given nor allocated")
        return self.places[id(x)]


def prepared(
    compiled: Any, grid: tuple[int, ...], named: dict[str, Any], places: dict[int, Location], keys: list[int]
) -> Prepared:
    """A launch that was recorded. named: its arguments and options. Unplanned for a tensor of unknown place."""
    encodings = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    flat = Arguments(places, keys, encodings)
    for name, kind in compiled.src.signature.items():
        flat.add(named[name], kind, name)
    run = flat_launcher(compiled, tuple(flat.kinds))
    head = (*(*grid, 1, 1)[:3], None, compiled.function, compiled.packed_metadata, None, None, None)
    return Prepared(run, [*head, *flat.values], *flat.gaps)


@functools.lru_cache(maxsize=PLANS)
def flat_launcher(compiled: Any, kinds: tuple[str, ...]) -> Callable:
    """Triton's launcher of a compiled kernel, which takes encoded TMA descriptors, and no tuples."""
    source = SimpleNamespace(fn=compiled.src.fn, constants={}, signature=dict(enumerate(kinds)))
    metadata = compiled.metadata
    if hasattr(metadata, "tensordesc_meta"):
        metadata = metadata._replace(tensordesc_meta=None)
    return triton.runtime.driver.active.launcher_cls(source, metadata)


def encoder(descriptor: Any, encoding: Any) -> Callable[[int], Any]:
    """The function that encodes such a TMA descriptor for an address, and keeps the last MAPS of them."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    numbers = {name: value for name, value in vars(descriptor).items() if name != "base"}

    @functools.lru_cache(maxsize=MAPS)
    def encode(address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address)
        return make_tensordesc_arg(SimpleNamespace(base=base, **numbers), encoding)[0]

    return encode


def replay(plan: CallPlan, memories: list[Tensor], addresses: list[int], keys: list[int], stream: Any) -> Any:
    """What the launcher of this plan does, and what it returns. memories: the tensors that it is given, to which those
    that it allocates are appended."""
    for shape, strides, dtype, device in plan.allocations:
        allocated = torch.empty_strided(shape, strides, dtype=dtype, device=device)  # half of torch.empty's time
        memories.append(allocated)
        addresses.append(allocated.data_ptr())
    for run, arguments, pointers, maps, gaps in plan.launches:
        arguments = arguments.copy()
        arguments[STREAM] = stream
        for at, memory, offset in pointers:
            arguments[at] = addresses[memory] + offset
        for at, memory, offset, encode in maps:
            arguments[at] = encode(addresses[memory] + offset)
        for at in gaps:
            arguments[at] = keys[0]
        run(*arguments)
    return plan.result(memories)
