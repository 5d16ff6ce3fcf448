"""What a run says of itself in words and shares: the first lines of its log, and how much of its devices it uses."""

from collections.abc import Callable

import torch

from tpformer.config import FP8, Layout, RunConfig
from tpformer.config.unused import unused_settings
from tpformer.kernels.cost import machine_for

from .experts import router_notice
from .graph import in_words
from .metrics import rounded
from .schedules import warmup_notice
from .separation import separation_notice
from .setup import device_type

RESERVED_APART = 0.03  # of what was predicted: a budget is a promise up to this


def mfu(config: RunConfig, device: torch.device, tokens_per_second: float) -> dict[str, float]:
    """{"mfu": model FLOP/s as a share of all ranks' dense bf16 peak}; {} on a device whose peak is not known."""
    machine = machine_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if machine is None:
        return {}
    peak = machine.peak_flops * config.parallel.world_size
    return {"mfu": rounded(config.model.flops_per_token * tokens_per_second / peak)}


def summary(config: RunConfig, device: torch.device, step: int) -> str:
    """The log's first line: size, layout, device, batch, and the step after which the run begins."""
    model, parallel, train = config.model, config.parallel, config.train
    layout = [f"tensor_parallel {parallel.tensor_parallel}"]
    if parallel.tensor_parallel > 1:
        layout.append(f"sequence_parallel {'on' if parallel.sequence_parallel else 'off'}")
    if parallel.pipeline_parallel > 1:
        layout.append(
            f"pipeline_parallel {parallel.pipeline_parallel} ({parallel.pipeline_schedule}, {parallel.n_stages} "
            f"stages, {config.n_microbatches} microbatches)"
        )
    if parallel.data_parallel > 1:
        replicas, shards = parallel.data_parallel_replicate, parallel.data_parallel_shard
        layout.append(f"data_parallel {replicas} x {shards}, ZeRO-{parallel.zero}")
    if parallel.context_parallel > 1:
        alone = parallel.data_parallel == 1
        layout.append(f"context_parallel {parallel.context_parallel}{f', ZeRO-{parallel.zero}' * alone}")
    if parallel.expert_parallel is not None:
        layout.append(f"expert_parallel {parallel.expert_parallel}")
    if parallel.exchange != Layout.exchange:
        layout.append(f"exchange {parallel.exchange}")
    if parallel.packs:
        layout.append("activations packed")
    if parallel.keep:
        layout.append(f"layers keep {parallel.keep}")
    active = "" if model.n_experts is None else f" ({model.n_active_parameters / 1e6:.2f}M active)"
    growing = f"{train.batch_size_start} growing to " if train.batch_size_start else ""
    return (
        f"{model.n_parameters / 1e6:.2f}M parameters{active}, {', '.join(layout)}, {device.type}, "
        f"{growing}{train.global_batch_size} samples of {model.seq_length} tokens a step, from step {step}"
    )


def notices(config: RunConfig) -> list[str]:
    """How a GPU takes the steps, how far attention sees, and a sentence for each setting that is allowed, but keeps the
    run from learning what it should, or does nothing."""
    found = [
        separation_notice(config),
        warmup_notice(config.train.steps, config.optimizer),
        router_notice(config.model),
        *unused_settings(config),
    ]
    if device_type(config) == "cuda":
        found.insert(0, in_words(config, "cuda"))
        if config.train.precision == FP8:
            found.insert(1, "MFU is a share of the device's dense peak of bfloat16, which GEMMs in FP8 can exceed")
    return [sentence for sentence in found if sentence is not None]


class Reserved:
    """Compares the memory of a rank's GPU with what was predicted, once, after the second step that is read.

    predicted: bytes; None: nothing is compared.
    """

    def __init__(self, predicted: float | None) -> None:
        self.predicted, self.steps = predicted, 0

    def compare(self, device: torch.device, notice: Callable[[str], None]) -> None:
        """Count a step. After the second one say what torch has reserved on a GPU, and warn if it is more than
        RESERVED_APART from the prediction."""
        self.steps += 1
        if self.predicted is None or self.steps != 2 or device.type != "cuda":
            return
        found = torch.cuda.max_memory_reserved(device)
        apart = found / self.predicted - 1
        line = f"memory after 2 steps: {found / 2**30:.2f} GiB reserved, {self.predicted / 2**30:.2f} GiB predicted"
        warns = abs(apart) > RESERVED_APART
        notice(f"warning: {line}, {abs(apart):.1%} {'more' if apart > 0 else 'less'}" if warns else line)
