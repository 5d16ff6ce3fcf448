"""The configuration of a run: one frozen dataclass per section, and its TOML file. run_checks.py checks it.

A preset, the TOML file and the command line are merged as plain dicts, in this order: a later one replaces an earlier
one's values. The dataclasses are built after that, so a value that none of them sets can still be derived.
"""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpformer.words import harmless, shown

from .architecture import GPTConfig
from .checks import check_known, parsed
from .layout import Layout
from .presets import preset
from .ranges import NO_FLOAT
from .refused import without_refused
from .renamed import with_exchange


@dataclass(frozen=True, kw_only=True)
class ModelSection(GPTConfig):
    """[model]: an architecture, or a preset with some fields replaced."""

    preset: str | None = None
    """A named architecture (`tpformer presets` lists them) whose fields apply where this section gives none."""
    init_from: str | None = None
    """A run, a Hugging Face directory or an export, from whose weights the run starts. Gives the fields unset here."""

    @property
    def known_vocab_size(self) -> int | None:
        """vocab_size, or else the preset's: that of a model without data."""
        return self.vocab_size or (preset(self.preset)["vocab_size"] if self.preset is not None else None)

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
    changes: tuple[str, ...] = ()
    """Keys that a resumed run may change although its losses change with them, such as optimizer.lr."""
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
    mask: bool = False
    """Train and validate on the tokens that the datasets' masks mark, such as answers. Without a mask: on all."""
    separate_documents: bool = False
    """Attend to each of a sample's documents by itself, with positions that restart. Off: a sample is one document."""
    end_of_document: int | None = None
    """With separate_documents: the id that ends a document. Unset: the tokenizer's."""
    tokenizer: str | None = None
    """"bytes" or the path of a tokenizer.json; unset: the one the first dataset was built with."""
    train_contents: tuple[str, ...] = ()
    """Token type, size and SHA-256 of each training dataset. Filled in as a run starts; given ones are compared."""
    valid_contents: tuple[str, ...] = ()
    """The contents of each validation dataset, likewise."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: AdamW, SGD or Muon, and the learning rate, which rises linearly and then follows the schedule."""

    name: str = "adamw"
    """adamw, sgd, or muon: orthogonalised steps of layers' matrices, beside adamw for all else (docs/optimizers.md)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step, as a share of the peak (but for the constant schedule)."""
    schedule: str = "cosine"
    """cosine, linear or constant; or wsd: constant but for a linear decay at the end (warm-up, stable, decay)."""
    decay_fraction: float = 0.2
    """With wsd: share of all steps, the last ones, in which the learning rate decays."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises to its peak. Unset: a tenth of the run, at most 100."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float | None = None
    """With sgd and muon: share of the sum of earlier gradients that a step keeps. Unset: 0 with sgd, 0.95 with muon."""
    nesterov: bool = False
    """With sgd and momentum: step as if the sum had the gradient twice (Nesterov's accelerated gradient)."""
    newton_schulz: str = "quintic"
    """With muon: the five iterations that orthogonalise: quintic, or polar_express (arXiv:2505.16932)."""
    muon_scale: str = "rms"
    """With muon: what a matrix's step is multiplied by: rms, for steps as large as adamw's, or spectral (Jordan's)."""
    muon_dtype: str | None = None
    """With muon: the dtype of the iterations and of what travels. Unset: bfloat16 on CUDA, else the parameters'."""
    weight_decay: float = 0.1
    """Decay of matrices, not of biases and norms. sgd adds it to the gradient, others take it off the parameter."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    @property
    def kept_momentum(self) -> float:
        """momentum, or what stands for it while it is unset."""
        return self.momentum if self.momentum is not None else 0.95 if self.name == "muon" else 0.0

    @property
    def moments(self) -> int:
        """Tensors as large as a parameter that the optimizer keeps for it; muon: for one that adamw trains."""
        return int(self.kept_momentum > 0) if self.name == "sgd" else 2

    @property
    def matrix_moments(self) -> int:
        """The same for a matrix of a layer."""
        return 1 if self.name == "muon" else self.moments


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """[train]: the loop."""

    steps: int = 1000
    seed: int = 1234
    """Fixes initial weights, data order and dropout, the same in every layout."""
    global_batch_size: int = 8
    """Samples per optimizer step."""
    batch_size_start: int | None = None
    """Samples of the first step, for a batch that grows to global_batch_size, a multiple of it. Unset: no growth."""
    batch_size_ramp_steps: int = 1000
    """With batch_size_start: steps in which the batch grows, by batch_size_start each time, at equal distances."""
    microbatch_size: int | None = None
    """Samples per forward on a rank. Unset: its share of the global batch, or 1 in a pipeline other than naive."""
    dtype: str | None = None
    """float32, float64, or bfloat16 or float16 with float32 master weights. Unset: bfloat16 on CUDA, else float32."""
    precision: str = "16"
    """16: linears multiply numbers of `dtype`. fp8: blocks of e4m3, the same ones in every layout (docs/fp8.md)."""
    device: str | None = None
    """cpu or cuda. Unset: cuda where there is one."""
    cuda_graph: str = "auto"
    """Whether a step is one CUDA graph: on, off, or auto, which is on for one GPU. The log says why it is not."""
    label_smoothing: float = 0.0
    """Share of each target's probability that training spreads over the vocabulary. Validation leaves it out."""
    z_loss: float = 0.0
    """Coefficient of logsumexp(logits)**2 in the training loss of each token (PaLM: 1e-4). Validation leaves it out."""
    balance_loss: float = 0.0
    """Coefficient of the sequence-wise loss that is least where a sequence uses all experts alike (DeepSeek-V3)."""
    router_bias_rate: float = 0.001
    """With model.router_bias: how far a step moves the bias of an expert with more or fewer tokens than the mean."""
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
    norm_interval: int = 0
    """Steps between rows of norms.jsonl: gradient norms by layer, and the size of what layers give; 0: none."""
    noise_interval: int = 0
    """Steps between estimates of the gradient noise scale, each of which takes half a step more; 0: none."""
    tensorboard: bool = True
    """Also write TensorBoard events, where tensorboard is installed."""
    plot: bool = True
    """Draw plots/loss.png at the end, where matplotlib is installed."""
    timeline_step: int = 0
    """The step whose pipeline actions are recorded for `tpformer timeline`; 0: none."""
    profile_step: int = 0
    """The step of which rank 0 writes profile.json, a trace of torch's profiler for ui.perfetto.dev; 0: none."""
    wandb: str = ""
    """The Weights & Biases project that gets every row, where wandb is installed. Empty: none."""


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
        batch = self.train.batch_size_start or self.train.global_batch_size
        share = batch // (self.parallel.data_parallel * (2 if self.log.noise_interval else 1))
        return self.train.microbatch_size or (1 if pipelined else max(1, share))

    @property
    def n_microbatches(self) -> int:
        """Microbatches of each data-parallel rank in a step of global_batch_size samples."""
        return self.train.global_batch_size // (self.parallel.data_parallel * self.microbatch_size)


Values = Mapping[str, Mapping[str, Any]]
KINDS = {  # of values, as messages call them
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    tuple: "a list in brackets",
}


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's TOML file. FileNotFoundError or ValueError names the path."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    return parsed(path, "TOML", tomllib.loads)


def build_config(*layers: Values) -> RunConfig:
    """A RunConfig from sections merged left to right; ValueError names an unknown key or a value of a wrong type.

    A preset's vocabulary stands back where there is training data: vocab_size is unset then, for the data to fill in.
    """
    sections = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, values in layer.items():
            check_known(name, sections, "section")
            if not isinstance(values, Mapping):
                raise ValueError(f"{name} is a section: write its keys under [{name}], not {name} = {shown(values)}")
            merged.setdefault(name, {}).update(with_exchange(values) if name == "parallel" else values)
    model = merged.get("model", {})
    if model.get("preset") is not None:
        fields = preset(model["preset"])
        if merged.get("data", {}).get("train"):
            del fields["vocab_size"]
        merged["model"] = {**fields, **model}
    return RunConfig(**{name: _section(sections[name], name, values) for name, values in merged.items()})  # type: ignore[arg-type]


def _section(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    values = without_refused(section, values)
    for key in values:
        check_known(key, hints, f"key in [{section}]")
    return cls(**{key: _convert(f"{section}.{key}", value, hints[key]) for key, value in values.items()})


def _convert(key: str, value: Any, hint: Any) -> Any:
    """A TOML value as the field's type: lists become tuples, whole numbers serve as floats; ValueError otherwise."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_convert(key, item, typing.get_args(hint)[0]) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < NO_FLOAT:
        return float(value)
    if isinstance(value, str) and value != harmless(value):
        raise ValueError(f"{key} = {shown(value)}: control characters cannot be in a setting")
    if typing.get_origin(hint) is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{key} = {shown(value)}: expected {KINDS[typing.get_origin(hint) or hint]}")


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


def batch_sizes(train: TrainSection) -> range:
    """The samples of a step: from those of the first to global_batch_size, which is the only size without a ramp."""
    first = train.batch_size_start or train.global_batch_size
    return range(first, train.global_batch_size + 1, first)
