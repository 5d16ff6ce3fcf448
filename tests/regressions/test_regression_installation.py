"""Items 1-6 and 8: installing and importing needs no compiler, no CUDA driver and no package beyond those declared."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_items_01_02_05_nothing_is_compiled_at_installation():
    """Fails as soon as a C++ or CUDA source, or a build requirement other than setuptools, is committed. The checks
    build a driver in C, which is not installed."""
    sources = [name for name in FILES if name.endswith((".c", ".cc", ".cpp", ".cu", ".cuh", ".pyx"))]
    assert sources == ["checks/driver/libcuda.c"]
    assert not {"setup.py", "setup.cfg", "CMakeLists.txt"} & set(FILES)
    assert [name.split(">")[0] for name in PROJECT["build-system"]["requires"]] == ["setuptools"]


def declared() -> set[str]:
    """Packages that a user's installation has, or may have."""
    project = PROJECT["project"]
    extras = (
        line
        for name in ("plot", "hf", "parquet", "eval", "tensorboard", "wandb")
        for line in project["optional-dependencies"][name]
    )
    return {line.split(">")[0].split(";")[0].strip().replace("-", "_") for line in (*project["dependencies"], *extras)}


def test_item_04_only_declared_packages_are_imported():
    """Fails for an import of apex, transformer_engine, mpi4py or any package that pip would not have installed."""
    allowed = declared() | set(sys.stdlib_module_names) | {"tpformer"}
    assert "torch" in allowed and "apex" not in allowed
    for name in FILES:
        if name.endswith(".py") and name.startswith(("tpformer/", "kernels/")):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    modules = [node.module]
                for module in modules:
                    assert module.split(".")[0] in allowed, f"{name} imports {module}"


def test_item_08_triton_is_asked_for_on_linux_only():
    """Fails if pip on macOS or Windows is told to install triton, which has no wheel there. tests/test_imports.py shows
    that everything but the fused transport works without it."""
    (line,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("triton"))
    assert line.replace('"', "'").endswith("; platform_system == 'Linux'")


NO_DRIVER = """
import ctypes, importlib, pkgutil, sys
DRIVER = ("libcuda.so", "libcudnn", "libnvidia-ml")
def refuse(event, arguments):
    if event == "ctypes.dlopen" and arguments and any(name in str(arguments[0]) for name in DRIVER):
        raise OSError(f"{arguments[0]}: cannot open shared object file: No such file or directory")
import torch
sys.addaudithook(refuse)
import tpformer
for module in pkgutil.walk_packages(tpformer.__path__, "tpformer."):
    if module.name != "tpformer.inference.lm_eval":  # for the extra eval, which need not be installed
        importlib.import_module(module.name)
from tpformer.models import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=9, seq_length=4, n_layers=1, hidden_size=8, n_heads=2))
ids = torch.zeros(1, 4, dtype=torch.long)
model(ids, targets=ids).backward()
torch.save(model.state_dict(), sys.argv[1])  # this conversion died elsewhere on a machine without a GPU
assert not torch.cuda.is_initialized()
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    assert "libcuda.so.1: cannot open" in str(error)
else:
    raise AssertionError("this script would not notice")
"""


def test_item_03_importing_and_converting_needs_no_libcuda(tmp_path):
    """Fails if the import of any module opens the driver or initialises CUDA."""
    command = [sys.executable, "-c", NO_DRIVER, str(tmp_path / "model.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
