"""The pages of docs/: pictures are what their script draws, all pages are in the menu. `make docs` follows links."""

import importlib.util
import re

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
