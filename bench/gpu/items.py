"""What there is to measure on a GPU: an item for each command, with what it is worth and what it takes.

Belongs here: the list, as data, in the order in which it runs where nothing is known yet: by value per second. Every
command can be called by itself.
"""

from typing import NamedTuple

INTO = "{into}"  # in a command: the folder of the results
TORCH = "{torch}"  # in an environment: the folder of torch, which has an assembler newer than Triton's


PRETENDING = ("-m", "checks.driver.pretend")


class Command(NamedTuple):
    """Arguments of Python, and the file in the results' folder that they write."""

    arguments: tuple[str, ...]
    result: str


class Item(NamedTuple):
    """name: what --only selects. value: what it is worth, in points. seconds: an estimate, of compiled kernels.

    rehearsal: the command without a GPU. sources: globs of what the result depends on, besides what kernels import.
    bar, prediction: what is required and what is expected, in words. tool: a program under which the command runs;
    without it the item is left out. environment: variables for it.
    """

    name: str
    value: int
    seconds: int
    command: Command
    rehearsal: Command
    sources: tuple[str, ...]
    bar: str = ""
    prediction: str = ""
    tool: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def compilation(self) -> Command | None:
        """The command on a driver that runs no kernel, with all its sizes: what it compiles, it would compile on a GPU.

        None if it compiles nothing that another item does not, or needs a GPU's process group.
        """
        arguments, result = self.command
        if self.tool or self.environment or "pretrain" in arguments or "pytest" in arguments:
            return None
        if "bench" not in arguments:
            return Command((*arguments, "--pretend"), result)
        return Command((*PRETENDING, "-m", "bench.gpu.rehearsal", "--wide", *arguments[2:]), result)

    @property
    def limit(self) -> int:
        """The item is ended after so many seconds, which leave time to compile its kernels first."""
        return 60 + 4 * self.seconds


def kernels(*names: str) -> tuple[str, ...]:
    """The globs of these operations' kernels, and of how benches time them."""
    return ("harness/timing.py", *(f"kernels/{name}/*.py" for name in names))


def called(name: str, options: tuple[str, ...], into: str = "") -> Command:
    """A bench with these options; into: below the folder of the results."""
    given = [option.lstrip("-") for option in options if option.startswith("--")]
    place = f"{into}/" if into else ""
    arguments = ("-m", "bench", name, *options, "--into", f"{INTO}/{place}")
    return Command(arguments, f"{place}{'-'.join([name, *given])}.json")


def pretended(command: Command) -> Command:
    """The same with a driver that runs no kernel; of a bench on narrow models."""
    arguments = tuple("bench.gpu.rehearsal" if each == "bench" else each for each in command.arguments)
    return Command((*PRETENDING, *arguments), command.result)


QUICK = ("--quick",)
KERNEL_TESTS = "tests/kernels"
GATHER_TESTS, ON_GPU = f"{KERNEL_TESTS}/test_all_gather_matmul_kernel.py", "test_virtual_ranks_on_gpu"
GEMM = (*kernels("matmul"), "bench/matmul.py", "bench/shapes.py")
FUSED = ("bench/fused*.py", "bench/shapes.py", "bench/channels.py")
GATHER = (*kernels("all_gather_matmul"), *FUSED)
SCATTER = (*kernels("matmul_reduce_scatter", "matmul"), *FUSED)
ALL_REDUCE = (*kernels("matmul_all_reduce", "matmul"), *FUSED)
GROUPED = (*kernels("grouped_matmul"), "bench/grouped_matmul.py")
GATHERED = (*GROUPED, *kernels("all_gather_grouped_matmul"), "bench/gathered_experts.py")
QUANTIZED = (
    *kernels("quantized_matmul", "quantized_grouped_matmul", "all_gather_quantized_matmul", "quantize"),
    *kernels("matmul_reduce_scatter", "matmul_all_reduce"),
    *kernels("all_gather_grouped_matmul"),
    "bench/gathered_experts.py",
    "bench/quantized_matmul.py",
    "bench/channels.py",
    "tpformer/ops/quantized_product.py",
)
TRIALS = (*GEMM, "bench/matmul_trials.py", "bench/specialised.py")
CONSTANTS = (*GATHER, *SCATTER, *ALL_REDUCE, "bench/constants.py", "bench/release.py")
LAYER = ("kernels/**/*.py", "tpformer/**/*.py", "bench/layer.py", "bench/plain.py")
PRETRAIN = ("kernels/**/*.py", "tpformer/**/*.py", "bench/pretrain.py")
ALL = ("kernels/**/*.py", "bench/**/*.py", "harness/*.py")
TESTS = ("kernels/**/*.py", "tpformer/**/*.py", "tests/*.py", "tests/**/test_*.py")
TAX, COPY, HALF = "0.97 of the GEMM", "0.9 of a copy", "0.5 of a copy"


def memory_bound(name: str) -> tuple[str, ...]:
    """The globs of a bench of memory-bound kernels."""
    return (*kernels(name), "bench/memory_bound/*.py", f"tpformer/ops/{name}.py")


def quick(
    name: str, value: int, seconds: int, sources: tuple[str, ...] = (), bar: str = "", prediction: str = ""
) -> Item:
    """A bench with --quick. Without sources it is one of memory-bound kernels."""
    command = called(name, QUICK)
    return Item(name, value, seconds, command, pretended(command), sources or memory_bound(name), bar, prediction)


def whole(item: Item, seconds: int) -> Item:
    """The bench of an item without options, as bench/results has it. It is rehearsed as the item is."""
    name = item.command.arguments[2]
    value, command = max(1, seconds // 10), called(name, ())
    return item._replace(name=f"whole {name}", value=value, seconds=seconds, command=command)


def tests(name: str, value: int, seconds: int, group: str, *rehearsed: str) -> Item:
    """A group of the tests that need a GPU. A rehearsal runs some files."""
    result = f"{name.replace(' ', '_')}.json"
    commands = (
        Command(("tests/gpu_run.py", *options, "--into", f"{INTO}/{result}"), result)
        for options in ((group,), ("--pretend", *rehearsed))
    )
    return Item(name, value, seconds, *commands, TESTS, "no failure", "no failure")


def gather(name: str, value: int, seconds: int, times: int, tool: tuple[str, ...] = ()) -> Item:
    """The test of the gather that once had values which were not finite, so many times; in a rehearsal a small one."""
    result = f"{name.replace(' ', '_')}.json"
    pytest = ("-m", "pytest", "-q", "-p", "gpu_report", "-p", "no:cacheprovider", "-m", "gpu", GATHER_TESTS)
    into = ("--report", f"{INTO}/{result}", "-k")
    rehearsal = Command((*PRETENDING, *pytest, "-p", "pretending", *into, f"{ON_GPU} and small-2"), result)
    command = Command((*pytest, "--times", str(times), *into, f"{ON_GPU} and large-8"), result)
    return Item(name, value, seconds, command, rehearsal, TESTS, "no failure", "no failure", tool)


def profiled(kernel: str, value: int, seconds: int, sources: tuple[str, ...]) -> Item:
    """Some launches of a kernel of a bench under NVIDIA's profiler, whose report is a text."""
    text, command = f"ncu_{kernel}.txt", called(kernel, QUICK, "ncu")
    chosen = ("--kernel-name", f"{kernel}_kernel", "--launch-count", "2", "--log-file", f"{INTO}/{text}")
    tool = ("ncu", "--clock-control", "none", "--set", "full", *chosen)
    rehearsal = pretended(command)
    return Item(f"ncu {kernel}", value, seconds, command._replace(result=text), rehearsal, sources, tool=tool)


def assembled(value: int, seconds: int) -> Item:
    """The GEMM by torch's assembler."""
    command = called("matmul", QUICK, "ptxas")
    environment = (("TRITON_PTXAS_PATH", f"{TORCH}/bin/ptxas"), ("TRITON_CACHE_DIR", f"{INTO}/logs/cache"))
    return Item(
        "matmul by torch's ptxas", value, seconds, command, pretended(command), GEMM, prediction="0 to 3 % more",
        environment=environment,
    )  # fmt: skip


GATES = called("gates", ())
STEPS = called("pretrain", ("--steps", "60", "--profile"))

SHORT = (
    quick("ceilings", 100, 8, ("bench/ceilings.py", "harness/timing.py"), prediction="4.2 TB/s; 690 TFLOP/s"),
    Item("gates", 450, 45, GATES, pretended(GATES), ALL, "all of them", "all of them"),
    quick("constants", 108, 12, CONSTANTS, prediction="0.9; 0.2; 28 us"),
    quick("matmul_reduce_scatter", 200, 25, SCATTER, TAX, "0.8 to 0.95"),
    quick("all_gather_matmul", 195, 25, GATHER, TAX, "0.95 to 0.98"),
    quick("matmul_all_reduce", 190, 25, ALL_REDUCE, TAX, "0.6 to 0.85"),
    Item(
        "pretrain for 60 steps", 420, 60, STEPS, called("pretrain", ("--steps", "4", "--profile")), PRETRAIN,
        "480,000; 63,000", "530,000; 66,000",
    ),
    quick("matmul", 228, 35, GEMM, "0.95 of cuBLAS", "0.88"),
    assembled(224, 35),
    gather("memcheck", 190, 30, 1, ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3")),
    gather("gather 20 times", 245, 40, 20),
    tests("tests of fused kernels", 480, 80, "--fused", "tests/distributed/test_symmetric.py"),
    quick("grouped_matmul", 170, 30, GROUPED, prediction="0.9 of torch's"),
    quick("all_gather_grouped_matmul", 165, 30, GATHERED, prediction="0.9 of the GEMM"),
    quick("quantized_matmul", 81, 15, QUANTIZED, "1.3 of bfloat16", "1.35 to 1.6; 0.8 to 0.9 of that"),
    quick("route", 43, 8, bar=HALF, prediction="0.45 to 0.8"),
    quick("combine", 42, 8, bar=COPY, prediction="0.95"),
    quick("weighted_activation", 41, 8, bar=COPY, prediction="0.95"),
    quick("norm", 75, 15, bar=COPY, prediction="0.8 to 0.9"),
    quick("update", 39, 8, bar=COPY, prediction="0.9"),
    quick("cross_entropy", 57, 12, bar=COPY, prediction="0.7"),
    quick("dropout", 46, 10, bar=COPY, prediction="0.6 to 0.9"),
    quick("activation", 36, 8, bar=COPY, prediction="0.97"),
    quick("rope", 35, 8, bar=COPY, prediction="0.93"),
    profiled("matmul", 80, 20, GEMM),
    profiled("matmul_reduce_scatter", 78, 20, SCATTER),
    quick("layer", 90, 25, LAYER, prediction="620 TFLOP/s, 690 in 4 samples"),
    tests("other tests", 315, 90, "--others", f"{KERNEL_TESTS}/test_philox_kernel.py"),
    # the last of the short ones: its kernel, whose warps have tasks of their own, is in no model and may hang
    quick("matmul_trials", 60, 20, TRIALS, prediction="1.01 to 1.02; 1.02 to 1.05"),
)  # fmt: skip
FUSED_GEMMS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
GEMMS = (*FUSED_GEMMS, "grouped_matmul", "all_gather_grouped_matmul", "quantized_matmul")
MEMORY_BOUND = ("norm", "activation", "rope", "dropout", "cross_entropy", "update")
OF_EXPERTS = ("route", "weighted_activation", "combine")
# seconds of a whole bench, by the item of its short one
LONG = {
    **{"matmul": 120, "pretrain for 60 steps": 200, "layer": 180},
    **dict.fromkeys(GEMMS, 90),
    **dict.fromkeys((*MEMORY_BOUND, *OF_EXPERTS), 60),
}
ITEMS = (*SHORT, *(whole(item, LONG[item.name]) for item in SHORT if item.name in LONG))
