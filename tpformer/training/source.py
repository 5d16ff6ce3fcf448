"""Where a model comes from: a run's checkpoint, a Hugging Face directory, or an export.

Belongs here: opening and loading one, and the configuration that follows from one. Nothing here imports torch until a
source is opened, so a command can refuse a wrong path at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpformer.config import GPTConfig, Layout, RunConfig, build_config, preset
from tpformer.weights.families import family_of
from tpformer.weights.family import FREE, Family, meaning, read_json
from tpformer.weights.folder import inside

from .companions import CONFIG, TOKENIZER
from .resolve import check_tokenizers, read_run_config

if TYPE_CHECKING:
    from tpformer.models import GPT
    from tpformer.weights.files import TensorFiles
    from tpformer.weights.tensors import TensorMap

Values = Mapping[str, Mapping[str, Any]]
_EXPORT = {"dtype", "step", "source"}  # what an export's config.json has beside the fields of GPTConfig


@dataclass(frozen=True)
class Description:
    """What can be known of a model without opening its tensors.

    family: None for a run or an export. tokenizer: "bytes", the path of a tokenizer.json, or None if nothing says
    which.
    """

    path: Path
    architecture: GPTConfig
    tokenizer: str | None
    family: Family | None = None

    @property
    def is_run(self) -> bool:
        """Whether it is a run's directory."""
        return (self.path / "config.toml").is_file()


def describe(path: str | Path, report: Callable[[str], None] = lambda _: None) -> Description:
    """The model in a directory. What is left out of its config.json is reported.

    FileNotFoundError if the directory holds no model; ValueError, with the field's name, for one that cannot be had.
    """
    path = Path(path)
    if (path / "config.toml").is_file():
        config = read_run_config(path)
        return Description(path, config.model.architecture, config.data.tokenizer)
    if not inside(path, CONFIG).is_file():
        raise FileNotFoundError(f"{path} is not a run and has no model: it has neither config.toml nor {CONFIG}")
    tokenizer = str((path / TOKENIZER).absolute()) if inside(path, TOKENIZER).is_file() else None
    values = read_json(path / CONFIG)
    try:
        if "model_type" not in values and "n_layers" in values:
            fields = {name: value for name, value in values.items() if name not in _EXPORT}
            return Description(path, build_config({"model": fields}).model.architecture, tokenizer)
        family = family_of(values)
        return Description(path, family.read(values, report), tokenizer, family)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# sources


@dataclass(frozen=True)
class Source:
    """A model that can be loaded. path: its directory. architecture: what a GPT that takes it is built from.

    tokenizer: "bytes", the path of a tokenizer.json, or None if nothing says which.
    """

    path: Path
    architecture: GPTConfig
    tokenizer: str | None

    def __str__(self) -> str:
        return str(self.path)

    def load(self, parts: Sequence[GPT]) -> None:
        """Fill this rank's parts of the model in place, in any layout, converting to the parameters' dtypes.

        Each rank reads its own slices. There is no communication. A part may have a shorter seq_length, other padding
        of the vocabulary and another dropout than the source. ValueError if it differs in more.
        """
        for part in parts:
            if different := differences(part.config, self.architecture):
                raise ValueError(f"{self.path} is of another model: {'; '.join(different)}")
            self._load(part)

    def _load(self, part: GPT) -> None:
        raise TypeError(f"{type(self).__name__} does not say where its tensors are")


@dataclass(frozen=True)
class RunSource(Source):
    """The checkpoint of a run. step: which one."""

    step: int

    def __str__(self) -> str:
        return f"{self.path}, step {self.step}"

    def _load(self, part: GPT) -> None:
        from tpformer.weights.tensors import overlap, own_part

        from .checkpoint_files import MODEL, read_parts, saved_tensors, step_path

        path = step_path(self.path / "checkpoints", self.step)
        saved = saved_tensors(path, MODEL)
        parts = []
        for name, parameter in part.state_dict().items():
            local, offsets = own_part(parameter)
            reached = overlap(local, offsets, saved[name].size)
            if reached is None or reached[0].numel() < local.numel():
                local.zero_()  # the padding of a vocabulary
            if reached is not None:
                tensor, bounds = reached
                parts.append((MODEL + name, tensor.detach(), [first for first, _ in bounds]))
        read_parts(path, parts)


@dataclass(frozen=True)
class WeightsSource(Source):
    """Safetensors files. names: {their name in the family: their name in the files}."""

    tensors: TensorMap
    files: TensorFiles
    names: Mapping[str, str]

    def _load(self, part: GPT) -> None:
        from tpformer.weights.tensors import load_part

        load_part(part, self.tensors, self.files, self.names)


def choose_checkpoint(run: Path, architecture: GPTConfig, step: int | None, report: Callable[[str], None]) -> int:
    """choose_step of a run. CheckpointError also for a checkpoint of another architecture than its config.toml's."""
    from tpformer.weights.tensors import parameter_shapes
    from tpformer.words import listed

    from .checkpoint import choose_step
    from .checkpoint_files import MODEL, CheckpointError, saved_tensors, step_path

    chosen = choose_step(run / "checkpoints", step, report)
    saved = saved_tensors(step_path(run / "checkpoints", chosen), MODEL)
    shapes = parameter_shapes(architecture, padded=True)
    there = {name: tuple(each.size) for name, each in saved.items()}
    if wrong := [name for name in shapes.keys() | there.keys() if shapes.get(name) != there.get(name)]:
        raise CheckpointError(
            f"{run} has a checkpoint of another model than its config.toml describes: they differ in {listed(wrong)}; "
            f"bring back the settings that the run had"
        )
    return chosen


def open_source(path: str | Path, *, step: int | None = None, report: Callable[[str], None] = print) -> Source:
    """The model in a directory: a run, a Hugging Face model or an export. Names and shapes of all tensors are checked.

    step: of a run's checkpoint; unset, the newest good one, and bad ones are reported.
    Communication: for a run, if there are process groups, a few small objects over the world, as each rank reads its
    share of the checkpoint's files and compares them with its manifest. Otherwise none.
    Errors: those of describe; FileNotFoundError without a checkpoint, without one of that step, or without a file of
    weights; CheckpointError for a damaged checkpoint; ValueError for a step of what is no run, and, with names, for
    damaged files and for tensors that are missing, unknown, or of another shape.
    """
    from tpformer.weights.files import TensorFiles
    from tpformer.weights.tensors import TensorMap

    found = describe(path, report)
    known = (found.path, found.architecture, found.tokenizer)
    if found.is_run:
        return RunSource(*known, choose_checkpoint(found.path, found.architecture, step, report))
    if step is not None:
        raise ValueError(f"{found.path} is no run, so it has no checkpoint of step {step}: leave the step out")
    tensors, files = TensorMap(found.family, found.architecture), TensorFiles(found.path)
    return WeightsSource(*known, tensors, files, tensors.check(files))


# configurations


def differences(config: GPTConfig, source: GPTConfig) -> list[str]:
    """How an architecture differs from a source's, in what changes what the source's weights compute.

    With RoPE seq_length may be any; learned positions may be fewer, and then the first ones are taken. init_std is only
    for weights that are not loaded.
    """
    ours, theirs = meaning(config), meaning(source)
    found = [
        f"{name} = {ours[name]}, there {theirs[name]}"
        for name in ours
        if name not in ("seq_length", "init_std") and ours[name] != theirs[name]
    ]
    if source.position == "learned" and config.seq_length > source.seq_length:
        found.append(f"seq_length = {config.seq_length}, but there are {source.seq_length} learned positions")
    return found


def source_config(path: str | Path, overrides: Values | None = None) -> RunConfig:
    """The configuration in which the model in a directory runs without being trained.

    For a run it is the run's own one, its layout replaced by tensor parallelism alone, on as many ranks as the run's
    tensor-parallel ones, without FP8 and without what a run records of its steps. "cuda" becomes unset, because the
    model may be used where there is no GPU. Else it is one with the architecture and the tokenizer that are found.
    overrides: values that replace those, {section: {key: value}}. Errors: those of describe, and ValueError for an
    unknown key.
    """
    found = describe(path)
    alone: dict[str, dict[str, Any]] = {"run": {"dir": str(path), "resume": False}}
    if not found.is_run:
        model = dataclasses.asdict(found.architecture)
        return build_config({"model": model, "data": {"tokenizer": found.tokenizer}}, alone, overrides or {})
    alone["parallel"] = {
        "pipeline_parallel": 1,
        "data_parallel_replicate": 1,
        "data_parallel_shard": 1,
        "context_parallel": 1,
        "expert_parallel": None,
        "zero_gather": "16",
        "cpu_offload": False,
        "pack_activations": False,
        "pack_layers": "",
        "keep": "",
        "memory_budget": "",
        "exchange": Layout.exchange,
    }
    alone["train"] = {"microbatch_size": None, "precision": "16"}  # the weights are those of a run in FP8, too
    if read_run_config(found.path).train.device == "cuda":
        alone["train"]["device"] = None
    alone["log"] = {"norm_interval": 0, "noise_interval": 0, "timeline_step": 0, "profile_step": 0}
    return read_run_config(found.path, alone, overrides or {})


def from_source(*layers: Values) -> list[Values]:
    """The layers of a run's configuration with what follows from model.init_from, if one of them sets it.

    Fields of [model] that no layer sets become the source's, and so does data.tokenizer; init_from becomes absolute. A
    run that is resumed has its own config.toml for a source, and needs no other.
    Errors: those of describe; ValueError for fields that contradict the source, and for training data of another
    tokenizer.
    """
    merged: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "run": {}}
    for layer in layers:
        for section in merged:
            if isinstance(layer.get(section), Mapping):
                merged[section].update(layer[section])
    given, run = merged["model"], merged["run"]
    if given.get("init_from") is None:
        return list(layers)
    if not str(given["init_from"]).strip():
        raise ValueError("model.init_from is empty: give the directory of a model, or leave it out")
    path = Path(given["init_from"]).absolute()
    directory = Path(run.get("dir", RunConfig().run.dir))
    resumed = run.get("resume", False) and (directory / "config.toml").is_file()
    found = describe(directory if resumed else path)
    if given.get("preset") is not None:
        given = {**preset(given["preset"]), **given}
    base = {name: value for name, value in dataclasses.asdict(found.architecture).items() if name not in FREE}
    wanted = build_config({"model": base}, {"model": given}).model.architecture
    if different := differences(wanted, found.architecture):
        raise ValueError(
            f"[model] contradicts model.init_from = {path}: {'; '.join(different)}: leave these keys out, and they "
            f"become the source's"
        )
    if merged["data"].get("tokenizer") is None and found.tokenizer is not None:
        datasets = [prefix for use in ("train", "valid") for prefix in merged["data"].get(use) or ()]
        check_tokenizers(found.tokenizer, datasets, str(path))
    # the weights' vocabulary is stated: the data's may be smaller, and a preset's stands back for it
    base = {name: value for name, value in base.items() if name not in given or name == "vocab_size"}
    return [{"model": base, "data": {"tokenizer": found.tokenizer}}, *layers, {"model": {"init_from": str(path)}}]
