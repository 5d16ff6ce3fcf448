"""What a run says of itself in words and shares: the first lines of its log, and how much of its devices it uses."""

import torch

from tpformer.config import Layout, RunConfig
from tpformer.kernels.cost import machine_for

from .experts import router_notice
from .graph import in_words
from .metrics import rounded
from .schedules import warmup_notice
from .separation import separation_notice
from .setup import device_type


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
    if parallel.pack_activations:
        layout.append("activations packed")
    active = "" if model.n_experts is None else f" ({model.n_active_parameters / 1e6:.2f}M active)"
    growing = f"{train.batch_size_start} growing to " if train.batch_size_start else ""
    return (
        f"{model.n_parameters / 1e6:.2f}M parameters{active}, {', '.join(layout)}, {device.type}, "
        f"{growing}{train.global_batch_size} samples of {model.seq_length} tokens a step, from step {step}"
    )


def notices(config: RunConfig) -> list[str]:
    """How a GPU takes the steps, how far attention sees, and a sentence for each setting that is allowed, but keeps the
    run from learning what it should."""
    found = [
        separation_notice(config),
        warmup_notice(config.train.steps, config.optimizer),
        router_notice(config.model),
    ]
    if device_type(config) == "cuda":
        found.insert(0, in_words(config, "cuda"))
    return [sentence for sentence in found if sentence is not None]
