"""Whole runs: their sections and their file, and the rows that they have written, a damage and a stop.

Belongs here: what several tests of runs share. The fixture `tiny_values` has the sections that they begin with.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tpformer.config import build_config, to_toml
from tpformer.training.metrics import read_metrics
from tpformer.training.trainer import Trainer


def values_with(values: dict, **sections: dict) -> dict:
    """The values with other keys in these sections."""
    return {name: {**values.get(name, {}), **sections.get(name, {})} for name in values.keys() | sections.keys()}


def write_run(folder: Path, values: dict, **sections: dict) -> str:
    """Write the TOML file of a run into the folder; return its path."""
    path = folder / "run.toml"
    path.write_text(to_toml(build_config(values, sections)))
    return str(path)


def flip(file: Path, at: int | None = None) -> None:
    """Flip a bit of a file, in the middle unless told otherwise."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def rows(directory: Path | str) -> list[dict]:
    """The rows of metrics so far, without those numbers that differ from run to run."""
    path = Path(directory, "metrics.jsonl")
    found = read_metrics(path) if path.exists() else []
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in found]


def losses(directory: Path | str) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(directory) if "loss" in row]


@contextmanager
def sigterm_in(step: int) -> Iterator[None]:
    """Within, each rank gets SIGTERM as it begins this step."""
    launch = Trainer._launch

    def launched(trainer: Trainer, *arguments):
        if trainer.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return launch(trainer, *arguments)

    with mock.patch.object(Trainer, "_launch", launched):
        yield
