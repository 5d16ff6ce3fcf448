"""Damaged files end in one sentence: no other exception, no hang, and at most 200 MB of memory. Each file that a
stranger or a crash may leave is read as a command reads it, made to run something or to take all memory, and changed at
random, 500 times. test_checkpoint_faults.py has the pickles, test_command_ends.py the one line that a command says."""

import json
import os
import random
import re
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
from turns import in_turns

from tpformer.config import build_config, check_config, read_toml
from tpformer.training.checkpoint_files import MODEL, check_files, saved_tensors, write_checkpoint
from tpformer.training.companions import byte_tokenizer
from tpformer.training.data import IndexedDataset, build_dataset, load_tokenizer
from tpformer.training.metrics import cut_metrics
from tpformer.training.resolve import open_dataset, resolve
from tpformer.training.source import describe
from tpformer.weights.files import TensorFiles

MEMORY = 200 << 20
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


def read_checkpoint(path: Path) -> None:
    check_files(path.parent)
    saved_tensors(path.parent, MODEL)


def read_safetensors(path: Path) -> None:
    for name, spec in (files := TensorFiles(path.parent)).specs.items():
        files.slice(name)[tuple(slice(0, 1) for _ in spec.shape)]


READERS: dict[str, Callable[[Path], object]] = {
    "data.idx": lambda path: [*IndexedDataset(path.with_suffix(""), 300).chunks()],
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
HUGE, NESTED = struct.pack("<Q", 1 << 62), b"[" * 200_000
PICKLE = b"cposix\nmkdir\n(X\x03\0\0\0rantR."  # makes a directory when it is read
MALICIOUS = {
    "tokenizer.json": [PICKLE, NESTED],
    "run.toml": [b"[model]\nn_layers = \"__import__('os').mkdir('ran')\"\n", b"a = " + NESTED, PICKLE],
    "data.idx": [PICKLE, b"MMIDIDX\0\0" + struct.pack("<QB", 1, 3) + HUGE * 2],
    "data.json": [NESTED],
    "weights/model.safetensors": [PICKLE, HUGE + b"{}", struct.pack("<Q", 200_000) + NESTED],
    "model/config.json": [PICKLE],
}


def refuse(event: str, arguments: tuple) -> None:
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "os.fork"):
        raise SystemError(f"a damaged file has led to {event}{arguments}")


def read_all(folder: str, names: list[str], mutations: int) -> None:
    """Anything but the errors that a command says in a sentence is raised."""
    os.chdir(folder)
    sys.addaudithook(refuse)
    for name in names:
        path, read, chance = Path(name), READERS[name], random.Random(11)
        content = path.read_bytes()
        read(path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        made, refused = MALICIOUS.get(name, []), 0
        for changed in (*made, *(mutated(content, chance) for _ in range(mutations))):
            path.write_bytes(changed)
            signal.alarm(30)
            try:
                read(path)
            except (ValueError, FileNotFoundError) as error:
                refused += 1
                assert str(error) and "Traceback" not in str(error), changed
                assert refused > len(made) or path.name in str(error) or "model.n_layers" in str(error), changed[:50]
            except BaseException:
                path.with_name("culprit").write_bytes(changed)
                raise
        signal.alarm(0)
        path.write_bytes(content)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MEMORY, f"{name}: memory has grown by {grown >> 20} MiB"
        assert refused >= len(made) + mutations // 10, f"{name}: {refused} refused: were the files changed at all?"
    assert not Path("ran").exists()


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
    rows = (json.dumps({"step": step, "loss": 5.5 / step, "tokens": 64 * step}) + "\n" for step in range(1, 6))
    (folder / "metrics.jsonl").write_text("".join(rows))
    for name in ("weights", "model"):
        (folder / name).mkdir()
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, folder / "weights/model.safetensors")
    llama = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 32}
    (folder / "model" / "config.json").write_text(json.dumps(llama))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


@pytest.mark.parametrize(("names", "mutations"), [([*MALICIOUS], 0), *in_turns(([name], 500) for name in READERS)])
def test_damaged_and_malicious_files_are_refused_in_a_sentence(names, mutations, files, commands, tmp_path):
    copy = shutil.copytree(files, tmp_path / "files")
    code, out, err = commands.call(read_all, str(copy), names, mutations).finish()
    assert code == 0, out + err


def test_a_pipe_in_place_of_any_file_is_named_and_not_waited_for(files, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "files"))
    for name, read in READERS.items():
        path = Path(name)
        path.rename("kept")
        os.mkfifo(path)
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(path.name)):
            read(path)
        Path("kept").rename(path)
        read(path)
