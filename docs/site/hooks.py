"""What `make docs` adds to the pages in docs/: other Markdown files, the sources that pages link to, an API reference.

Pages are written for the repository, with links relative to their own file. Here each link is followed to the file it
names, that file gets a page, and the link is pointed at it. So the site needs nothing but itself.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Markdown files outside docs/ -> their pages
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "tests/regressions/README.md": "regressions.md",
}
API = (
    "in_place", "layers", "models", "ops", "parallel", "distributed", "processes", "config", "weights", "training",
    "inference", "planner",
)  # fmt: skip
INTERNAL = set((ROOT / "docs/site/internal.txt").read_text().splitlines())
COPIED = (".svg", ".png", ".json")  # a browser shows these as they are; any other file gets a page with its text
LINK = re.compile(r'(\]\(|(?:src|href)=")(?!https?:|#|mailto:)([^)"#\s]+)')
LOADED = re.compile(r'<(?:link|script|img)[^>]*(?:href|src)="(https?:[^"]+)"')


def on_files(files: Files, config: Any) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for package in API:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    pages = [source for file in files if file.src_uri.endswith(".md") and (source := repository_path(file.src_uri))]
    added: set[str] = set()
    while pages:
        source = pages.pop()
        for _, link in LINK.findall((ROOT / source).read_text()):
            target = followed(source, link)
            if site_path(target) is None and target not in added and (ROOT / target).exists():
                added.add(target)
                files.append(source_file(config, target))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    source = repository_path(page.file.src_uri)
    if source is None:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def pointed(found: re.Match[str]) -> str:
        target = followed(source, found[2])
        return found[1] + posixpath.relpath(site_path(target) or source_page(target), here or ".")

    return LINK.sub(pointed, markdown)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    if loaded := LOADED.findall(output):
        raise BuildError(f"{page.file.src_uri} loads from another host: {', '.join(loaded)}")
    return output


def followed(source: str, link: str) -> str:
    """The path in the repository that a link in `source` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def site_path(target: str) -> str | None:
    """The page that the site has of a file of the repository by itself, or None."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else None


def repository_path(page: str) -> str | None:
    """The inverse of `site_path`; None for a page that is made here."""
    if page.startswith(("api/", "source/")):
        return None
    return next((source for source, uri in OUTSIDE.items() if uri == page), f"docs/{page}")


def source_page(target: str) -> str:
    return f"source/{target}" if target.endswith(COPIED) else f"source/{target}.md"


def source_file(config: Any, target: str) -> File:
    """A copy, or a page with the text, of a file; for a folder a page with its names."""
    path = ROOT / target
    if target.endswith(COPIED):
        return File.generated(config, source_page(target), abs_src_path=str(path))
    if path.is_dir():
        text = "\n".join(f"- `{each.name}`" for each in sorted(path.iterdir()) if not each.name.startswith(("_", ".")))
    else:
        text = f"````{path.suffix.removeprefix('.') or 'text'}\n{path.read_text()}````"
    return File.generated(config, source_page(target), content=f"# {target}\n\n{text}\n")


def api_page(package: str) -> str:
    """The reference of the names that a package exports for users, or of its modules if it exports none."""
    folder = ROOT / "tpformer" / package
    tree = ast.parse((folder / "__init__.py").read_text())
    lines = [f"# tpformer.{package}", "", (ast.get_docstring(tree) or "").replace("Re-exports only.", ""), ""]
    # with the module that defines it, as a function may have the name of a module
    exported = {
        name.name: f"{'tpformer.' + package + '.' if node.level else ''}{node.module}.{name.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name not in INTERNAL
    }
    for name in sorted(exported, key=str.lower):
        # tpformer.kernels is a link to the folder kernels/
        lines += [f"::: {exported[name].replace('tpformer.kernels.', 'kernels.')}", ""]
    for path in sorted(folder.glob("[!_]*.py")) if not exported else []:
        lines += [f"::: tpformer.{package}.{path.stem}", "    options: {show_root_full_path: true}", ""]
    return "\n".join(lines)
