"""Imports need nothing that some machines lack, and load torch only where there are tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[1] / "examples/gpt_tiny.toml")

BLOCK = """
import importlib, pkgutil, sys
class Block:
    blocked = {"triton", "tyro", "matplotlib", "tensorboard", "tokenizers", "lm_eval", "wandb"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import tpformer
# the command needs tyro, the fused transport triton, the harness its package
later = {"tpformer.cli.run", "tpformer.ops.transports.fused", "tpformer.inference.lm_eval"}
found = (module.name for module in pkgutil.walk_packages(tpformer.__path__, "tpformer."))
names = [name for name in found if name not in later and not name.startswith("tpformer.cli.")]
assert len(names) > 30, names
for name in names:
    importlib.import_module(name)
for name in later:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "is blocked" in str(error)
    else:
        raise AssertionError(f"the block lets {name} through, so it shows nothing")
Block.blocked.remove("tyro")
import tpformer.cli.run
"""

USE = """
import torch
from tpformer.layers import TransformerBlock
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = TransformerBlock(32, n_heads=4)
    def forward(self, x):
        return self.block(x)
x = torch.randn(2, 8, 32, requires_grad=True)
Mine()(x).sum().backward()
assert x.grad.abs().sum() > 0 and not torch.distributed.is_initialized() and not torch.cuda.is_available()
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500)


def test_everything_imports_and_a_layer_works_without_triton_and_all_but_the_command_without_tyro():
    result = python("-c", BLOCK + USE)
    assert result.returncode == 0, result.stderr


# packages that `import tpformer.layers` may import; besides torch they take half a second, most of it torch.distributed
LAYERS = {"einops", "numpy", "packaging", "torch", "tpformer", "typing_extensions"}
# parts of torch that take half a second to two, and that a layer without a mesh does not need
SLOW = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.onnx"}


def test_layers_import_little_beside_torch_and_use_it_before_the_rest():
    script = USE.replace("import torch\n", "import sys, torch\nbefore = set(sys.modules)\n", 1)
    result = python("-c", script + "print(*sorted(set(sys.modules) - before))")
    assert result.returncode == 0, result.stderr
    names = set(result.stdout.split())
    assert "tpformer.layers.block" in names and not names & SLOW
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names - LAYERS <= {"__mp_main__"}


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (0, ["--version"], "tpformer 0."),
        (0, ["--help"], "tpformer COMMAND"),
        (0, ["pretrain", "--help"], "--model.n-layers"),
        (2, ["generate", "missing"], "missing is not a run"),
        (2, ["pretrain", "examples/absent.toml"], "no configuration file examples/absent.toml"),
        (2, ["pretrain", "run.toml", "--model.n-layer", "3"], "--model.n-layer"),
        (2, ["pretrain", "run.toml", "--parallel.tensor-parallel", "5"], "n_heads=12 cannot be split"),
        (2, ["pretrain", "run.toml"], "missing.bin does not exist"),
        (2, ["pretrain", EXAMPLE], "data/stdlib_train.bin does not exist"),
    ],
)
def test_help_and_mistakes_are_answered_without_torch(tmp_path, monkeypatch, code, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[data]\ntrain = ["missing"]\n[model]\nvocab_size = 100\n')
    result = python("-X", "importtime", "-m", "tpformer.cli", *arguments)
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time")}
    assert said in result.stdout + result.stderr and "Traceback" not in result.stderr
    assert result.returncode == code and [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert "tpformer.processes.launch" in imported and "torch" not in imported
    assert said not in ("tpformer 0.", "tpformer COMMAND") or "tyro" not in imported
