"""Where a model comes from: a run's checkpoint, or a directory of weights.

Nothing here imports torch until a source is opened, so a command can refuse a wrong path at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpformer.config import GPTConfig, RunConfig, build_config, read_toml

from .resolve import read_run_config

if TYPE_CHECKING:
    from tpformer.models import GPT


@dataclass(frozen=True)
class Source:
    """A model that can be loaded.

    path: the directory it is in. architecture: what a GPT that takes it is built from. tokenizer: "bytes", the path of
    a tokenizer.json, or None if nothing says which.
    """

    path: Path
    architecture: GPTConfig
    tokenizer: str | None

    def load(self, parts: Sequence[GPT]) -> None:
        """Fill this rank's parts of the model in place, in any layout. Each rank reads its own slices; local."""
        raise TypeError(f"{type(self).__name__} says where its tensors are")


@dataclass(frozen=True)
class RunSource(Source):
    """The checkpoint of a run. step: which one."""

    step: int

    def load(self, parts: Sequence[GPT]) -> None:
        from .checkpoint import load_model, step_path

        for part in parts:
            load_model(step_path(self.path / "checkpoints", self.step), part)


def open_source(path: str | Path, *, step: int | None = None, report: Callable[[str], None] = print) -> Source:
    """The model in `path`, which is a run's directory. Collective over the world if there are process groups.

    step: of a run's checkpoint; unset, the newest good one, and bad ones are reported.
    Communication, for a run: a few small objects, as each rank reads its share of the checkpoint's files and compares
    them with its manifest.
    Errors: FileNotFoundError if `path` is no run, or has no checkpoint of that step; CheckpointError for a damaged one.
    """
    from .checkpoint import choose_step

    path = Path(path)
    config = read_run_config(path)
    chosen = choose_step(path / "checkpoints", step, report)
    return RunSource(path, config.model.architecture, config.data.tokenizer, chosen)


def source_config(path: str | Path, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> RunConfig:
    """The configuration in which the model in `path` runs without being trained: a run's own one.

    Its layout becomes tensor parallelism alone, on as many ranks as the run's tensor-parallel ones. overrides: values
    that replace the ones found, {section: {key: value}}. FileNotFoundError if `path` is no run; ValueError for an
    override that does not exist.
    """
    path = Path(path)
    read_run_config(path)
    alone: dict[str, dict[str, Any]] = {
        "run": {"dir": str(path), "resume": False},
        "parallel": {
            "pipeline_parallel": 1,
            "data_parallel_replicate": 1,
            "data_parallel_shard": 1,
            "cpu_offload": False,
        },
        "train": {"microbatch_size": None},
    }
    return build_config(read_toml(path / "config.toml"), alone, overrides or {})
