"""How fast is a training step beside plain PyTorch, two ranks beside two threads, shared memory beside gloo?

Belongs here: shapes, inputs, what is timed, what must agree, which ratios are required.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from harness.ranks import Calls, Ranks
from harness.ratios import Row, compared, ratio_bench
from harness.timing import interleave, timed
from tpformer.config import OptimizerSection
from tpformer.distributed import all_gather, all_reduce, build_mesh, reduce_scatter, use_backend
from tpformer.kernels.activation.reference import activation_forward
from tpformer.kernels.finish import Norm
from tpformer.kernels.norm.reference import norm_forward
from tpformer.models import GPT, GPTConfig
from tpformer.processes.cpu import keep_freed_memory
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import StepResult, train_step

from .plain import check_against_plain, plain_from, plain_step, require_close

THREADS = 2  # of one process; two ranks get one each
OPTIONS = OptimizerSection()
# the same model in plain PyTorch; with one projection for q, k and v; with tpformer's allocator settings
PLAIN, PLAIN_FUSED, PLAIN_PREPARED = "PyTorch", "PyTorch, fused qkv", "PyTorch, keep_freed_memory"
OURS, OURS_MESH = "tpformer", "tpformer, mesh of 1"  # DTensor parameters on a mesh, as those of several ranks are
TP2, TP2_SINGLE = "tpformer, 2 ranks", "2 ranks, 1 sample at a time"
NORMS, ACTIVATIONS = "norm outputs", "activation outputs"
SHARED, GLOO = "shared memory", "gloo"
STEP, REBUILD, TP = "training step", "step if not rebuilt", "tensor parallel"
TOLERANCE = 1e-9  # float64
REQUIRED = 0.95  # of plain PyTorch, which keeps what is rebuilt here


@dataclass(frozen=True)
class Shape:
    """A model, samples per step, and steps per round; steps of all providers are timed in turn."""

    config: GPTConfig
    samples: int
    steps: int

    def __str__(self) -> str:
        c = self.config
        return f"{c.n_layers} layers of {c.hidden_size}, {self.samples} x {c.seq_length}"

    def batch(self) -> Tensor:
        """The samples of every step."""
        size = (self.samples, self.config.seq_length + 1)
        return torch.randint(self.config.vocab_size, size, generator=torch.Generator().manual_seed(0))


def gpt(n_layers: int, hidden_size: int, seq_length: int = 256) -> GPTConfig:
    return GPTConfig(vocab_size=257, seq_length=seq_length, n_layers=n_layers, hidden_size=hidden_size, n_heads=4)


QUICK_SHAPES = (Shape(gpt(2, 64, seq_length=64), samples=2, steps=2),)
SHAPES = (Shape(gpt(4, 256), samples=8, steps=5), Shape(gpt(6, 512), samples=4, steps=3))
# bytes of the whole tensor (gathered, to be scattered, or to be reduced) -> repetitions per timed sample
QUICK_SIZES = {2**12: 20, 2**20: 5}
SIZES = {2**12: 1000, 2**16: 500, 2**20: 100, 2**24: 10}
COLLECTIVES = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def ours(
    shape: Shape, tp: int | None, dtype: torch.dtype = torch.float32, microbatches: int = 1
) -> Callable[[], StepResult]:
    """tpformer's training step, which returns loss and gradient norm; tp None: without a mesh."""
    mesh = None if tp is None else build_mesh("cpu", tensor_parallel=tp)
    model = GPT(shape.config, tp=None if mesh is None else mesh["tp"], dtype=dtype)
    size = shape.samples // microbatches
    whole = ModelParts([model], mesh=mesh, microbatch_size=size, n_microbatches=microbatches, dtype=dtype)
    optimizers, batch = [build_optimizer(model, OPTIONS)], shape.batch()
    options: dict = {"first_sample": 0, "step": 1, "lr": OPTIONS.lr, "clip_norm": OPTIONS.clip_norm}
    return partial(train_step, whole, optimizers, batch, **options)


def plain(shape: Shape, fused_qkv: bool) -> Callable[[], Tensor]:
    """Plain PyTorch's training step."""
    model = plain_from(GPT(shape.config), fused_qkv=fused_qkv)
    return partial(plain_step, model, build_optimizer(model, OPTIONS), shape.batch(), OPTIONS.clip_norm)


def training_calls(shape: Shape, tp: int) -> Calls:
    """A rank's timed training steps.

    A single rank also times the model without a mesh, and two ranks with one sample in a microbatch. A rank times
    apart from them what a step's backward computes again: norms and activations, as many as in a step.
    """
    keep_freed_memory()
    steps: dict[str, Callable[[], object]] = {OURS_MESH: ours(shape, tp)}
    if tp == 1:
        steps |= {OURS: ours(shape, None)}
    else:
        steps |= {TP2_SINGLE: ours(shape, tp, microbatches=shape.samples)}
    config = shape.config
    rows = torch.randn(shape.samples * config.seq_length, config.hidden_size)
    hidden = torch.randn(len(rows), config.ffn_size)
    norm = Norm(config.norm, torch.ones(config.hidden_size), torch.zeros(config.hidden_size), config.norm_eps)
    steps[NORMS] = partial(repeat, 2 * config.n_layers + 1, partial(norm_forward, rows, norm))
    steps[ACTIVATIONS] = partial(repeat, config.n_layers, partial(activation_forward, hidden, config.activation))
    return {name: timed(step, 1) for name, step in steps.items()}


def repeat(times: int, call: Callable[[], object]) -> None:
    for _ in range(times):
        call()


def plain_calls(shape: Shape, prepared: bool) -> Calls:
    """Plain PyTorch's timed training steps; prepared: with the allocator settings that tpformer's runs have."""
    if prepared:
        keep_freed_memory()
        return {PLAIN_PREPARED: timed(plain(shape, False), 1)}
    return {name: timed(plain(shape, fused), 1) for name, fused in ((PLAIN, False), (PLAIN_FUSED, True))}


def gate_calls(shape: Shape, tp: int) -> Calls:
    """A rank's loss and gradient norm in float64 (of the first step: the call updates the model)."""
    step = ours(shape, tp, torch.float64)
    return {"gate": lambda: list(step()[:2])}


def collective_calls(sizes: dict[int, int]) -> Calls:
    """A rank's timed collectives over both backends, and whether they give the same result."""
    groups = {SHARED: dist.new_group(), GLOO: dist.new_group()}
    use_backend(groups[SHARED], "shared")
    use_backend(groups[GLOO], "gloo")
    calls: dict[str, Callable] = {}
    for (name, collective), (size, repetitions) in product(COLLECTIVES.items(), sizes.items()):
        nbytes = size // dist.get_world_size() if name == "all_gather" else size
        x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        both = {backend: partial(collective, x, group) for backend, group in groups.items()}
        calls[f"{name} {size} gate"] = lambda both=both: torch.equal(both[SHARED](), both[GLOO]())
        calls |= {f"{name} {size} {backend}": timed(call, repetitions) for backend, call in both.items()}
    return calls


def check(quick: bool) -> None:
    for shape in QUICK_SHAPES if quick else (*QUICK_SHAPES, *SHAPES):
        model = GPT(shape.config, dtype=torch.float64)
        expected = check_against_plain(model, shape.batch(), OPTIONS.clip_norm, TOLERANCE)
        for tp in (1, 2):
            with Ranks(tp, THREADS // tp, gate_calls, shape, tp) as ranks:
                for result in ranks.call("gate"):
                    found = torch.tensor(result, dtype=torch.float64)
                    require_close(f"loss and norm of {shape}, tp {tp}", found, expected, TOLERANCE)
    sizes = QUICK_SIZES if quick else QUICK_SIZES | SIZES
    with Ranks(2, 1, collective_calls, sizes) as ranks:
        for name, size in product(COLLECTIVES, sizes):
            if not all(ranks.call(f"{name} {size} gate")):
                raise AssertionError(f"{name} of {size} bytes: {SHARED} and {GLOO} differ")


def step_rows(shape: Shape, rounds: int) -> list[Row]:
    """Steps of every provider, our steps less what they rebuild, and steps of two ranks beside one."""
    with (
        Ranks(1, THREADS, training_calls, shape, 1) as alone,
        Ranks(1, THREADS, plain_calls, shape, False) as torch_alone,
        Ranks(1, THREADS, plain_calls, shape, True) as torch_prepared,
        Ranks(2, THREADS // 2, training_calls, shape, 2) as pair,
    ):
        where = {PLAIN: torch_alone, OURS: alone, PLAIN_FUSED: torch_alone, OURS_MESH: alone}
        where[PLAIN_PREPARED] = torch_prepared
        one = interleave({name: partial(ranks.sample, name) for name, ranks in where.items()}, rounds, shape.steps)
        again = interleave({name: partial(alone.sample, name) for name in (NORMS, ACTIVATIONS)}, rounds, shape.steps)
        pairs = {OURS_MESH: partial(alone.sample, OURS_MESH), TP2: partial(pair.sample, OURS_MESH)}
        pairs[TP2_SINGLE] = partial(pair.sample, TP2_SINGLE)
        two = interleave(pairs, rounds, shape.steps)
    without = {
        name: [step - rebuilt for step, rebuilt in zip(one[OURS], seconds, strict=True)]
        for name, seconds in again.items()
    }
    options: dict = {"unit": "tokens/s", "amount": shape.samples * shape.config.seq_length}
    providers = ((OURS, PLAIN, REQUIRED), (OURS_MESH, PLAIN), (PLAIN_FUSED, PLAIN), (PLAIN_PREPARED, PLAIN))
    rebuilds = ((NORMS, OURS), (ACTIVATIONS, OURS))
    return [
        *compared(STEP, shape, one, providers, **options),
        *compared(REBUILD, shape, one | without, rebuilds, **options),
        *compared(TP, shape, two, [(TP2, OURS_MESH, 0.8), (TP2_SINGLE, TP2)], **options),
    ]


def collective_rows(sizes: dict[int, int], rounds: int) -> list[Row]:
    rows = []
    with Ranks(2, 1, collective_calls, sizes) as ranks:
        for name, size in product(COLLECTIVES, sizes):
            samples = {backend: partial(ranks.sample, f"{name} {size} {backend}") for backend in (SHARED, GLOO)}
            shape = f"{size // 1024} KiB" if size < 2**20 else f"{size // 2**20} MiB"
            pair = (SHARED, GLOO, 5.0 if size == 2**20 else None)
            rows += compared(f"{name}, 2 ranks", shape, interleave(samples, rounds), [pair])
    return rows


def rows(quick: bool) -> list[Row]:
    rounds = 2 if quick else 7
    found = [row for shape in (QUICK_SHAPES if quick else SHAPES) for row in step_rows(shape, rounds)]
    found.sort(key=lambda row: (STEP, REBUILD, TP).index(row["case"]))
    return found + collective_rows(QUICK_SIZES if quick else SIZES, rounds)


BENCH = ratio_bench(
    rows,
    name="cpu",
    description="steps against plain PyTorch, what they rebuild, 2 ranks against 2 threads, shared memory against gloo",
    check=check,
)
