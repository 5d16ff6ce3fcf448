"""tpformer imports and computes where triton, CUDA and the command-line parser are absent, without a process group."""

import subprocess
import sys

BLOCK = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import tpformer
names = [m.name for m in pkgutil.walk_packages(tpformer.__path__, "tpformer.") if m.name not in SKIPPED]
assert len(names) > 30, names
for name in names:
    importlib.import_module(name)
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


TRITON = "tpformer.ops.transports.fused"  # what the fused transport is made of; imported when it is chosen


def run(script: str) -> None:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_everything_imports_and_a_layer_works_without_triton():
    run(f"BLOCKED, SKIPPED = {{'triton'}}, {{{TRITON!r}}}" + BLOCK + USE)


def test_all_but_the_command_works_without_tyro():
    blocked = {"tyro", "triton", "matplotlib", "tensorboard", "tokenizers"}
    run(f"BLOCKED, SKIPPED = {blocked}, {{'tpformer.cli', {TRITON!r}}}" + BLOCK)


def test_the_block_blocks():
    """The two tests above would pass without showing anything if the finder let triton through."""
    result = subprocess.run(
        [sys.executable, "-c", f"BLOCKED, SKIPPED = {{'triton'}}, {{{TRITON!r}}}" + BLOCK + "import triton"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0 and "triton is blocked" in result.stderr
