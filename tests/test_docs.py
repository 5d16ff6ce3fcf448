"""The documentation site: its pictures are what their script draws, every page is in its menu, and it builds."""

import importlib.util
import re
import subprocess
import sys

import pytest
from test_repo import ROOT

PICTURES = ROOT / "docs/pictures"


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name, picture in draw.PICTURES.items():
        assert (PICTURES / name).read_text() == picture(), f"docs/pictures/{name}: run python docs/pictures/draw.py"


def test_text_in_pictures_is_legible_on_a_phone():
    for path in PICTURES.glob("*.svg"):
        text = path.read_text()
        width = float(re.findall(r'viewBox="0 0 (\d+)', text)[0])
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?(\d+)px", text)]
        assert sizes and min(sizes) * (390 - 32) / width >= 11, path.name  # 32: a page's margins


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f" {page.name}\n" in menu, page.name


def test_the_site_builds_without_a_broken_link(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for page in ("index.html", "api/ops/index.html", "source/kernels/protocol.py/index.html"):
        assert (tmp_path / page).exists()
    loaded = r'<(?:link|script|img)[^>]*(?:href|src)="(https?:[^"]+)"'
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(loaded, page.read_text()), f"{page} loads from another host"
