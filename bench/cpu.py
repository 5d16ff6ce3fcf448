"""The bench `cpu`: training steps against plain PyTorch and against tensor parallelism, shared memory against gloo.

Belongs here: shapes, inputs, providers, what must agree, which ratios are required.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.kernels.activation.reference import activation_forward
from tpformer.kernels.finish import Norm
from tpformer.kernels.norm.reference import norm_forward
from tpformer.models import GPT, GPTConfig
from tpformer.processes.cpu import keep_freed_memory
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import StepResult, train_step

from .baseline import check_against_plain, plain_from, plain_step, require_close
from .cpu_collectives import check_collectives, collective_rows
from .ranks import Calls, Ranks
from .runner import Bench, Row, make_row
from .timing import compare, interleave, timed

THREADS = 2  # of one process; two ranks get one each
OPTIONS = OptimizerSection()
# the model as ours, the same with one projection for q, k and v, the same with tpformer's allocator settings
PLAIN, PLAIN_FUSED, PLAIN_PREPARED = "PyTorch", "PyTorch, fused qkv", "PyTorch, keep_freed_memory"
OURS, OURS_MESH = "tpformer", "tpformer, mesh of 1"  # DTensor parameters on a mesh, as the trainer builds it
TP2 = "tpformer, 2 ranks"
STEP, REBUILD, TP = "training step", "step if not rebuilt", "tensor parallel"
TOLERANCE = 1e-9  # float64
REQUIRED = 0.95  # of plain PyTorch, which keeps what is rebuilt here


@dataclass(frozen=True)
class Shape:
    """A model, samples per step, and steps per round, each timed in turn with the other providers'."""

    config: GPTConfig
    samples: int
    steps: int

    def __str__(self) -> str:
        c = self.config
        return f"{c.n_layers} layers of {c.hidden_size}, {self.samples} x {c.seq_length}"

    def batch(self) -> Tensor:
        size = (self.samples, self.config.seq_length + 1)
        return torch.randint(self.config.vocab_size, size, generator=torch.Generator().manual_seed(0))


def gpt(n_layers: int, hidden_size: int, seq_length: int = 256) -> GPTConfig:
    return GPTConfig(vocab_size=257, seq_length=seq_length, n_layers=n_layers, hidden_size=hidden_size, n_heads=4)


QUICK_SHAPES = (Shape(gpt(2, 64, seq_length=64), samples=2, steps=2),)
SHAPES = (Shape(gpt(4, 256), samples=8, steps=5), Shape(gpt(6, 512), samples=4, steps=3))


def ours(shape: Shape, tp: int | None, dtype: torch.dtype = torch.float32) -> Callable[[], StepResult]:
    """tpformer's training step, which returns loss and gradient norm; tp None: without a mesh."""
    mesh = None if tp is None else build_mesh("cpu", tensor_parallel=tp)
    model = GPT(shape.config, tp=None if mesh is None else mesh["tp"], dtype=dtype)
    whole = ModelParts([model], mesh=mesh, microbatch_size=shape.samples, dtype=dtype)
    optimizers, batch = [build_optimizer(model, OPTIONS)], shape.batch()
    options: dict = {"first_sample": 0, "step": 1, "lr": OPTIONS.lr, "clip_norm": OPTIONS.clip_norm}
    return partial(train_step, whole, optimizers, batch, **options)


def plain(shape: Shape, fused_qkv: bool) -> Callable[[], Tensor]:
    model = plain_from(GPT(shape.config), fused_qkv=fused_qkv)
    return partial(plain_step, model, build_optimizer(model, OPTIONS), shape.batch(), OPTIONS.clip_norm)


def training_calls(shape: Shape, tp: int) -> Calls:
    """A rank's timed training steps, set up as the trainer does; a single rank has the model without a mesh too."""
    keep_freed_memory()
    steps: dict[str, Callable[[], object]] = {OURS_MESH: ours(shape, tp)}
    if tp == 1:
        steps |= {OURS: ours(shape, None)}
    return {name: timed(step, 1) for name, step in (steps | rebuild_calls(shape)).items()}


def rebuild_calls(shape: Shape) -> dict[str, Callable[[], object]]:
    """What a step's backward makes again instead of keeping it, each as passes of their own, as often as in a step."""
    config = shape.config
    rows = torch.randn(shape.samples * config.seq_length, config.hidden_size)
    hidden = torch.randn(len(rows), config.ffn_size)
    norm = Norm(config.norm, torch.ones(config.hidden_size), torch.zeros(config.hidden_size), config.norm_eps)

    def norms() -> None:
        for _ in range(2 * config.n_layers + 1):
            norm_forward(rows, norm)

    def activations() -> None:
        for _ in range(config.n_layers):
            activation_forward(hidden, config.activation)

    return {"norm outputs": norms, "activation outputs": activations}


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


def check() -> None:
    for shape in (*QUICK_SHAPES, *SHAPES):
        model = GPT(shape.config, dtype=torch.float64)
        expected = check_against_plain(model, shape.batch(), OPTIONS.clip_norm, TOLERANCE)
        for tp in (1, 2):
            with Ranks(tp, THREADS // tp, gate_calls, shape, tp) as ranks:
                for result in ranks.call("gate"):
                    require_close(
                        f"loss and norm of {shape}, tp {tp}",
                        torch.tensor(result, dtype=torch.float64),
                        expected,
                        TOLERANCE,
                    )
    check_collectives()


def step_rows(shape: Shape, rounds: int) -> list[Row]:
    with (
        Ranks(1, THREADS, training_calls, shape, 1) as alone,
        Ranks(1, THREADS, plain_calls, shape, False) as torch_alone,
        Ranks(1, THREADS, plain_calls, shape, True) as torch_prepared,
        Ranks(2, THREADS // 2, training_calls, shape, 2) as pair,
    ):
        where = {PLAIN: torch_alone, OURS: alone, PLAIN_FUSED: torch_alone, OURS_MESH: alone}
        where[PLAIN_PREPARED] = torch_prepared
        one = interleave({name: partial(ranks.sample, name) for name, ranks in where.items()}, rounds, shape.steps)
        made_again = {name: partial(alone.sample, name) for name in rebuild_calls(shape)}
        again = interleave(made_again, rounds, shape.steps)
        pairs = {OURS_MESH: partial(alone.sample, OURS_MESH), TP2: partial(pair.sample, OURS_MESH)}
        two = interleave(pairs, rounds, shape.steps)
    common: dict = {"shape": str(shape), "unit": "tokens/s"}
    common["convert"] = lambda seconds: shape.samples * shape.config.seq_length / seconds
    rows = []
    for name, bar in ((OURS, REQUIRED), (OURS_MESH, None), (PLAIN_FUSED, None), (PLAIN_PREPARED, None)):
        comparison = compare(one[name], one[PLAIN])
        rows.append(make_row(case=STEP, provider=name, baseline=PLAIN, comparison=comparison, bar=bar, **common))
    for name, seconds in again.items():
        without = [step - rebuild for step, rebuild in zip(one[OURS], seconds, strict=True)]
        comparison = compare(without, one[OURS])
        rows.append(make_row(case=REBUILD, provider=name, baseline=OURS, comparison=comparison, **common))
    comparison = compare(two[TP2], two[OURS_MESH])
    rows.append(make_row(case=TP, provider=TP2, baseline=OURS_MESH, comparison=comparison, bar=0.8, **common))
    return rows


def run(quick: bool) -> list[Row]:
    rounds = 2 if quick else 7
    rows = [row for shape in (QUICK_SHAPES if quick else SHAPES) for row in step_rows(shape, rounds)]
    rows.sort(key=lambda row: (STEP, REBUILD, TP).index(row["case"]))
    return rows + collective_rows(quick, rounds)


BENCH = Bench(
    name="cpu",
    description="steps against plain PyTorch, what they rebuild, 2 ranks against 2 threads, shared memory against gloo",
    device="cpu",
    check=check,
    run=run,
)
