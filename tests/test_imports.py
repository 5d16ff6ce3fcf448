"""Imports need nothing that some machines lack, and load torch only where there are tensors."""

import subprocess
import sys
from pathlib import Path

import pytest
from turns import of_turn

EXAMPLE = str(Path(__file__).parents[1] / "examples/gpt_tiny.toml")

# runs each program in a fork of an interpreter that has imported torch alone, which takes longer than all the rest
FORKS = """
import importlib, os, pkgutil, sys, torch
assert not {"triton", "tpformer"} & sys.modules.keys()
def import_all(but):
    import tpformer
    names = [module.name for module in pkgutil.walk_packages(tpformer.__path__, "tpformer.")]
    names = [name for name in names if not name.startswith(but)]
    assert len(names) > 30, names
    for name in names:
        importlib.import_module(name)
for number, program in enumerate(sys.argv[2:]):
    if os.fork() == 0:
        output = os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        exec(program, {"__name__": "a program in a test", "import_all": import_all})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""

# hides packages, as if they were not installed
HIDE = """
import importlib.machinery, sys
hidden = set("{}".split())
Path = importlib.machinery.PathFinder
class Finder(Path):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            path = [folder for folder in path or sys.path if "site-packages" not in folder]
        return Path.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(Path)] = Finder
"""

BLOCK = """
# the command needs tyro, the fused transport triton, the harness its package
later = ("tpformer.cli.run", "tpformer.ops.transports.fused", "tpformer.inference.lm_eval")
import_all(but=("tpformer.cli.", *later))
for name in later:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert any(f"No module named '{package}" in str(error) for package in hidden), error
    else:
        raise AssertionError(f"{name} can be imported, so this shows nothing")
hidden.remove("tyro")
import tpformer.cli.run
"""

USE = """
import torch
from tpformer.layers import transformer_block
x = torch.randn(2, 8, 32, requires_grad=True)
torch.nn.Sequential(transformer_block(32, n_heads=4))(x).sum().backward()
assert x.grad.abs().sum() > 0 and not torch.distributed.is_initialized() and not torch.cuda.is_available()
"""


NO_DRIVER = """
import ctypes, io, sys, torch
DRIVER = ("libcuda.so", "libcudnn", "libnvidia-ml")
def refuse(event, arguments):
    if event == "ctypes.dlopen" and arguments and any(name in str(arguments[0]) for name in DRIVER):
        raise OSError(f"{arguments[0]}: cannot open shared object file: No such file or directory")
sys.addaudithook(refuse)
import_all(but="tpformer.inference.lm_eval")  # for the extra eval, which need not be installed
from tpformer.models import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=9, seq_length=4, n_layers=1, hidden_size=8, n_heads=2))
ids = torch.zeros(1, 4, dtype=torch.long)
model(ids, targets=ids).backward()
torch.save(model.state_dict(), io.BytesIO())  # this conversion died elsewhere on a machine without a GPU
assert not torch.cuda.is_initialized()
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    assert "libcuda.so.1: cannot open" in str(error)
else:
    raise AssertionError("this program would not notice")
"""

LISTED = f"import sys, torch\nbefore = set(sys.modules)\n{USE}\nprint(*sorted(set(sys.modules) - before))"
# packages that `import tpformer.layers` may import; besides torch they take half a second, most of it torch.distributed
LAYERS = {"einops", "numpy", "packaging", "torch", "tpformer", "typing_extensions"}
# parts of torch that take half a second to two, and that a layer without a mesh does not need
SLOW = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.onnx"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[tuple[str, str]]:
    """The exit code and the output of BLOCK and of LISTED."""
    block = HIDE.format("triton tyro matplotlib tensorboard tokenizers lm_eval wandb") + BLOCK
    folder = tmp_path_factory.mktemp("programs")
    done = python("-c", FORKS, str(folder), block + USE, LISTED)
    assert done.returncode == 0, done.stderr
    return [(code, (folder / str(number)).read_text()) for number, code in enumerate(done.stdout.split())]


def test_everything_imports_and_a_layer_works_without_triton_and_all_but_the_command_without_tyro(results):
    assert results[0][0] == "0", results[0][1]


@of_turn(1)
def test_importing_and_converting_needs_no_libcuda(tmp_path):
    """Item 3 of tests/regressions. Fails if the import of any module opens the driver or initialises CUDA."""
    done = python("-c", FORKS, str(tmp_path), NO_DRIVER)
    assert done.stdout.split() == ["0"], done.stderr + (tmp_path / "0").read_text()


def test_layers_import_little_beside_torch_and_use_it_before_the_rest(results):
    code, output = results[1]
    assert code == "0", output
    names = set(output.splitlines()[-1].split())
    assert "tpformer.layers.block" in names and not names & SLOW
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names - LAYERS <= {"__mp_main__"}


@pytest.mark.parametrize(("code", "arguments", "said"), [
    (0, ["--version"], "tpformer 0."),
    (0, ["--help"], "tpformer COMMAND"),
    (0, ["pretrain", "--help"], "--model.n-layers"),
    (2, ["generate", "missing"], "missing is not a run"),
    (2, ["pretrain", "examples/absent.toml"], "no configuration file examples/absent.toml"),
    (2, ["pretrain", "run.toml", "--model.n-layer", "3"], "--model.n-layer"),
    (2, ["pretrain", "run.toml", "--parallel.tensor-parallel", "5"], "n_heads=12 cannot be split"),
    (2, ["pretrain", "run.toml"], "missing.bin does not exist"),
    (2, ["pretrain", EXAMPLE], "data/stdlib_train.bin does not exist"),
])  # fmt: skip
def test_help_and_mistakes_are_answered_without_torch(tmp_path, monkeypatch, code, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[data]\ntrain = ["missing"]\n[model]\nvocab_size = 100\n')
    result = python("-X", "importtime", "-m", "tpformer.cli", *arguments)
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time")}
    assert said in result.stdout + result.stderr and "Traceback" not in result.stderr
    assert result.returncode == code and [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert "tpformer.processes.launch" in imported and "torch" not in imported
    assert said not in ("tpformer 0.", "tpformer COMMAND") or "tyro" not in imported
