"""The repository keeps its own rules: import arrows and no circles, sizes, docstrings, no hidden state, live config
keys. Source is read as text and syntax trees. Prose is test_prose.py's, other rules are ruff's."""

import ast
import dataclasses
import functools
import graphlib
import re
import subprocess
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest
from changed import module_of
from commands import ROOT

from tpformer.config import RunConfig

LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FILES = [path for path in map(ROOT.joinpath, LISTED) if path.is_file() and not path.is_symlink()]
PYTHON = [path for path in FILES if path.suffix == ".py"]
LIBRARY = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("tpformer", "kernels")]
PROSE = [path for path in FILES if path.suffix == ".md"]

ANYWHERE = ("torch_private", "launchers", "version", "words")
# what each part may import of tpformer, beside itself and ANYWHERE: the table of CONTRIBUTING.md
ROWS = re.findall(r"^\| `([\w/.]+)`.* \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
ARROWS = {part.rstrip("/"): re.findall(r"`([\w/]+)`", allowed) for part, allowed in ROWS}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """(absolute module, name, name here) of all that a file imports, wherever it does. `import x` has no names."""
    parts = path.relative_to(ROOT).parts[:-1]
    package = ["tpformer", *parts] if parts[:1] == ("kernels",) else list(parts)
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
            told = node.args[0]
            first = told.values[0] if isinstance(told, ast.JoinedStr) else told
            if isinstance(first, ast.Constant):  # a variable's name tells nothing
                module = first.value
                yield resolve_name(module, ".".join(package)) if module.startswith(".") else module, "", ""


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports. `from tpformer import ops` imports the subpackage."""
    return {f"{module}.{part}" if module == "tpformer" and part else module for module, part, _ in imports(path)}


@pytest.mark.parametrize("part", ARROWS)
def test_imports_point_one_way(part):
    own = part.removeprefix("tpformer/").removesuffix(".py")
    files = [path for path in PYTHON if name(path) == part or name(path).startswith(part + "/")]
    assert files
    for path in files:
        for module in imported_modules(path):
            root, _, rest = module.partition(".")
            if root == "tpformer" and rest:
                target = rest.split(".")[0]
                assert target in [own, *ANYWHERE, *ARROWS[part]], f"{name(path)} imports {module}"
            outside = root in ("bench", "checks", "harness", "tests", "examples")
            assert not outside or root in (part.split("/")[0], *ARROWS[part]), f"{name(path)} imports {module}"
            assert root != "kernels" or part == "kernels", f"{name(path)}: write tpformer.kernels"


def test_benches_use_checks_and_no_check_uses_a_bench():
    for path in PYTHON:
        if name(path).startswith("checks/"):
            assert not [module for module in imported_modules(path) if module.split(".")[0] == "bench"], name(path)


def test_every_part_has_an_arrow():
    parts = {"/".join(name(path).split("/")[:2]) for path in PYTHON if name(path).startswith("tpformer/")}
    assert parts - {"tpformer/__init__.py"} | {"kernels", "harness", "checks/compile", "checks/execute"} == set(ARROWS)


def test_no_import_circle():
    """Imports for type checkers count, too: whoever reads one of the modules has to read all of them."""
    folders = ("tpformer/", "kernels/", "harness/", "bench/", "checks/")
    files = {module_of(name(path)): path for path in PYTHON if name(path).startswith(folders)}
    graph = {}
    for own, path in files.items():
        found = ((f"{module}.{part}", module) for module, part, _ in imports(path))
        graph[own] = {whole if whole in files else module for whole, module in found} & files.keys() - {own}
    assert sum(map(len, graph.values())) > len(graph), "imports are found at all"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_sizes():
    for path in PYTHON:
        assert path.read_text().count("\n") < 400, name(path)
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                limit = 150 if node.name.endswith("_kernel") else 60
                assert node.end_lineno - node.lineno + 1 <= limit, f"{name(path)}:{node.lineno} {node.name}"


# module-level names that a program changes while it runs, and why each is there
STATE = {
    ("tpformer/distributed/groups.py", "REGISTRY"): "the states of process groups end with the groups: weak keys",
    ("kernels/replay.py", "RECORDING"): "a context variable: the recording of the call that is under way",
    ("tpformer/ops/transports/interface.py", "REGISTRY"): "listeners, a run's transports, a step's blocks",
    ("tpformer/ops/weight_gradients.py", "ACTIVE_QUEUE"): "a context variable: the queue around a forward",
    ("tpformer/ops/recompute.py", "_RUN"): "a context variable: the region that runs, for the first or second time",
    ("tpformer/ops/packing.py", "_ACTIVE"): "a context variable: the packing around a forward",
    ("tpformer/ops/packing.py", "_ALLOWED"): "a context variable: whether a step that is repeated may pack",
    ("tpformer/ops/packing.py", "TALLIES"): "by device, what this process has packed since the last report",
    ("tpformer/layers/router.py", "LOSSES"): "a context variable: the balance losses of a forward",
    ("tpformer/ops/offload.py", "STREAMS"): "a device's copy stream, which all models share",
    ("tpformer/layers/dropout.py", "_NAMES"): "the names of a model's layers, which end with it: weak keys",
}
CHANGES = re.compile("add|append(left)?|clear|discard|extend|insert|pop(item|left)?|remove|reset|set(default)?|update")


def changed_names(tree: ast.Module) -> set[str]:
    """The names whose objects a file's functions change by elements, attributes and methods; ruff forbids `global`."""
    changed: set[str] = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        inner = node.func if called else node
        stored = isinstance(inner, ast.Subscript | ast.Attribute) and isinstance(inner.ctx, ast.Store | ast.Del)
        if stored or (called and CHANGES.fullmatch(inner.attr)):
            while isinstance(inner, ast.Attribute | ast.Subscript):
                inner = inner.value
            if isinstance(inner, ast.Name):
                changed.add(inner.id)
    return changed


def module_names(tree: ast.Module) -> set[str]:
    """The names that a file's top level assigns."""
    nodes = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in nodes for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def test_no_hidden_state():
    """No function changes what its file, or one that it imports from, assigns at its top, but for what is listed."""
    assigned = {(module_of(name(path)), each): name(path) for path in LIBRARY for each in module_names(tree_of(path))}
    state = set()
    for path in LIBRARY:
        changed, own = changed_names(tree_of(path)), module_of(name(path))
        found = [(own, each, each) for each in changed] + [each for each in imports(path) if each[2] in changed]
        state |= {(assigned[module, each], each) for module, each, _ in found if (module, each) in assigned}
    assert state == set(STATE)


def public(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """The public functions, classes and methods of a file or a class."""
    of_function = isinstance(tree, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, tree.bases)
    for node in tree.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not (of_function and node.name in ("forward", "backward")):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def test_public_names_have_docstrings():
    """forward and backward of an autograd Function are documented together, by their class."""
    names = {f"{name(path)}:{node.lineno} {node.name}": node for path in LIBRARY for node in public(tree_of(path))}
    missing = [where for where, node in names.items() if not ast.get_docstring(node)]
    assert len(missing) <= 0.05 * len(names), f"{len(missing)} of {len(names)} public names lack a docstring: {missing}"


def test_every_operation_has_reference_cost_and_tests():
    for reference in sorted((ROOT / "kernels").glob("*/reference.py")):
        operation, functions = reference.parent.name, {node.name for node in public(tree_of(reference))}
        # philox is not an operation of its own: it makes the random words of others
        assert operation == "philox" or f"{operation}_cost" in functions, operation
        assert list((ROOT / "tests/kernels").glob(f"test_{operation}_*.py")), f"no tests/kernels/test_{operation}_*.py"
        assert ".float()" not in reference.read_text(), f"{operation}: upcast by promote_types"


def test_every_config_field_is_read():
    nodes = [node for path in LIBRARY for node in nodes_of(path)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for section in dataclasses.fields(RunConfig):
        for field in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            assert field.name in read, f"{section.name}.{field.name} is read nowhere"


PRIVATE = ["tpformer/torch_private.py", "tpformer/distributed/symmetric.py"]
# pattern -> (where it is forbidden, the files that may have it, why)
FORBIDDEN = {
    r"\bNotImplemented[E]rror\b": ("", [], "what is there is finished"),
    r"\"torch\.(\w+\.)*_\w+\"": ("tpformer/", PRIVATE, "ruff does not see modules that are imported by their names"),
    r"\b(rtol|atol)[=]|\ballclose[(]": ("tests/", ["tests/testing.py"], "it derives tolerances"),
    r"\btl\.permute\(|\.T\b|\btl\.trans\((?!words\))": ("kernels/quantize/", [], "Triton moves 8-bit values through "
        "shared memory a byte at a time, and lost some: words of four are transposed, and what quantises is not"),
    r"assert .*\b(monotonic|perf_counter|process_time|time)\(\) - ": ("tests/", [], "a deadline only ends a hang"),
}  # fmt: skip


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_file_has(pattern):
    folder, allowed, why = FORBIDDEN[pattern]
    found = [name(path) for path in PYTHON if name(path).startswith(folder) and re.search(pattern, path.read_text())]
    assert set(found) == set(allowed), why
