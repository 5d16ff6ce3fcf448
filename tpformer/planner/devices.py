"""GPUs and their clusters: the files that describe them, and the checks of these files.

Belongs here: reading device_files/NAME.toml or a user's own file, and launchers that plan for a GPU that is not there.
What the numbers are used for is in the models of time and memory. A number that kernels/cost.py has stands there alone:
a file names its machine.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tpformer.config import check_choice, check_known
from tpformer.kernels.cost import MACHINES, MOVED, RELEASE_SECONDS, Machine
from tpformer.ops.choice.prediction import chosen_launch
from tpformer.words import shown

DIRECTORY = Path(__file__).parent / "device_files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and the cluster around it. Seconds, bytes, FLOP/s and bytes/s."""

    name: str
    machine: Machine
    memory: float
    """Bytes of one GPU."""
    processors: int
    """Streaming multiprocessors."""
    capability: tuple[int, int] | None
    """None for a processor that runs no CUDA: products have no tiles there, and no kernel is fused."""
    shared_memory: int
    """Bytes of one streaming multiprocessor."""
    itemsize: int = 2
    """Bytes of the numbers that all rates are of."""
    launch: float = 0.0
    """Seconds that the processor itself spends on each kernel besides: 0 where a host launches them ahead."""
    attention_forward: float
    """FLOP/s of causal attention, of the half that is not masked."""
    attention_backward: float
    gpus_per_node: int
    host: float
    """Bytes/s between one GPU and its host's memory, in one direction."""
    network: float
    """Bytes/s of one GPU's network adapter."""
    network_latency: float
    fitted: tuple[float, float] = (1.0, 1.0)
    """What published runs reached of the FLOP/s: the least and the most of the factors that were fitted on them."""
    node: tuple[float, float] | None = None
    """Seconds and bytes/s of a library's message inside of a node, if they are not those of kernels/cost.py."""

    @property
    def inside(self) -> tuple[float, float]:
        """Seconds and bytes/s of a library's message inside of a node."""
        return self.node or (RELEASE_SECONDS, MOVED[1][1] * self.machine.link)

    def spread(self, ranks: int, distance: int) -> tuple[int, int]:
        """(ranks in a node, nodes) of a group whose ranks are `distance` apart, where ranks fill node after node."""
        inside = max(1, min(ranks, self.gpus_per_node // distance))
        while ranks % inside:
            inside -= 1
        return inside, ranks // inside

    @property
    def factor(self) -> float:
        """The factor that plans use: the geometric mean of the fitted ones."""
        return math.sqrt(self.fitted[0] * self.fitted[1])

    def scaled(self, rate: float) -> Device:
        """The same device with `rate` times its FLOP/s of GEMMs and attention, the one constant that is fitted."""
        return dataclasses.replace(
            self,
            machine=self.machine._replace(
                flops=rate * self.machine.flops,
                fp8_flops=self.machine.fp8_flops and rate * self.machine.fp8_flops,
            ),
            attention_forward=rate * self.attention_forward,
            attention_backward=rate * self.attention_backward,
        )


def fitted_rate(low: float, high: float, too_high: Callable[[float], bool]) -> float:
    """The rate between low and high, for Device.scaled, above which `too_high` is true. Found by bisection."""
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if too_high(middle) else (middle, high)
    return low


# [gpu] and [cluster]: key -> (largest value, whole number). The smallest is above 0.
NUMBERS = {
    "memory_gb": (1e4, False),
    "memory_tb_s": (1e3, False),
    "peak_tflops": (1e6, False),
    "gemm_tflops": (1e6, False),
    "fp8_tflops": (1e6, False),
    "link_gb_s": (1e5, False),
    "processors": (1e4, True),
    "shared_memory_kib": (1e5, True),
    "attention_forward_tflops": (1e6, False),
    "attention_backward_tflops": (1e6, False),
    "gpus_per_node": (1e4, True),
    "host_gb_s": (1e5, False),
    "network_gb_s": (1e5, False),
    "network_latency_us": (1e6, False),
    "fitted_least": (2.0, False),
    "fitted_most": (2.0, False),
    "node_gb_s": (1e5, False),
    "node_latency_us": (1e6, False),
}
RATES = {"peak_tflops": ("peak_flops", 1e12), "gemm_tflops": ("flops", 1e12), "link_gb_s": ("link", 1e9),
         "memory_tb_s": ("memory", 1e12), "fp8_tflops": ("fp8_flops", 1e12)}  # fmt: skip
NODE = ("node_latency_us", "node_gb_s")  # both, or neither
CLUSTER = ("gpus_per_node", "host_gb_s", "network_gb_s", "network_latency_us", *NODE)
GPU = tuple(key for key in NUMBERS if key not in CLUSTER)
CUDA = ("capability", "shared_memory_kib")  # both, or, for a processor that runs no CUDA, neither
FITTED = ("fitted_least", "fitted_most")  # both, or neither
OPTIONAL = (*RATES, *NODE, *CUDA, *FITTED)  # rates: where a machine gives them
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def names() -> list[str]:
    """The devices that come with the package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def load_device(name_or_path: str | Path, gpus_per_node: int | None = None) -> Device:
    """A device by its name, or by the path of a TOML file. gpus_per_node: in place of the file's.

    Errors: ValueError, in one sentence with the remedy, for an unknown name or key, a missing key or a wrong value.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = DIRECTORY / f"{name_or_path}.toml"
        if not path.is_file():
            raise ValueError(
                f"unknown device {shown(str(name_or_path))}: choose one of {', '.join(names())}, or give the path of a "
                f"file like {DIRECTORY / 'h100.toml'}"
            )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the path of a device's TOML file") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    device = parse_device(path.stem, values, str(path))
    if gpus_per_node is not None:
        device = dataclasses.replace(device, gpus_per_node=check_number("--nodes-of", "gpus_per_node", gpus_per_node))
    return device


def parse_device(name: str, values: Mapping[str, Any], where: str) -> Device:
    """A Device from the sections of its file. where: what messages call the file."""
    for section in values:
        check_known(section, ("gpu", "cluster"), "section", f"{where}: ")
    for section in ("gpu", "cluster"):
        if not isinstance(values.get(section), Mapping):
            raise ValueError(f"{where} has no section [{section}]: copy it from {DIRECTORY / 'h100.toml'}")
    gpu, cluster = values["gpu"], values["cluster"]
    of_gpu = ("machine", "capability", "dtype", *GPU)
    for section, given, known, elsewhere in (("gpu", gpu, of_gpu, CLUSTER), ("cluster", cluster, CLUSTER, of_gpu)):
        for key in given:
            if key in elsewhere:
                raise ValueError(f"[{section}] of {where} has {key}, which belongs to the other section: move it there")
            check_known(key, known, "key", f"[{section}] of {where}: ")
    machine = _machine(where, name, gpu)
    required = [("gpu", key) for key in GPU if key not in OPTIONAL]
    required += [("cluster", key) for key in CLUSTER if key not in OPTIONAL]
    for section, pair in (("gpu", CUDA), ("gpu", FITTED), ("cluster", NODE)):
        required += [(section, key) for key in pair if any(other in values[section] for other in pair)]
    for section, key in required:
        if key not in values[section]:
            both = next((names for names in (CUDA, FITTED, NODE) if key in names), None)
            like = f"it goes with {both[1 - both.index(key)]}" if both else f"as {DIRECTORY / 'h100.toml'} does"
            raise ValueError(f"[{section}] of {where} lacks {key}: give it, {like}")
    capability, dtype = gpu.get("capability"), gpu.get("dtype", "bfloat16")
    numbers = isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability)
    if capability is not None and (not numbers or min(capability) < 0):
        raise ValueError(f"{where}: capability = {shown(capability)} must be two whole numbers, such as [9, 0]")
    check_choice(f"{where}: dtype", dtype, DTYPES)
    number = {key: check_number(where, key, {**gpu, **cluster}[key]) for key in NUMBERS if key in gpu or key in cluster}
    device = Device(
        name=name,
        machine=machine,
        memory=1e9 * number["memory_gb"],
        processors=number["processors"],
        capability=tuple(capability) if capability else None,
        shared_memory=number.get("shared_memory_kib", 0) << 10,
        itemsize=DTYPES[dtype],
        attention_forward=1e12 * number["attention_forward_tflops"],
        attention_backward=1e12 * number["attention_backward_tflops"],
        gpus_per_node=number["gpus_per_node"],
        host=1e9 * number["host_gb_s"],
        network=1e9 * number["network_gb_s"],
        network_latency=1e-6 * number["network_latency_us"],
        fitted=(number.get(FITTED[0], 1.0), number.get(FITTED[1], 1.0)),
        node=(1e-6 * number[NODE[0]], 1e9 * number[NODE[1]]) if NODE[0] in number else None,
    )
    check_rates(device, where)
    return device


def check_rates(device: Device, where: str) -> None:
    """ValueError for rates that contradict each other: of kernels above the peak, of the host above the memory, and a
    least factor above the most.
    """
    if device.fitted[0] > device.fitted[1]:
        raise ValueError(f"{where}: fitted_least = {device.fitted[0]:g} is above fitted_most = {device.fitted[1]:g}")
    peak = device.machine.peak_flops
    rates = {
        "gemm_tflops": device.machine.flops,
        "attention_forward_tflops": device.attention_forward,
        "attention_backward_tflops": device.attention_backward,
    }
    for key, rate in rates.items():
        if rate > peak:
            raise ValueError(
                f"{where}: {key} = {rate / 1e12:g} is above the {peak / 1e12:g} TFLOP/s of its peak: give what kernels "
                f"sustain"
            )
    blocks = device.machine.fp8_flops
    if blocks is not None and blocks > 2 * peak:
        raise ValueError(
            f"{where}: fp8_tflops = {blocks / 1e12:g} is above the {2 * peak / 1e12:g} TFLOP/s of a peak that is twice "
            f"16 bits': give what GEMMs of blocks sustain"
        )
    if device.host > device.machine.memory:
        raise ValueError(
            f"{where}: host_gb_s = {device.host / 1e9:g} exceeds the {device.machine.memory / 1e9:g} GB/s of memory: "
            f"give what one GPU's way to its host sustains"
        )


def _machine(where: str, name: str, gpu: Mapping[str, Any]) -> Machine:
    """The machine of kernels/cost.py that the file names, with the file's rates. A file that names none gives all."""
    rates = {field: scale * check_number(where, key, gpu[key]) for key, (field, scale) in RATES.items() if key in gpu}
    if "machine" in gpu:
        known = {machine.name: machine for machine in MACHINES}
        if gpu["machine"] not in [*known]:  # any type, so no look-up by its hash
            raise ValueError(f"{where}: machine = {shown(gpu['machine'])} must be one of {', '.join(known)}")
        return known[gpu["machine"]]._replace(**rates)
    missing = [key for key, (field, _) in RATES.items() if key not in gpu and field not in Machine._field_defaults]
    if missing:
        raise ValueError(f"{where} names no machine of kernels/cost.py and lacks {', '.join(missing)}: give either")
    return Machine(name=name, **rates)


def check_number(where: str, key: str, value: Any) -> Any:
    """The value of one of NUMBERS. ValueError if it is out of range."""
    largest, whole = NUMBERS[key]
    fits = type(value) is int or (type(value) is float and not whole)
    if not fits or not 0 < value <= largest:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{where}: {key} = {shown(value)} must be {kind} above 0 and at most {largest:g}")
    return value


@contextmanager
def as_if_on(device: Device) -> Iterator[torch.device]:
    """Within, launchers plan for this GPU, whatever there is; the device that it seems to be."""
    properties = SimpleNamespace(
        name=f"NVIDIA {device.machine.name}",
        multi_processor_count=device.processors,
        shared_memory_per_multiprocessor=device.shared_memory,
    )
    answers = {"capability": device.capability, "properties": properties}
    with ExitStack() as stack:
        for what, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, f"get_device_{what}", lambda *_, answer=answer: answer))
        chosen_launch.cache_clear()
        stack.callback(chosen_launch.cache_clear)
        yield torch.device("cuda")
