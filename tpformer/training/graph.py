"""A run's step as one CUDA graph: what the host queues for a step is recorded once, and then queued by one call.

Belongs here: which runs have such a step, where a recorded step's inputs and results are, and when it is recorded. What
the device does stays as it is, so numbers do, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.config import FP8, RunConfig
from tpformer.parallel import exchange_named
from tpformer.parallel.zero import uses_fsdp

from .model import ModelParts
from .setup import default_dtype
from .step import LossScaler, StepResult, take_steps
from .updates import LocalUpdate

WARM_UP = 2  # steps before a capture: kernels compile, optimizers make their state, workspaces grow

Step = Callable[..., StepResult]
Capture = Callable[[Callable[[], StepResult]], tuple[Callable[[], object], StepResult]]
"""Records what a function queues and does not do it: (what does it at every call, where its results are)."""


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Why the steps of a resolved run on this device, cpu or cuda, are not CUDA graphs; None if they are."""
    layout, log, asked = config.parallel, config.log, config.train.cuda_graph
    if asked == "off":
        return 'train.cuda_graph = "off"'
    tensor_parallel = layout.tensor_parallel > 1
    obstacles = {
        "there is no GPU": device != "cuda",
        "a pipeline's schedule is the host's": layout.pipeline_parallel > 1,
        "the steps of parallel.exchange are the host's": exchange_named(layout.exchange).takes_steps,
        "FSDP2 gathers and frees parameters from the host": uses_fsdp(layout, default_dtype(config, device)),
        "with packed activations the host asks whether values overflowed": layout.packs,
        "the host asks how many rows experts get": config.model.n_experts is not None
        and (tensor_parallel or layout.expert_parallel is not None),
        "with data.separate_documents the host asks where documents begin": config.data.separate_documents,
        "with offloaded activations the host owns memory of the step": layout.offloads,
        "a recorded step holds its memory beside what parallel.memory_budget counts": bool(layout.memory_budget),
        'only parallel.transport = "fused" counts its epochs on the device': tensor_parallel
        and layout.transport != "fused",
        "in FP8 a collective, which counts on the host, adds gradients of shared key-value heads": tensor_parallel
        and config.train.precision == FP8
        and config.model.kv_heads % layout.tensor_parallel != 0,
    }
    if asked == "auto":  # what a graph can do, but would make slower or larger
        obstacles |= {
            "in a graph copy engines cannot gather": tensor_parallel,
            "steps of log.norm_interval and log.noise_interval need as much memory beside it": log.norm_interval > 0
            or log.noise_interval > 0,
        }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def check_graph(config: RunConfig, device: str) -> None:
    """ValueError if a resolved run asks for CUDA graphs and cannot have them."""
    if config.train.cuda_graph == "on" and (reason := why_no_graph(config, device)):
        raise ValueError(f'train.cuda_graph = "on", but {reason}: set "auto", which captures where it can')


def in_words(config: RunConfig, device: str) -> str:
    """A line for the log: what a step is."""
    reason = why_no_graph(config, device)
    return "a step is one CUDA graph" if reason is None else f"a step is not a CUDA graph: {reason}"


def build_steps(
    config: RunConfig,
    device: str,
    model: ModelParts,
    optimizers: Sequence[LocalUpdate],
    report: Callable[[str], object] = print,
) -> Step:
    """What takes the steps of a resolved run: take_steps', or a graph of them. report: is told if a capture fails."""
    steps = take_steps(model, optimizers)
    if model.exchange.takes_steps or why_no_graph(config, device) is not None:
        return steps
    return StepGraph(steps, model, optimizers, strict=config.train.cuda_graph == "on", report=report)


def captured(step: Callable[[], StepResult]) -> tuple[Callable[[], object], StepResult]:
    """A Capture by CUDA."""
    graph = torch.cuda.CUDAGraph()
    # This gives back what the allocator has kept of steps before. Threads that write a checkpoint, or watch NCCL, may
    # ask the driver anything meanwhile: only what this thread asks is judged.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    return graph.replay, results


class Recorded(NamedTuple):
    """A step that can be replayed: in memory that it reads, what differs from step to step; and its results."""

    batch: Tensor
    first_sample: Tensor
    """int64 ()."""
    lr: Tensor
    """float64 ()."""
    replay: Callable[[], object]
    results: StepResult


class StepGraph:
    """Takes steps as train_step does, each by one call to the driver, from the third one of a shape on.

    A batch of another shape, or another clip_norm, is another graph, in place of the one before. A step that is watched
    is taken without it.

    step: train_step of one rank, or of tensor-parallel ranks, without its first two arguments. strict: whether a
    capture that fails is a RuntimeError; otherwise `report` hears of it, and steps go on without a graph.
    Memory: that of a step's activations and gradients, which nothing else can have while the graph exists.
    Communicates: what the step does.
    """

    def __init__(
        self,
        step: Step,
        model: ModelParts,
        optimizers: Sequence[LocalUpdate],
        *,
        strict: bool = False,
        report: Callable[[str], object] = print,
        capture: Capture = captured,
    ) -> None:
        self.step, self.model, self.optimizers = step, model, optimizers
        self.strict, self.report, self.capture = strict, report, capture
        self._of: tuple[object, ...] = ()  # what the graph, or the warm-up for it, is of
        self._taken = 0
        self._recorded: Recorded | None = None
        self._broken = False

    def __call__(
        self,
        batch: Tensor,
        *,
        first_sample: int,
        lr: float,
        clip_norm: float,
        scaler: LossScaler | None = None,
        watch: object = None,
    ) -> StepResult:
        """A step, as train_step's. Results are copies, which later steps leave as they are."""
        options = {"clip_norm": clip_norm, "scaler": scaler}
        eager = partial(self.step, batch, first_sample=first_sample, lr=lr, **options)
        if watch is not None or self._broken:
            return eager(watch=watch)
        of = (batch.shape, clip_norm, scaler)
        if of != self._of:
            self._of, self._taken, self._recorded = of, 0, None
        self._taken += 1
        if self._taken <= WARM_UP:
            return eager()
        self._recorded = self._recorded or self._record(batch, options)
        return eager() if self._recorded is None else self._play(self._recorded, batch, first_sample, lr)

    def _record(self, batch: Tensor, options: dict) -> Recorded | None:
        """Capture a step of this shape, which does nothing yet. None if that fails, and then of every shape."""
        batch = batch.clone()
        first = torch.zeros((), dtype=torch.int64, device=batch.device)
        rate = torch.zeros((), dtype=torch.float64, device=batch.device)
        self._refresh()
        try:
            return Recorded(
                batch, first, rate, *self.capture(partial(self.step, batch, first_sample=first, lr=rate, **options))
            )
        except RuntimeError as error:
            self.model.drop_gradients()
            if self.strict:
                raise
            self._broken = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.report(f'steps go on without a CUDA graph, as a capture failed: {reason} (train.cuda_graph = "off")')
            return None

    def _play(self, recorded: Recorded, batch: Tensor, first_sample: int, lr: float) -> StepResult:
        """Give the recorded step its inputs, and let it run."""
        self._refresh()
        recorded.batch.copy_(batch)
        recorded.first_sample.fill_(first_sample)
        recorded.lr.fill_(lr)
        self._set_rate(lr)
        recorded.replay()
        return StepResult(*(None if value is None else value.clone() for value in recorded.results))

    def _refresh(self) -> None:
        """Round masters that somebody has written since the last step: a graph has no host that would look."""
        if self.model.masters is not None:
            self.model.masters.refresh()

    def _set_rate(self, lr: float) -> None:
        """Write lr into all optimizers' groups as a number, as their own steps leave it; a graph reads a tensor."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
