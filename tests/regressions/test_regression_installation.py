"""Items 1, 2, 4, 5 and 8: installing needs no compiler, and importing no package beyond those declared.

README.md has a row for each of the 48 items, which names tests that exist; every test here is in its items' rows and
says when it fails.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

from test_repo import FILES, LIBRARY, ROOT, imports, name

HERE = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_items_01_02_05_nothing_is_compiled_at_installation():
    """Fails as soon as a C++ or CUDA source, or a build requirement other than setuptools, is committed. The checks
    build a driver in C, which is not installed."""
    sources = [name(path) for path in FILES if path.suffix in (".c", ".cc", ".cpp", ".cu", ".cuh", ".pyx")]
    assert sources == ["checks/driver/libcuda.c"]
    assert not {"setup.py", "setup.cfg", "CMakeLists.txt"} & {name(path) for path in FILES}
    assert [line.split(">")[0] for line in PROJECT["build-system"]["requires"]] == ["setuptools"]


def declared() -> set[str]:
    """Packages that a user's installation has, or may have."""
    project = PROJECT["project"]
    extras = ("plot", "hf", "parquet", "eval", "tensorboard", "wandb")
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {line.split(">")[0].split(";")[0].strip().replace("-", "_") for line in lines}


def test_item_04_only_declared_packages_are_imported():
    """Fails for an import of apex, transformer_engine, mpi4py or any package that pip would not have installed."""
    allowed = declared() | set(sys.stdlib_module_names) | {"tpformer"}
    assert "torch" in allowed and "apex" not in allowed
    for path in LIBRARY:
        for module, *_ in imports(path):
            assert module.split(".")[0] in allowed, f"{name(path)} imports {module}"


def test_item_08_triton_is_asked_for_on_linux_only():
    """Fails if pip on macOS or Windows is told to install triton, which has no wheel there. tests/test_imports.py shows
    that everything but the fused transport works without it."""
    (line,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("triton"))
    assert line.replace('"', "'").endswith("; platform_system == 'Linux'")


def functions(path: Path) -> dict[str, str]:
    """The docstrings of a file's functions by name; tests that a helper makes have none."""
    body = ast.parse(path.read_text()).body
    made = {each.id: "" for node in body for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)}
    return made | {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}


def test_every_item_has_a_row_and_every_test_in_it_exists():
    rows = dict(re.findall(r"^\| (\d+) \|(.*)\|$", (HERE / "README.md").read_text(), re.M))
    assert list(rows) == [str(number) for number in range(1, 49)]
    found = [pair for path in HERE.glob("test_*.py") for pair in functions(path).items()]
    ours = {name: text for name, text in found if name.startswith(("test_item_", "test_items_"))}
    for number, row in rows.items():
        named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", row)
        assert named, f"item {number} names no test"
        for file, test in named:
            assert test in (functions(ROOT / file) if file else ours), f"item {number}: {file or HERE.name}::{test}"
    for test, text in ours.items():
        assert "Fails " in text, f"{test} does not say when it fails"
        for number in re.findall(r"_(\d\d)(?=_)", test):
            assert f"`{test}`" in rows[str(int(number))], f"{test} is missing from the row of item {int(number)}"
