"""A tiny dataset, and the configuration of a tiny run over it: fixtures for every test of training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tpformer.training.data import build_dataset


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """The prefix of a dataset of bytes: about 40 kB of Python."""
    folder = tmp_path_factory.mktemp("tiny-data")
    source = folder / "source"
    source.mkdir()
    for number in range(20):
        lines = [f"def function_{number}_{i}(x):\n    return x * {i} + {number}\n\n" for i in range(40)]
        (source / f"module_{number:02}.py").write_text("".join(lines))
    build_dataset([source], folder / "tiny", "bytes", quiet=True)
    return folder / "tiny"


@pytest.fixture(scope="session")
def tiny_values_in(tiny_data) -> Callable[[Path], dict[str, dict]]:
    """tiny_values_in(folder): the sections of a run in folder/run, whose steps take milliseconds."""
    return lambda folder: {
        "run": {"dir": str(folder / "run")},
        "model": {"seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 4},
        "data": {"train": [str(tiny_data)], "valid": [str(tiny_data)]},
        "train": {"steps": 6, "global_batch_size": 4, "validation_samples": 4},
        "optimizer": {"warmup_steps": 2},
        "checkpoint": {"interval": 2},
        "log": {"interval": 1, "plot": False, "tensorboard": False},
    }


@pytest.fixture
def tiny_values(tiny_values_in, tmp_path) -> dict[str, dict]:
    """The sections of a run in the test's own folder: change a copy, then build_config it or write it as TOML."""
    return tiny_values_in(tmp_path)
