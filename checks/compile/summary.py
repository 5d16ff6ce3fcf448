"""The committed page: the worst of each kernel's cases on each architecture.

Belongs here: what the page keeps of the rows, and when it may be written. What a row holds: rules.py.
"""

import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .rules import Row

INTRODUCTION = """\
# Compile check

`make compile-check` compiles every shipped kernel without a GPU, for each architecture, dtype, tile and variant, and
asserts on the code. A line below has the largest number that any case of a kernel shows on an architecture; registers
and spills are those of one thread, shared memory is that of one program. Releases, fences and acquires are those of
system scope, and stand in the code so often; in flight are the bytes that a warp has asked of global memory, TMA left
out, before it first uses any of them.
"""
NUMBERS = {
    "registers": "registers",
    "spilled bytes": "spills",
    "shared memory, bytes": "shared",
    "releases": "releases",
    "fences": "fences",
    "acquires": "acquires",
    "barriers": "barriers",
    "in flight, bytes": "in_flight",
}
COLUMNS = ("kernel", "architecture", "cases", *NUMBERS, "violations")


def page_body(rows: Sequence[Row], asked: str, versions: Mapping[str, str]) -> str:
    """Totals, versions and table in Markdown: all of the page that follows from the code and the compilers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["arch"]), []).append(row)
    lines = [
        f"{len(rows)} cases, {sum(len(row['violations']) for row in rows)} violations.",
        f"Of the code {asked}.",
        f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    for (kernel, arch), group in groups.items():
        worst = [max(row[column] or 0 for row in group) for column in NUMBERS.values()]  # type: ignore[literal-required]
        cells = [kernel, arch, len(group), *worst, sum(len(row["violations"]) for row in group)]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def clean_commit(results: Path) -> tuple[str, str]:
    """(the commit that is checked out, ""), or ("", why results must not name it): files beside them differ from it."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=results, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    results.mkdir(parents=True, exist_ok=True)
    commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ":/", ":(exclude).")
    if commit is None:
        return "", "this is no git checkout with a commit to name"
    return (
        ("", f"these changes are not committed, so no commit has this result:\n{changed}") if changed else (commit, "")
    )


def write_page(path: Path, commit: str, rows: Sequence[Row], asked: str, versions: Mapping[str, str]) -> str:
    """Write the page, and return a sentence that says so. asked: the hash of what Triton compiled for it (asked.py)."""
    return keep_page(path, commit, INTRODUCTION, page_body(rows, asked, versions))


def keep_page(path: Path, commit: str, introduction: str, body: str) -> str:
    """Write a page of results, and return a sentence that says so.

    A page whose body is the same is left alone, with the date and commit at which it was first obtained.
    """
    if path.exists() and path.read_text().endswith(f"\n{body}"):
        return f"{path} is up to date"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path.write_text(f"{introduction}\nFirst obtained on {today} at commit {commit}.\n{body}")
    return f"{path} is written"
