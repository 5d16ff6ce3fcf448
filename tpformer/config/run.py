"""The configuration of a run: one frozen dataclass per section, its TOML file, and the checks before anything starts.

A preset, the TOML file and the command line are merged as plain dicts, in this order: a later one replaces an earlier
one's values. The dataclasses are built after that, so a value that none of them sets can still be derived.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .architecture import GPTConfig
from .checks import check_choice, check_loss_terms, check_positive
from .layout import Layout, recomputed_layers
from .presets import preset
from .transport_table import DTYPES, read_transport_table


@dataclass(frozen=True, kw_only=True)
class ModelSection(GPTConfig):
    """[model]: an architecture, or a preset with some fields replaced."""

    preset: str | None = None
    """A named architecture whose fields apply where this section gives none."""
    init_from: str | None = None
    """A run, a Hugging Face directory or an export, from whose weights the run starts. Gives the fields unset here."""

    @property
    def architecture(self) -> GPTConfig:
        """What a model is built from: this section without its preset."""
        return GPTConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(GPTConfig)})


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """[run]: where the run lives."""

    dir: str = "runs/run"
    """Directory of config.toml, metrics.jsonl, checkpoints/ and plots/."""
    resume: bool = False
    """Continue the run in `dir` from its newest good checkpoint (start it if there is none)."""
    timeout: float = 600.0
    """Seconds that a step, a validation or a checkpoint may take. Then the run ends and reports which rank hangs."""
    max_restarts: int = 0
    """How often all ranks are started again after a failure. Under torchrun set its --max-restarts and run.resume."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """[data]: token datasets. Each is given as the path of its .bin and .idx files without the ending."""

    train: tuple[str, ...] = ()
    """Training datasets, blended."""
    weights: tuple[float, ...] = ()
    """Share of each training dataset; unset: by its number of samples."""
    valid: tuple[str, ...] = ()
    """Validation datasets; unset: no validation."""
    tokenizer: str | None = None
    """"bytes" or the path of a tokenizer.json; unset: the one the first dataset was built with."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: AdamW. The learning rate rises linearly, then decays as a cosine."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step, as a share of the peak."""
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only, not on biases and norms."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """[train]: the loop."""

    steps: int = 1000
    seed: int = 1234
    """Fixes initial weights, data order and dropout, the same in every layout."""
    global_batch_size: int = 8
    """Samples per optimizer step."""
    microbatch_size: int | None = None
    """Samples per forward on a rank. Unset: its share of the global batch, or 1 in a pipeline other than naive."""
    dtype: str | None = None
    """float32, float64, or bfloat16 or float16 with float32 master weights. Unset: bfloat16 on CUDA, else float32."""
    device: str | None = None
    """cpu or cuda. Unset: cuda where there is one."""
    label_smoothing: float = 0.0
    """Share of each target's probability that training spreads over the vocabulary. Validation leaves it out."""
    z_loss: float = 0.0
    """Coefficient of logsumexp(logits)**2 in the training loss of each token (PaLM: 1e-4). Validation leaves it out."""
    validation_interval: int = 250
    """Steps between validations; the last step always validates."""
    validation_samples: int = 256
    """Validation samples, the same ones each time."""
    max_skipped_steps: int = 10
    """A step whose loss or gradient is not finite updates nothing. After this many in a row the run stops."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """[checkpoint]: checkpoints are written while training goes on, each whole or not at all."""

    interval: int = 500
    """Steps between checkpoints; the last step always writes one. 0: only the last."""
    keep: int = 2
    """How many of the newest to keep."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """[log]: metrics.jsonl, the console, TensorBoard and the loss curve."""

    interval: int = 10
    """Steps between rows."""
    tensorboard: bool = True
    """Also write TensorBoard events, where tensorboard is installed."""
    plot: bool = True
    """Draw plots/loss.png at the end, where matplotlib is installed."""
    timeline_step: int = 0
    """The step whose pipeline actions are recorded for `tpformer timeline`; 0: none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run depends on."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: Layout = field(default_factory=Layout)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def microbatch_size(self) -> int:
        """Samples per forward of one data-parallel rank."""
        pipelined = self.parallel.pipeline_parallel > 1 and self.parallel.pipeline_schedule != "naive"
        share = self.train.global_batch_size // self.parallel.data_parallel
        return self.train.microbatch_size or (1 if pipelined else max(1, share))

    @property
    def n_microbatches(self) -> int:
        """Microbatches of each data-parallel rank in a step."""
        return self.train.global_batch_size // (self.parallel.data_parallel * self.microbatch_size)


Values = Mapping[str, Mapping[str, Any]]


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's TOML file. FileNotFoundError or ValueError names the path."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def build_config(*layers: Values) -> RunConfig:
    """A RunConfig from sections merged left to right; ValueError names an unknown key or a value of a wrong type."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, values in layer.items():
            _known(name, sections, "section")
            if not isinstance(values, Mapping):
                raise ValueError(f"{name} is a section: write its keys under [{name}], not {name} = {values!r}")
            merged.setdefault(name, {}).update(values)
    model = merged.get("model", {})
    if model.get("preset") is not None:
        merged["model"] = {**preset(model["preset"]), **model}
    return RunConfig(**{name: _section(sections[name], name, values) for name, values in merged.items()})  # type: ignore[arg-type]


def _known(name: str, names, kind: str) -> None:
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
        raise ValueError(f"unknown {kind} {name!r}: {hint}")


def _section(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    for key in values:
        _known(key, hints, f"key in [{section}]")
    return cls(**{key: _convert(f"{section}.{key}", value, hints[key]) for key, value in values.items()})


def _convert(key: str, value: Any, hint: Any) -> Any:
    """A TOML value as the field's type: lists become tuples, whole numbers serve as floats; ValueError otherwise."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_convert(key, item, typing.get_args(hint)[0]) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{key} = {value!r}: expected {getattr(hint, '__name__', hint)}")


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML, without unset fields. read_toml and build_config turn it back into the same one."""
    lines = []
    for section, values in dataclasses.asdict(config).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if value is not None:
                lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # JSON has no inf and nan
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def check_config(config: RunConfig, *, trains: bool = True) -> None:
    """ValueError, with the numbers and the remedy, for a run that cannot work. It needs no process group.

    trains: whether the run needs training data.
    """
    model, parallel = config.model, config.parallel
    parallel.check()
    check_positive(
        **{
            "train.steps": config.train.steps,
            "train.global_batch_size": config.train.global_batch_size,
            "train.microbatch_size": config.microbatch_size,
            "train.validation_interval": config.train.validation_interval,
            "train.validation_samples": config.train.validation_samples,
            "train.max_skipped_steps": config.train.max_skipped_steps,
            "log.interval": config.log.interval,
            "checkpoint.keep": config.checkpoint.keep,
        }
    )
    model.check_heads(parallel.tensor_parallel)
    _check_batch(config)
    parallel.check_pipeline(model.n_layers, config.n_microbatches)
    recomputed_layers(parallel.recompute, parallel.recompute_layers, parallel.recompute_interval, model.n_layers)
    if parallel.transport_table:
        read_transport_table(parallel.transport_table)
    _check_train(config.train)
    if not 0 < config.run.timeout < math.inf or config.run.max_restarts < 0:
        raise ValueError(
            f"run.timeout={config.run.timeout} must be a positive number of seconds, and "
            f"run.max_restarts={config.run.max_restarts} not negative"
        )
    if trains and not config.data.train:
        raise ValueError("data.train names no dataset: give the prefix of a .bin/.idx pair (`tpformer data build`)")
    if config.data.weights and len(config.data.weights) != len(config.data.train):
        raise ValueError(
            f"data.weights has {len(config.data.weights)} numbers for {len(config.data.train)} datasets in data.train"
        )


def _check_batch(config: RunConfig) -> None:
    """Data-parallel ranks must be able to share a step's samples, tensor-parallel ranks a microbatch's tokens."""
    samples, tp = config.microbatch_size, config.parallel.tensor_parallel
    global_batch, data_parallel = config.train.global_batch_size, config.parallel.data_parallel
    if global_batch % (data_parallel * samples):
        raise ValueError(
            f"train.global_batch_size={global_batch} is not a multiple of {data_parallel} data-parallel ranks * "
            f"train.microbatch_size={samples} = {data_parallel * samples}: change either"
        )
    tokens = samples * config.model.seq_length
    if config.parallel.sequence_parallel and tokens % tp:
        raise ValueError(
            f"train.microbatch_size * model.seq_length = {samples} * {config.model.seq_length} = {tokens} tokens "
            f"cannot be split over parallel.tensor_parallel={tp} ranks: make it a multiple of {tp}, or set "
            f"parallel.sequence_parallel = false"
        )


def _check_train(train: TrainSection) -> None:
    if train.dtype is not None:
        check_choice("train.dtype", train.dtype, DTYPES)
    if train.device is not None:
        check_choice("train.device", train.device, ("cpu", "cuda"))
    check_loss_terms(train.label_smoothing, train.z_loss, "train.")
