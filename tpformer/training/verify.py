"""`tpformer verify`: compare two steps of a configuration in its layout with two steps in one process, in float64.

Belongs here: the two runs, what is compared and how closely, and whether there is memory for it. The steps themselves
are training's own.
"""

import dataclasses
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tpformer.config import DataSection, OptimizerSection, RunConfig, keep_text
from tpformer.distributed.dtensor import full_tensor
from tpformer.distributed.mesh import close_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT
from tpformer.parallel import Layout, exchange_named, judge

from .deciding import decides
from .model import ModelParts
from .optimizer import build_optimizers
from .resolve import resolve, with_end_of_document
from .schedules import learning_rate
from .setup import build_model, device_type, group_timeout, join_ranks, open_data, run_mesh, separator
from .source import open_source
from .step import StepResult, batch, train_step

STEPS, BOUND = 2, 1e-9
ITEM_BYTES = 8  # of a number in float64
PROCESS_BYTES = 250 * 2**20  # an interpreter with torch, without the memory that ranks share
RANDOM = "random tokens"


class Difference(NamedTuple):
    """The largest |actual - expected| / max(|expected|, floor_of), and the name of its parameter."""

    value: float
    parameter: str


class Verified(NamedTuple):
    """What was compared.

    losses, norms: for each step (in the layout, in one process), from the rank that differs most.
    gradients, parameters: the largest differences; buffers, such as routers' biases, are among the parameters.
    """

    losses: list[tuple[float, float]]
    norms: list[tuple[float, float]]
    gradients: Difference
    parameters: Difference

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than BOUND."""
        pairs = [*self.losses, *self.norms]
        return all(value <= BOUND for value in (*map(relative, pairs), self.gradients.value, self.parameters.value))


def relative(pair: tuple[float, float]) -> float:
    """|actual / expected - 1|, or |actual| if expected is 0. Infinite if either is not finite."""
    actual, expected = pair
    difference = abs(actual - expected) / abs(expected) if expected else abs(actual)
    return difference if math.isfinite(difference) else math.inf


def verify_config(config: RunConfig) -> RunConfig:
    """The configuration to verify: in float64, on the CPU unless it names a device, with the vocabulary filled in.

    If a training dataset does not exist, data.train becomes RANDOM. ValueError if the vocabulary is unknown then.
    With data.mask a random half of such tokens are targets, and with data.separate_documents one in eight ends a
    document. Activations are not packed, which only bfloat16 ones can be, and which changes no bits. ValueError for an
    exchange whose run is another.
    """
    exchange = exchange_named(config.parallel.exchange)
    if exchange.changes_losses or exchange.takes_steps:
        raise ValueError(
            f"parallel.exchange={config.parallel.exchange!r} changes the run on purpose, or how its steps are taken: "
            f"verify the layout without it"
        )
    train = dataclasses.replace(config.train, dtype="float64", device=config.train.device or "cpu")
    data = dataclasses.replace(config.data, valid=())
    unpacked = keep_text([way._replace(pack=False) for way in config.parallel.kept(config.model.n_layers)])
    parallel = dataclasses.replace(
        config.parallel,
        pack_activations=False,
        pack_layers="",
        keep=unpacked if config.parallel.keep else "",
        memory_budget="",
    )
    config = dataclasses.replace(config, train=train, data=data, parallel=parallel)
    missing = [prefix for prefix in data.train if not all(Path(f"{prefix}{end}").is_file() for end in (".bin", ".idx"))]
    if data.train and not missing:
        return resolve(config)
    size = config.model.known_vocab_size
    if size is None:
        what = f"{missing[0]}.bin and .idx do not exist" if missing else "data.train names no dataset"
        raise ValueError(f"{what}, so tokens are random and the vocabulary is unknown: set model.vocab_size")
    model = dataclasses.replace(config.model, vocab_size=size)
    end = data.end_of_document
    end = size - 1 if data.separate_documents and end is None else end  # of random tokens any id may end a document
    random = DataSection(
        train=(RANDOM,), mask=data.mask, separate_documents=data.separate_documents, end_of_document=end
    )
    return with_end_of_document(dataclasses.replace(config, model=model, data=random))


# memory


def available_bytes(device: str) -> int:
    """Bytes that can still be allocated: on the GPU, or else on this machine, at most this container's limit."""
    if device == "cuda":
        # a fork asks, because CUDA started in this process could not be used in its ranks, which are forks, too
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
            return executor.submit(torch.cuda.mem_get_info).result()[0]
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text))
    return available


def needed_bytes(config: RunConfig) -> tuple[int, int]:
    """The least bytes on rank 0's machine (or GPU): (for the run in one process, for the layout's ranks there)."""
    model, layout = config.model, config.parallel
    tokens = config.microbatch_size * model.seq_length
    kept = ITEM_BYTES * tokens * (sum(map(model.kept_features, range(model.n_layers))) + (model.vocab_size or 0))
    held = ITEM_BYTES * (2 + config.optimizer.matrix_moments) * model.n_parameters  # parameters, gradients, moments
    one = held + kept
    here = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size)) if config.train.device == "cpu" else 1
    states = held * layout.replicas * here // layout.world_size
    return one, states + (here * PROCESS_BYTES if config.train.device == "cpu" else 0)


def check_memory(config: RunConfig) -> None:
    """ValueError, with the numbers and the remedy, if there is no memory for both runs."""
    (one, ranks), available = needed_bytes(config), available_bytes(device_type(config))
    if one + ranks > available:
        raise ValueError(
            f"verify needs at least {(one + ranks) / 1e9:.1f} GB here: {one / 1e9:.1f} GB for "
            f"{config.model.n_parameters / 1e6:.1f}M parameters in one process in float64, and {ranks / 1e9:.1f} GB "
            f"for {config.parallel.world_size} ranks; {available / 1e9:.1f} GB are available. What can go wrong in a "
            f"layout does not depend on the size: make the model smaller (--model.n-layers "
            f"{config.parallel.n_stages} is the least for this pipeline, --model.hidden-size, --model.vocab-size, "
            f"--model.seq-length), or use fewer ranks (--parallel.data-parallel-replicate, ...)"
        )


# the two runs


class Run:
    """One of the two runs: a model, its optimizers, and its samples of each step."""

    def __init__(self, config: RunConfig, model: ModelParts, samples: Callable[[int, int], Tensor]) -> None:
        self.config, self.model, self.samples = config, model, samples
        self.optimizers = build_optimizers(model, config.optimizer)
        self.named = [part.state_dict(keep_vars=True) for part in model.parts]
        self.device = torch.device(device_type(config))

    def _batch(self, step: int) -> tuple[Tensor, int]:
        size = self.config.train.global_batch_size  # of every step: what a ramp ends with
        first, share = self.model.own_samples((step - 1) * size, size)
        return self.samples(first, share).to(self.device), first

    def gradients(self, step: int) -> None:
        """Fill .grad with a step's gradients, before clipping. Collective over the run's ranks."""
        rows, first = self._batch(step)
        self.model.gradients(rows, first_sample=first)

    def train(self, step: int) -> StepResult:
        """One optimizer step, as the trainer does it. Collective over the run's ranks."""
        rows, first = self._batch(step)
        section = self.config.optimizer
        return train_step(
            self.model,
            self.optimizers,
            rows,
            first_sample=first,
            lr=learning_rate(step, self.config.train.steps, section),
            clip_norm=section.clip_norm,
        )

    def tensors(self, name: str) -> list[Tensor]:
        """This rank's parameters, or buffers, of that name: none, one, or two (a V-shaped pipeline's tied tables)."""
        return [named[name] for named in self.named if name in named]


def one_process(config: RunConfig, device: str) -> ModelParts:
    """A configuration's model without mesh, process groups, FSDP2 or recomputation. Device "meta" gives only shapes."""
    model = GPT(
        config.model.architecture,
        tp=TensorParallel(precision=config.train.precision),
        label_smoothing=config.train.label_smoothing,
        z_loss=config.train.z_loss,
        balance_loss=config.train.balance_loss,
        seed=config.train.seed,
        device=device,
        dtype=torch.float64,
    )
    return ModelParts(
        [model],
        Layout(),
        microbatch_size=config.microbatch_size,
        dtype=torch.float64,
        router_bias_rate=config.train.router_bias_rate,
        end_of_document=separator(config),
    )


def token_samples(config: RunConfig) -> Callable[[int, int], Tensor]:
    """A function of (first, count) that returns these global samples, int64 (count, seq_length + 1).

    They are the data's, or random where there is none.
    """
    if config.data.train != (RANDOM,):
        return partial(batch, open_data(config).train)
    vocabulary: int = config.model.vocab_size  # type: ignore[assignment]
    low, length = -vocabulary if config.data.mask else 0, config.model.seq_length + 1  # -1 - id is no target
    end = separator(config)

    def one(generator: torch.Generator) -> Tensor:
        tokens = torch.randint(low, vocabulary, (length,), generator=generator)
        return tokens if end is None else tokens.where(torch.rand(length, generator=generator) > 1 / 8, end)

    def draw(first: int, count: int) -> Tensor:
        return torch.stack([one(torch.Generator().manual_seed(config.train.seed + first + i)) for i in range(count)])

    return draw


def floor_of(config: RunConfig) -> float:
    """What a number counts as that is smaller: the learning rate, which is about as large as a step; but the default
    one at least, because gradients that cancel are nothing but rounding."""
    return max(config.optimizer.lr, OptimizerSection.lr)


def largest_difference(run: Run, one: Run | None, *, gradients: bool = False) -> Difference:
    """The largest difference between the runs, over all ranks, in parameters and buffers, or in gradients. Collective.

    one: the one-process run on rank 0, None on other ranks. Memory: two whole parameters. Communication for each
    parameter: an all-gather over its mesh and a broadcast over the world.
    """
    floor, worst = floor_of(run.config), Difference(0.0, "")
    whole = one_process(run.config, "meta").parts[0]
    shapes = {
        name: value.shape for name, value in (whole.named_parameters() if gradients else whole.state_dict().items())
    }
    for name, shape in shapes.items():
        if one is None:
            expected = torch.empty(shape, dtype=torch.float64, device=run.device)
        else:
            held = one.tensors(name)[0]
            expected = (held.grad if gradients else held).detach()
        dist.broadcast(expected, src=0)
        for held in run.tensors(name):
            actual, value = held.grad if gradients else held, math.inf
            if actual is not None:
                actual = full_tensor(actual.detach().to(run.device))
                value = judge.largest_difference(actual, expected, floor=floor)
            worst = max(worst, Difference(value, name))
    return max(judge.from_ranks(worst))


def verify(config: RunConfig) -> Verified:
    """Run a configuration of verify_config both ways and compare. Only rank 0's report counts. Collective.

    Compared are the losses and norms of all ranks in every step, the gradients of step 1 before clipping, and the
    parameters at the end. If ranks hold copies, each copy is compared.
    """
    device = device_type(config)
    join_ranks(device, group_timeout(config), decides("verify", config))
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns about gathering whole tensors
    mesh, samples = run_mesh(config, device), token_samples(config)
    run = Run(config, build_model(config, mesh), samples)
    one = Run(config, one_process(config, device), samples) if dist.get_rank() == 0 else None
    runs = [run] if one is None else [run, one]
    if config.model.init_from is not None:
        source = open_source(config.model.init_from)
        for each in runs:
            source.load(each.model.parts)
    for each in runs:
        each.gradients(1)
    gradients = largest_difference(run, one, gradients=True)
    for optimizer in (optimizer for each in runs for optimizer in each.optimizers):
        optimizer.zero_grad()
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        results = [(float(result.loss), float(result.norm)) for result in (each.train(step) for each in runs)]
        expected_loss, expected_norm = results[-1]
        everywhere = judge.from_ranks(results[0])
        losses.append(max(((loss, expected_loss) for loss, _ in everywhere), key=relative))
        norms.append(max(((norm, expected_norm) for _, norm in everywhere), key=relative))
    parameters = largest_difference(run, one)
    close_mesh(mesh)
    return Verified(losses, norms, gradients, parameters)


def settings_line(config: RunConfig) -> str:
    """Two lines that say what is verified: the layout and the data."""
    plain, layout, world = Layout(), config.parallel, config.parallel.world_size
    names = [field.name for field in dataclasses.fields(Layout)]
    changed = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) != getattr(plain, name)]
    parts, size = config.n_microbatches, config.microbatch_size
    return (
        f"{', '.join(changed) or 'no parallelism'}: {world} {'rank' if world == 1 else 'ranks'}, microbatches "
        f"{parts} x {size}, {config.model.n_parameters / 1e6:.2f}M parameters, float64, {config.train.device}\n"
        f"data: {', '.join(config.data.train)}"
    )


def report_table(report: Verified) -> Table:
    """The report as a table for the console."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("layout", "one process", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest in", no_wrap=True)
    for name, pairs in (("loss", report.losses), ("gradient norm", report.norms)):
        for step, pair in enumerate(pairs, 1):
            table.add_row(f"{name}, step {step}", *(f"{value:.12g}" for value in pair), f"{relative(pair):.1e}", "")
    for name, (value, parameter) in (
        ("gradients, step 1", report.gradients),
        ("parameters at the end", report.parameters),
    ):
        table.add_row(name, "", "", f"{value:.1e}", parameter)
    return table


def verify_rank(config: RunConfig) -> int:
    """Run this rank's part of `tpformer verify`. Returns the exit code: 1 on rank 0 if the runs differ, else 0.

    The process group stays open.
    """
    leader = os.environ.get("RANK", "0") == "0"
    console = Console(width=None if sys.stdout.isatty() else 160, quiet=not leader, markup=False, emoji=False)
    console.print(settings_line(config), highlight=False, soft_wrap=True)
    report = verify(config)
    console.print(report_table(report), highlight=False)
    outcome = (
        "this layout trains as one process does" if report.ok else "THIS LAYOUT DOES NOT TRAIN AS ONE PROCESS DOES"
    )
    limit = f"{BOUND:g}, relative; gradients and parameters relative to max(|p|, {floor_of(config):g})"
    console.print(f"{outcome} (bound {limit})", highlight=False, soft_wrap=True)
    return 0 if report.ok or not leader else 1
