"""Files of a stranger that were made to run something, or to take all memory: each command ends in one line."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
from commands import main

from tpformer.config import build_config, to_toml

LIMIT = 512 << 20  # bytes of address space that a command may take beyond what it began with
HUGE = struct.pack("<Q", 1 << 62)


class Runs:
    """Its pickle makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tiny_data, tiny_values, tmp_path) -> Path:
    """A run's configuration, its data, and a model's directory, all good."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(tiny_data.with_suffix(suffix), tmp_path / f"data{suffix}")
    tiny_values["data"] = {"train": [str(tmp_path / "data")], "valid": []}
    (tmp_path / "run.toml").write_text(to_toml(build_config(tiny_values, {"train": {"steps": 2}})))
    (tmp_path / "text.txt").write_text("a few words\n" * 20)
    (tmp_path / "model").mkdir()
    llama = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 32}
    (tmp_path / "model" / "config.json").write_text(json.dumps(llama))
    return tmp_path


def bounded(limit: int, *arguments: str) -> None:
    """A command that may not take more memory."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit,) * 2)
    main(*arguments)


PRETRAIN = ("pretrain", "run.toml")
BUILD = ("data", "build", "text.txt", "--out", "built", "--tokenizer", "tokenizer.json")
IMPORT = ("import", "model", "--out", "imported")
NESTED = b"[" * 200_000


@pytest.mark.parametrize(
    ("file", "content", "command"),
    [
        ("tokenizer.json", None, BUILD),
        ("tokenizer.json", NESTED, BUILD),
        ("run.toml", b"[model]\nn_layers = \"__import__('os').mkdir('ran')\"\n", PRETRAIN),
        ("run.toml", b"a = " + NESTED, PRETRAIN),
        ("run.toml", None, PRETRAIN),
        ("data.idx", None, PRETRAIN),
        ("data.idx", b"MMIDIDX\0\0" + struct.pack("<QB", 1, 3) + HUGE * 2, PRETRAIN),
        ("data.json", NESTED, PRETRAIN),
        ("model/model.safetensors", None, IMPORT),
        ("model/model.safetensors", HUGE + b"{}", IMPORT),
        ("model/model.safetensors", struct.pack("<Q", 200_000) + NESTED, IMPORT),
        ("model/config.json", None, IMPORT),
    ],
    ids=lambda value: None if isinstance(value, tuple | bytes) else str(value),
)
def test_it_is_refused_in_one_line_and_runs_nothing(commands, folder, monkeypatch, file, content, command):
    """content: of the file; None: a pickle that runs something."""
    monkeypatch.chdir(folder)
    (folder / file).write_bytes(pickle.dumps(Runs(folder / "ran")) if content is None else content)
    code, out, err = commands.call(bounded, LIMIT, *command).finish()
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in out + err, out + err
    assert any(name in err for name in (Path(file).name, "model.n_layers")) and not (folder / "ran").exists(), err
