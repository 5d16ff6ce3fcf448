"""Prose is true of the code: what it names or links to exists.

A name is looked up if it stands in backticks and cannot be an English word: it has an underscore, a capital within, or
parentheses behind it.
"""

import builtins
import re
from functools import cache
from pathlib import Path

from test_repo import FILES, PROSE, PYTHON, ROOT, name

# pages that tell what was, and so name what is gone
HISTORY = ("CHANGELOG.md", *(name(path) for path in PROSE if name(path).startswith("docs/log/")))
OTHERS = "docs/coming_from.md"  # names other systems' things; test_docs.py looks up ours
PAGES = [path for path in PROSE if name(path) not in (*HISTORY, OTHERS)]
FILE = re.compile(r"(?<![\w./*-])((?:[\w-]+/)*[\w.-]+\.(?:py|md|toml|json|svg|sh|yml))\b(?![\w/*(])")
UNLIKE_WORDS = r"\w*[a-z]_\w+|[A-Z]+[a-z]\w*[A-Z]\w*"
NAME = re.compile(rf"`(?:[\w.]*\.)?({UNLIKE_WORDS})(?:\([^`]*\))?`|`(?:[\w.]+\.)?([a-z]\w+)\([^`]*\)`")
# files that are no part of the repository: a run, a build or a user makes them, another project has them
ELSEWHERE = re.compile(
    r"[A-Z]{4}|-N\.|(^|/)(runs|build|data|checkpoints|my-model|plots|directory|pydoc_data)/"
    r"|^(run|config|saved|tokenizer|plan|timeline|pipeline|table|trainer|manifest|metrics|profile|module|model|file|start|state)\.\w+$"
    r"|^(tokenizer_config|special_tokens_map|generation_config)\.json$|\.index\.json$|-quick\.json$"
)
SOURCES = [path for path in FILES if path.suffix in (".py", ".toml", ".pml") or path.name == "Makefile"]


# (comment or string in three quotes, other string, name): a tokenizer in Python takes five times as long
TOKEN = re.compile(
    r"""(\#[^\n]*|[rf]*"{3}(?:\\.|[^\\])*?"{3})|('{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|([^\W\d]\w*)""",
    re.DOTALL,
)


@cache
def parts(path: Path) -> tuple[str, frozenset[str]]:
    """(prose, words) of a source: comments and strings in three quotes; names and the words of other strings."""
    if path.suffix != ".py":
        return "", frozenset(re.findall(r"\w+", path.read_text()))
    prose, words = [], set()
    for said, string, word in TOKEN.findall(path.read_text()):
        if said:
            prose.append(said)
        words.update([word] if word else re.findall(r"\w+", string))
    return "\n".join(prose), frozenset(words)


@cache
def known() -> tuple[set[str], set[str]]:
    """(ends of the paths of files, words of the sources)."""
    files = [name(path).split("/") for path in FILES]
    ends = {"/".join(file[-n:]) for file in files for n in range(1, len(file) + 1)}
    return ends, set(dir(builtins)).union(*(parts(path)[1] for path in SOURCES))


def missing(text: str) -> list[str]:
    """What a text names that does not exist."""
    files, words = known()
    absent = [file for file in FILE.findall(text) if file not in files and not ELSEWHERE.search(file)]
    return absent + [found[0] for found in NAME.finditer(text) if (found[1] or found[2]) not in words]


def test_a_wrong_name_is_noticed():
    absent = "`no_such_{0}`, `NoSuch{0}`, `nosuch{0}()`, kernels/no_such_{0}.py".format("thing")
    assert len(missing(f"See {absent} and `ops.column_linear(x)` in `RunConfig`.")) == 4


def test_files_and_names_exist():
    texts = {path: path.read_text() for path in PAGES} | {path: parts(path)[0] for path in PYTHON}
    assert {name(path): absent for path, text in texts.items() if (absent := missing(text))} == {}


def test_links_paths_and_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    roots = "tpformer|kernels|tests|bench|checks|examples|docs"
    for path in PROSE:
        text = path.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (path.parent / link).exists(), f"{name(path)} links to {link}"
        of_log = path.parent.name == "log"  # whose entries may name what is gone since
        for mention in [] if of_log else re.findall(rf"`((?:{roots})/[\w./-]*)`", text):
            assert (ROOT / mention).exists(), f"{name(path)} mentions {mention}"
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert target in targets, f"{name(path)} mentions make {target}"


def test_tests_named_in_the_readme_exist():
    rows = re.findall(r"\[`(test_\w+)`\]\((tests/[\w/.]+)\)", (ROOT / "README.md").read_text())
    assert len(rows) == 6
    for test, file in rows:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
