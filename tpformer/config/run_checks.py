"""What a run's settings must have in common, checked before anything starts.

Belongs here: ValueErrors, with the numbers and the remedy, about settings of several sections, or of one that is no
model and no layout. Those have their own checks, and ranges.py has the ranges of single numbers.
"""

from .checks import check_choice, check_context_length, check_packing
from .fp8 import FP8, PRECISIONS, check_precision
from .ranges import check_ranges
from .run import OptimizerSection, RunConfig, TrainSection, batch_sizes
from .transport_table import DTYPES, read_transport_table
from .zero_gather import check_zero_gather

SCHEDULES = ("cosine", "linear", "constant", "wsd")
CUDA_GRAPHS = ("auto", "on", "off")
MOMENTS = ("beta1", "beta2", "eps")
OPTIMIZERS = {  # and their own settings
    "adamw": MOMENTS,
    "sgd": ("momentum", "nesterov"),
    "muon": ("momentum", "newton_schulz", "muon_scale", "muon_dtype", *MOMENTS),
}
MUON: dict[str, tuple[str, ...]] = {
    "newton_schulz": ("quintic", "polar_express"),
    "muon_scale": ("rms", "spectral"),
    "muon_dtype": ("bfloat16", "float32", "float64"),  # float16 makes small momenta 0
}
GROWTHS = 10_000  # of a batch, because every step goes through them


def check_config(config: RunConfig, *, trains: bool = True) -> None:
    """ValueError, with the numbers and the remedy, for a run that cannot work. It needs no process group.

    trains: whether the run needs training data.
    """
    model, parallel = config.model, config.parallel
    parallel.check()
    for section in ("run", "data", "optimizer", "train", "checkpoint", "log"):  # model and layout check their own
        check_ranges(section, getattr(config, section))
    model.check_ranks(parallel.tensor_parallel, parallel.expert_parallel)
    _check_batch(config)
    batch = "train.global_batch_size" if config.train.batch_size_start is None else "train.batch_size_start"
    for size in batch_sizes(config.train):
        for samples in (size, size // 2) if config.log.noise_interval else (size,):
            n_microbatches = samples // (parallel.data_parallel * config.microbatch_size)
            parallel.check_pipeline(model.n_layers, n_microbatches, batch)
    parallel.kept(model.n_layers)
    if parallel.transport_table:
        read_transport_table(parallel.transport_table)
    _check_optimizer(config.optimizer)
    check_choice("train.cuda_graph", config.train.cuda_graph, CUDA_GRAPHS)
    check_choice("train.precision", config.train.precision, PRECISIONS)
    _check_train(config)
    if config.train.precision == FP8:
        check_precision(model, parallel, config.train.device, config.train.dtype)
    check_zero_gather(model, parallel, config.train.precision)
    _check_recorded(config)
    if not config.run.dir.strip():
        raise ValueError(f"run.dir = {config.run.dir!r} names no directory: give the run one of its own")
    if trains and not config.data.train:
        raise ValueError("data.train names no dataset: give the prefix of a .bin/.idx pair (`tpformer data build`)")
    if config.data.weights and len(config.data.weights) != len(config.data.train):
        raise ValueError(
            f"data.weights has {len(config.data.weights)} numbers for {len(config.data.train)} datasets in data.train"
        )
    if config.data.end_of_document is not None and not config.data.separate_documents:
        raise ValueError(
            f"data.end_of_document={config.data.end_of_document} would do nothing: set data.separate_documents = true, "
            f"or leave it out"
        )


def _check_optimizer(optimizer: OptimizerSection) -> None:
    check_choice("optimizer.schedule", optimizer.schedule, SCHEDULES)
    check_choice("optimizer.name", optimizer.name, OPTIMIZERS)
    for key, choices in MUON.items():
        if (value := getattr(optimizer, key)) is not None:
            check_choice(f"optimizer.{key}", value, choices)
    for name, settings in OPTIMIZERS.items():
        for key in settings if name != optimizer.name else ():
            value, unset = getattr(optimizer, key), (getattr(OptimizerSection, key), 0.0 if key == "momentum" else None)
            if key not in OPTIMIZERS[optimizer.name] and value not in unset:
                raise ValueError(
                    f"optimizer.{key}={value} is of {name}, and optimizer.name={optimizer.name!r} has none: leave it "
                    f'out, or set optimizer.name = "{name}"'
                )
    if optimizer.nesterov and optimizer.kept_momentum == 0:
        raise ValueError("optimizer.nesterov=True needs a momentum: set optimizer.momentum, such as to 0.9")


def _check_batch(config: RunConfig) -> None:
    """Data-parallel ranks must be able to share a step's samples, tensor-parallel ranks a microbatch's tokens."""
    samples, tp = config.microbatch_size, config.parallel.tensor_parallel
    train, data_parallel = config.train, config.parallel.data_parallel
    if train.global_batch_size % (train.batch_size_start or 1):
        raise ValueError(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of "
            f"train.batch_size_start={train.batch_size_start}, by which it grows: change either"
        )
    # the smallest batch, which divides all others; a microbatch that is unset is made to fit
    name = "global_batch_size" if train.batch_size_start is None else "batch_size_start"
    size, given = batch_sizes(train)[0], train.microbatch_size or 1
    if size % data_parallel:
        raise ValueError(
            f"train.{name}={size} cannot be shared by {data_parallel} data-parallel ranks: make it a multiple of "
            f"{data_parallel}"
        )
    if size % (data_parallel * given):
        raise ValueError(
            f"train.{name}={size} is not a multiple of {data_parallel} data-parallel ranks * "
            f"train.microbatch_size={given} = {data_parallel * given}: change either"
        )
    if (growths := len(batch_sizes(train)) - 1) > GROWTHS:
        raise ValueError(
            f"train.batch_size_start={train.batch_size_start} would grow to train.global_batch_size="
            f"{train.global_batch_size} in {growths} times, of which there may be at most {GROWTHS}: raise it"
        )
    unit = 2 * data_parallel * given
    if config.log.noise_interval and size % unit:
        raise ValueError(
            f"log.noise_interval={config.log.noise_interval} takes the gradients of half a batch of {size} samples, "
            f"which {data_parallel} data-parallel ranks cannot share in microbatches of {given}: make train.{name} a "
            f"multiple of {unit}"
        )
    length, cp = config.model.seq_length, config.parallel.context_parallel
    if cp > 1:
        check_context_length(length, cp, ("model.seq_length", "parallel.context_parallel"))
    tokens = samples * length // cp
    if config.parallel.sequence_parallel and tokens % tp:
        shared = f" / {cp} context-parallel ranks" if cp > 1 else ""
        raise ValueError(
            f"train.microbatch_size * model.seq_length{shared} = {samples} * {length}{f' / {cp}' * (cp > 1)} = "
            f"{tokens} tokens cannot be split over parallel.tensor_parallel={tp} ranks: make it a multiple of {tp}, or "
            f"set parallel.sequence_parallel = false"
        )


def _check_recorded(config: RunConfig) -> None:
    """A step that is to be recorded must come, and have what is recorded of it."""
    for name in ("timeline_step", "profile_step"):
        if (step := getattr(config.log, name)) > config.train.steps:
            raise ValueError(f"log.{name}={step} is after the last step: set it to at most {config.train.steps}")
    if config.log.timeline_step and config.parallel.pipeline_parallel == 1:
        raise ValueError(
            f"log.timeline_step={config.log.timeline_step} records a pipeline, and parallel.pipeline_parallel=1 has "
            f"none: leave it out, or set log.profile_step for a trace"
        )


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.balance_loss and config.model.n_experts is None:
        raise ValueError(
            f"train.balance_loss={train.balance_loss} without experts would do nothing: set model.n_experts, or leave "
            f"it out"
        )
    if train.router_bias_rate != TrainSection.router_bias_rate and not config.model.router_bias:
        raise ValueError(
            f"train.router_bias_rate={train.router_bias_rate} without biases would do nothing: set "
            f"model.router_bias = true, or leave it out"
        )
    if train.dtype is not None:
        check_choice("train.dtype", train.dtype, DTYPES)
    if train.device is not None:
        check_choice("train.device", train.device, ("cpu", "cuda"))
    dtype = train.dtype or ("float32" if train.device == "cpu" else None)
    if config.parallel.packs and dtype is not None:
        check_packing(dtype)
