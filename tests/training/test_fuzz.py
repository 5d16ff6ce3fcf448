"""Damaged files end in one sentence: no other exception, no hang, and at most 200 MB of memory.

Each file that a stranger or a crash may leave is read as a command reads it, made to run something or to take all
memory, and changed at random, 500 times; no process may be started meanwhile. test_checkpoint_faults.py has the
pickles of checkpoints, test_command_ends.py the one line that a command says.
"""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tpformer.config import build_config, check_config, read_toml
from tpformer.training.checkpoint_files import MODEL, saved_tensors, verify, write_checkpoint
from tpformer.training.companions import byte_tokenizer
from tpformer.training.data import IndexedDataset, build_dataset, load_tokenizer
from tpformer.training.metrics import cut_metrics
from tpformer.training.resolve import open_dataset, resolve
from tpformer.training.source import describe
from tpformer.weights.files import TensorFiles

MUTATIONS, MEMORY = 500, 200 << 20
NUMBERS = (*f'0 -1 1e999 NaN {"9" * 30} 4294967296 null "" [] {{}} true'.encode().split(), b"[" * 100_000)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four changes: bytes, cuts, repeats, and numbers that are not to be there."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice((0, 1, 2, 8, 40, len(content))))
        words = content[at:end][:100]
        large = struct.pack("<q", chance.choice((-1, 2**31, 2**62, 2**63 - 1)))
        between = (b"", chance.randbytes(len(words)), words * 2, words * 300, large, chance.choice(NUMBERS))
        content = content[:at] + chance.choice(between) + content[end:]
    return content


def read_dataset(path: Path) -> None:
    dataset = IndexedDataset(path.with_suffix(""), 300)
    dataset.tokens(0, dataset.n_tokens)


def read_checkpoint(path: Path) -> None:
    verify(path.parent)
    saved_tensors(path.parent, MODEL)


def read_safetensors(path: Path) -> None:
    for name, spec in (files := TensorFiles(path.parent)).specs.items():
        files.slice(name)[tuple(slice(0, 1) for _ in spec.shape)]


READERS: dict[str, Callable[[Path], object]] = {
    "data.idx": read_dataset,
    "data.json": lambda path: resolve(build_config({"data": {"train": [str(path.with_suffix(""))]}})),
    "pairs.mask": lambda path: open_dataset(str(path.with_suffix("")), 300, masked=True),
    "metrics.jsonl": lambda path: cut_metrics(path, 3),
    "step-1/manifest.json": read_checkpoint,
    "step-1/.metadata": read_checkpoint,
    "step-1/trainer.json": read_checkpoint,
    "run.toml": lambda path: check_config(build_config(read_toml(path))),
    "weights/model.safetensors": read_safetensors,
    "tokenizer.json": lambda path: load_tokenizer(str(path)).encode("text"),
    "model/config.json": lambda path: describe(path.parent),
}
RANDOM = [name for name in READERS if name != "model/config.json"]
HUGE, NESTED = struct.pack("<Q", 1 << 62), b"[" * 200_000


class Runs:
    """Its pickle makes a directory when it is read."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


PICKLE = pickle.dumps(Runs())
MALICIOUS = [
    ("tokenizer.json", PICKLE),
    ("tokenizer.json", NESTED),
    ("run.toml", b"[model]\nn_layers = \"__import__('os').mkdir('ran')\"\n"),
    ("run.toml", b"a = " + NESTED),
    ("run.toml", PICKLE),
    ("data.idx", PICKLE),
    ("data.idx", b"MMIDIDX\0\0" + struct.pack("<QB", 1, 3) + HUGE * 2),
    ("data.json", NESTED),
    ("weights/model.safetensors", PICKLE),
    ("weights/model.safetensors", HUGE + b"{}"),
    ("weights/model.safetensors", struct.pack("<Q", 200_000) + NESTED),
    ("model/config.json", PICKLE),
]


def read_malicious(folder: str) -> None:
    """Read files that were made to run something or to take all memory, of which there is little more."""
    os.chdir(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (512 << 20),) * 2)
    sys.addaudithook(refuse)
    for name, content in MALICIOUS:
        path = Path(name)
        good = path.read_bytes()
        READERS[name](path)
        path.write_bytes(content)
        try:
            READERS[name](path)
        except ValueError as error:
            assert any(word in str(error) for word in (path.name, "model.n_layers")), (name, content[:50], error)
        else:
            raise AssertionError(f"{name} was read: {content[:50]!r}")
        path.write_bytes(good)
    assert not Path("ran").exists()


def refuse(event: str, arguments: tuple) -> None:
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "os.fork"):
        raise SystemError(f"a damaged file has led to {event}{arguments}")


def read_all(name: str, folder: str, seed: int) -> None:
    """Read a file, then MUTATIONS changed ones. Anything but the errors that a command says in a sentence is raised."""
    path, read, chance = Path(folder, name), READERS[name], random.Random(seed)
    content = path.read_bytes()
    read(path)
    sys.addaudithook(refuse)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(MUTATIONS):
        path.write_bytes(changed := mutated(content, chance))
        signal.alarm(30)
        try:
            read(path)
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            assert str(error) and "Traceback" not in str(error), number
        except BaseException:
            path.with_name("culprit").write_bytes(changed)
            raise
    signal.alarm(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY, f"memory has grown by {grown >> 20} MiB"
    assert refused > MUTATIONS // 10, f"{refused} of {MUTATIONS} refused: were the files changed at all?"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("a few words\n" * 20)
    build_dataset([folder / "text.txt"] * 3, folder / "data", "bytes", quiet=True)
    (folder / "pairs.jsonl").write_text('{"prompt": "a few ", "completion": "words"}\n' * 20)
    build_dataset([folder / "pairs.jsonl"], folder / "pairs", "bytes", fields=("prompt", "completion"), quiet=True)
    write_checkpoint(folder / "step-1", {"a": torch.ones(3, 4), "b": torch.ones(5)}, 1)
    (folder / "run.toml").write_text(
        '[model]\nn_layers = 2\nhidden_size = 32\nn_heads = 2\nseq_length = 16\nvocab_size = 257\nnorm = "rmsnorm"\n'
        '[data]\ntrain = ["data"]\nweights = [1.0]\n[optimizer]\nlr = 1e-3\n[parallel]\ntensor_parallel = 2\n'
    )
    rows = [{"step": step, "loss": 5.5 / step, "tokens": 64 * step} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "weights").mkdir()
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, folder / "weights/model.safetensors")
    (folder / "model").mkdir()
    llama = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 32}
    (folder / "model" / "config.json").write_text(json.dumps(llama))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


def test_files_made_to_run_something_or_to_take_all_memory_are_refused_by_name(files, commands, tmp_path):
    copy = shutil.copytree(files, tmp_path / "files")
    code, out, err = commands.call(read_malicious, str(copy)).finish()
    assert code == 0, out + err


@pytest.mark.proof
@pytest.mark.parametrize("name", RANDOM)
def test_damaged_files_are_refused_in_a_sentence(name, files, commands, tmp_path):
    """Must show 3 of issue 16."""
    copy = shutil.copytree(files, tmp_path / "files")
    code, out, err = commands.call(read_all, name, str(copy), 11).finish()
    assert code == 0, out + err
