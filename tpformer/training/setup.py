"""Make what a run needs from its RunConfig: device, process groups, mesh, datasets and model.

Training, generation, verification and the dry run share it.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import FP8, KEEP_KEYS, Layout, RunConfig, check_config, check_fp8_run, check_packing
from tpformer.distributed import build_mesh, initialize
from tpformer.distributed.agreement import Decides
from tpformer.distributed.mesh import DEFAULT_TIMEOUT, PROGRAM, expert_mesh
from tpformer.layers import TensorParallel, keep
from tpformer.models import GPT
from tpformer.ops import use_measured_table
from tpformer.parallel import Exchange, apply_zero, exchange_of, split_stages
from tpformer.parallel.zero import uses_fsdp
from tpformer.processes.cpu import keep_freed_memory, share_cores
from tpformer.processes.files import is_there
from tpformer.words import dtype_name

from .data import BlendedSamples, Samples, TokenSamples, dataset_paths
from .model import ModelParts
from .resolve import open_dataset


def check_run(config: RunConfig, *, trains: bool = True) -> None:
    """ValueError, with the remedy, for a run that cannot work: check_config's, and its exchange's."""
    check_config(config, trains=trains)
    exchange_of(config)


def device_type(config: RunConfig) -> str:
    """cpu or cuda: the configured one, else cuda where there is one. ValueError for cuda without a device."""
    wanted = config.train.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError('train.device = "cuda", but no CUDA device is visible: set --train.device cpu')
    return wanted


def join_ranks(device: str, timeout: timedelta = DEFAULT_TIMEOUT, decides: Decides = PROGRAM) -> None:
    """Take this process's share of the machine's cores, then enter the process group. Collective over the world.

    decides: what all ranks must have alike. Errors: those of initialize.
    """
    share_cores()
    keep_freed_memory()
    initialize(device, timeout, decides)


def group_timeout(config: RunConfig) -> timedelta:
    """The process groups' timeout. It is twice run.timeout, so that the watchdog, which reports more, acts first."""
    return timedelta(seconds=2 * config.run.timeout)


@dataclass(frozen=True)
class RunData:
    """A run's training samples, blended, and its validation datasets."""

    train: Samples
    valid: list[TokenSamples]


def open_data(config: RunConfig) -> RunData:
    """Open the datasets of a resolved configuration.

    FileNotFoundError or ValueError, with the file and the remedy, for a dataset that is missing, damaged, shorter than
    one sample, or has ids outside the vocabulary; ValueError if data.mask is set and no training dataset has a mask,
    and with data.separate_documents for documents that data.end_of_document does not end.
    """
    length, seed = config.model.seq_length, config.train.seed
    size: int = config.model.vocab_size  # type: ignore[assignment]
    data, masked = config.data, config.data.mask
    if masked and not any(is_there(dataset_paths(prefix).mask) for prefix in data.train):
        raise ValueError(
            f"data.mask = true, but {', '.join(data.train)} has no .mask file: make one with `tpformer data build "
            f"--prompt-field ... --completion-field ...`, or leave data.mask out to train on every token"
        )
    open_one = partial(open_dataset, vocab_size=size, masked=masked, end_of_document=data.end_of_document)
    datasets = [open_one(prefix) for prefix in (*data.train, *data.valid)]
    n = len(data.train)
    parts = [TokenSamples(dataset, length, seed + index) for index, dataset in enumerate(datasets[:n])]
    weights = data.weights or [part.n_samples for part in parts]
    train: Samples = parts[0] if n == 1 else BlendedSamples(parts, weights, seed)
    valid = [TokenSamples(dataset, length, shuffle=False) for dataset in datasets[n:]]
    for each in valid:
        each.n_targets(min(each.n_samples, config.train.validation_samples))  # refuses samples without targets
    return RunData(train, valid)


def default_dtype(config: RunConfig, device: str | None = None) -> torch.dtype:
    """The compute dtype: the configured one, else bfloat16 on CUDA and float32 on a CPU. device: unset, the run's."""
    name = config.train.dtype or ("bfloat16" if (device or device_type(config)) == "cuda" else "float32")
    return getattr(torch, name)


def tensor_parallel(
    mesh: DeviceMesh, layout: Layout, timeout: timedelta = DEFAULT_TIMEOUT, precision: str = "16"
) -> TensorParallel:
    """The tensor, context and expert parallelism of a layout on its mesh. A group of one rank is left out: it would
    give the same numbers, but cost the host a DTensor for each use of a parameter. precision: of its linears."""
    tp, context = (mesh[axis] if mesh[axis].size() > 1 else None for axis in ("tp", "cp"))
    ep, experts = layout.expert_parallel, None
    if ep is not None and (ep > 1 or tp is not None):
        view = expert_mesh(mesh, layout.expert_replicas, ep, timeout)
        experts = view[view.mesh_dim_names[-1]]
    return TensorParallel(tp, layout.sequence_parallel, layout.transport, context, experts, precision)


def build_parts(config: RunConfig, mesh: DeviceMesh, exchange: Exchange | None = None) -> list[GPT]:
    """This rank's parts of a resolved configuration's model, sharded over the mesh, on the meta device.

    exchange: how gradients of its replicas become one; unset: the configuration's.
    It also loads the configured table of measured transports. Without one, a table loaded before is forgotten.
    """
    if config.parallel.memory_budget and not config.parallel.keep:
        raise ValueError(
            f"parallel.memory_budget={config.parallel.memory_budget!r} without parallel.keep: choose it first, as "
            f"`tpformer pretrain` does by tpformer.planner.memory_budget.with_budget"
        )
    use_measured_table(config.parallel.transport_table or None)
    layout, compute = config.parallel, default_dtype(config)
    if layout.packs:
        check_packing(dtype_name(compute))  # of the device's own dtype, if the configuration names none
    if config.train.precision == FP8:
        capability = torch.cuda.get_device_capability() if mesh.device_type == "cuda" else None
        check_fp8_run(mesh.device_type, dtype_name(compute), capability)  # likewise, and of the GPU
    architecture = config.model.architecture
    ranges = split_stages(architecture.layer_costs(layout.pipeline_split), layout.n_stages)
    tp = tensor_parallel(mesh, layout, group_timeout(config), config.train.precision)
    exchange, parts = exchange or exchange_of(config), []
    for stage in layout.stages_of(mesh["pp"].get_local_rank()):
        part = GPT(
            architecture,
            tp=tp,
            label_smoothing=config.train.label_smoothing,
            z_loss=config.train.z_loss,
            balance_loss=config.train.balance_loss,
            part=ranges[stage],
            seed=config.train.seed,
            device="meta",
            dtype=torch.float32 if compute.itemsize < 4 else compute,
        )
        keep(part, **{name: getattr(layout, name) for name in KEEP_KEYS})
        if uses_fsdp(layout, compute) and not exchange.takes_steps:
            apply_zero(part, part.layers.values(), mesh, layout, compute, exchange, group_timeout(config))
        parts.append(part)
    return parts


def build_model(
    config: RunConfig, mesh: DeviceMesh, *, initial: bool = True, exchange: Exchange | None = None
) -> ModelParts:
    """This rank's parts of a resolved configuration's model, on its device. Collective.

    initial: give them initial values. Without them every parameter has to be loaded. exchange: as for build_parts.
    """
    exchange = exchange_of(config, exchange)
    parts = build_parts(config, mesh, exchange)
    for part in parts:
        part.to_empty(device="cpu" if config.parallel.cpu_offload else mesh.device_type)
        if initial:
            part.init_weights()
    return ModelParts(
        parts,
        config.parallel,
        mesh,
        microbatch_size=config.microbatch_size,
        n_microbatches=config.n_microbatches,
        dtype=default_dtype(config),
        router_bias_rate=config.train.router_bias_rate,
        timeout=group_timeout(config),
        exchange=exchange,
        end_of_document=separator(config),
    )


def separator(config: RunConfig) -> int | None:
    """The id that ends a document, if the documents of a sample are separated; else None. ValueError while nothing has
    filled it in."""
    if config.data.separate_documents and config.data.end_of_document is None:
        raise ValueError("data.separate_documents = true without data.end_of_document: resolve the configuration first")
    return config.data.end_of_document


def run_mesh(config: RunConfig, device: str) -> DeviceMesh:
    """The mesh of a configuration's layout. Collective over the world."""
    layout = config.parallel
    return build_mesh(
        device,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel_replicate=layout.data_parallel_replicate,
        data_parallel_shard=layout.data_parallel_shard,
        context_parallel=layout.context_parallel,
        tensor_parallel=layout.tensor_parallel,
        timeout=group_timeout(config),
    )
