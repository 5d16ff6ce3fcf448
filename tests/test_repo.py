"""The repository keeps its own rules: import arrows, sizes, a README whose paths and commands exist, live config keys.

Source is read as text and syntax trees; nothing of tpformer but its configuration is imported.
"""

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from tpformer.config import RunConfig

ROOT = Path(__file__).parent.parent
FILES = [
    ROOT / name
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()
]
PYTHON = [path for path in FILES if path.suffix == ".py"]
PROSE = [path for path in FILES if path.suffix == ".md"]

# what each part may import of tpformer, beside itself
ARROWS = {
    "kernels": [],
    "tpformer/config": [],
    "tpformer/distributed": ["kernels"],
    "tpformer/processes": ["distributed"],
    "tpformer/ops": ["kernels", "config", "distributed"],
    "tpformer/layers": ["kernels", "config", "distributed", "ops"],
    "tpformer/models": ["kernels", "config", "distributed", "ops", "layers"],
    "tpformer/parallel": ["kernels", "config", "distributed", "ops", "layers"],
    "tpformer/training": ["kernels", "config", "distributed", "processes", "ops", "layers", "models", "parallel"],
    # a dry run builds a run's ranks as training does; nothing but the command imports it
    "tpformer/planner": ["kernels", "config", "distributed", "ops", "layers", "models", "parallel", "training"],
    "tpformer/cli.py": ["config", "processes", "parallel", "training", "planner"],
    "checks": ["kernels"],
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(path: Path) -> set[str]:
    """Absolute module names that a file imports, relative imports resolved."""
    package = list(path.relative_to(ROOT).parts[:-1])
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from tpformer import ops` imports the subpackage
            modules |= {f"{module}.{alias.name}" for alias in node.names} if module == "tpformer" else {module}
    return modules


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
                assert target in [own, *ARROWS[part]], f"{name(path)} imports {module}"
            assert root not in ("bench", "checks", "tests", "examples") or root == part, (
                f"{name(path)} imports {module}"
            )
            assert root != "kernels" or part == "kernels", f"{name(path)}: write tpformer.kernels"


def test_every_part_has_an_arrow():
    parts = {"/".join(name(path).split("/")[:2]) for path in PYTHON if name(path).startswith("tpformer/")}
    assert parts - {"tpformer/__init__.py"} <= set(ARROWS)


def test_sizes():
    for path in PYTHON:
        text = path.read_text()
        assert text.count("\n") <= 400, name(path)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                limit = 150 if node.name.endswith("_kernel") else 80
                assert node.end_lineno - node.lineno + 1 <= limit, f"{name(path)}:{node.lineno} {node.name}"


def test_every_file_says_what_it_is():
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or not tree.body, f"{name(path)} has no module docstring"


def test_no_module_state():
    """Module-level containers and objects are constants by name, or types, or the one registry of workspaces."""
    for path in PYTHON:
        if not name(path).startswith(("tpformer/", "kernels/")):
            continue
        for node in ast.parse(path.read_text()).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                text = ast.unparse(target)
                constant = text.strip("_").isupper() or text.startswith("__") or text[0].isupper()
                function = text in ("all_gather_single", "reduce_scatter_single")
                assert constant or function, f"{name(path)}:{node.lineno} {text}"


def test_every_operation_has_reference_cost_and_tests():
    for folder in sorted(path for path in (ROOT / "kernels").iterdir() if (path / "reference.py").exists()):
        text = (folder / "reference.py").read_text()
        functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        # philox is not an operation of its own: it makes the random words of others
        assert folder.name == "philox" or f"{folder.name}_cost" in functions, folder.name
        assert list((ROOT / "tests/kernels").glob(f"test_{folder.name}_*.py")), (
            f"no tests/kernels/test_{folder.name}_*.py"
        )
        assert ".float()" not in text, f"{folder.name}: upcast by promote_types"


def test_every_config_field_is_read():
    sources = [path for path in PYTHON if name(path).startswith(("tpformer/", "kernels/"))]
    read = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    for section in dataclasses.fields(RunConfig):
        for field in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            assert field.name in read, f"{section.name}.{field.name} is read nowhere"


def test_no_unfinished_marks():
    for path in PYTHON:
        if path != Path(__file__):
            found = re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
            assert not found, f"{name(path)}: {found}"


@pytest.mark.parametrize("path", PROSE, ids=name)
def test_prose_names_what_exists(path):
    text = path.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (path.parent / link).exists(), f"{name(path)} links to {link}"
    roots = "tpformer|kernels|tests|bench|checks|examples|docs"
    for mention in re.findall(rf"`((?:{roots})/[\w./-]*)`", text):
        assert (ROOT / mention).exists(), f"{name(path)} mentions {mention}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert target in targets, f"{name(path)} mentions make {target}"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def readme_commands() -> list[str]:
    lines = "".join(readme_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.split(" #")[0].strip()]


def test_readme_commands_are_those_of_the_project():
    """Every program and file in them exists; tests/test_readme.py runs them."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = readme_commands()
    assert len(commands) > 5
    for line in commands:
        words = [word for word in line.split() if "=" not in word]
        assert words[0] in ("make", "python3") or words[0].startswith(".venv/bin/"), line
        assert words[0] != "make" or words[1] in targets, line
        for file in re.findall(r"(?:examples|bench|checks|tests|docs)/\S+", line):
            assert (ROOT / file).exists(), line


def test_readme_snippets_run():
    for block in readme_blocks("python"):
        assert block.count("\n") <= 12, "a snippet is at most 12 lines"
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_readme_names_six_files_to_read():
    section = (ROOT / "README.md").read_text().split("## Read the code")[1].split("##")[0]
    assert len(re.findall(r"^\d+\. ", section, re.M)) == 6
