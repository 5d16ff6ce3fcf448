"""The pages of docs/: pictures are what their script draws, names of ours exist.

`make docs` follows links, and needs all pages in the menu. test_readme.py runs commands and code.
"""

import dataclasses
import inspect
import json
import pydoc
import re
import runpy

import pytest
from test_repo import ROOT

from tpformer.cli import COMMANDS
from tpformer.config import RunConfig, build_config, check_config

PICTURES = ROOT / "docs/pictures"


def test_pictures_are_what_their_script_draws():
    draw = runpy.run_path(str(PICTURES / "draw.py"))
    for name, picture in draw["PICTURES"].items():
        assert (PICTURES / name).read_text() == picture(), f"docs/pictures/{name}: run python docs/pictures/draw.py"


def test_text_in_pictures_is_legible_on_a_phone():
    for path in PICTURES.glob("*.svg"):
        text = path.read_text()
        width = float(re.findall(r'viewBox="0 0 (\d+)', text)[0])
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?(\d+)px", text)]
        assert sizes and min(sizes) * (390 - 32) / width >= 11, path.name  # 32: a page's margins


ROWS = re.findall(r"^\| (?!---)(.+) \| (.+) \|$", (ROOT / "docs/coming_from.md").read_text(), re.M)
# values that keys of the tables are tried with
FITTING: dict = {"model": {"n_heads": 16, "hidden_size": 1024}, "train": {"global_batch_size": 1024}}
EXPERTS = {"n_experts": 64, "activation": "swiglu", "bias": False}


def look_up(cell: str) -> None:
    """AssertionError or ValueError for a command, key, value, Python name, argument or file that is not ours."""
    given: dict = {section: dict(values) for section, values in FITTING.items()}
    if re.search("expert|router_|balance_loss|first_dense", cell):
        given["model"] |= EXPERTS
    section = key = function = None
    for token in re.findall(r"`([^`]+)`", cell):
        found = re.fullmatch(r"(\w+)\.(\w+)(?: = (.+))?", token)
        if token.startswith("tpformer "):
            assert " ".join(token.split()[1:]) in COMMANDS, token
        elif token.startswith(("tpformer.", "torch.")):
            function = pydoc.locate(token)
            assert function is not None, token
        elif "/" in token:
            assert (ROOT / token).exists(), token
        elif found and found[1] in RunConfig.__dataclass_fields__:
            section, key, value = found.groups()
            fields = dataclasses.fields(RunConfig.__dataclass_fields__[section].default_factory)
            assert key in {field.name for field in fields}, token
            if value is not None:
                given.setdefault(section, {})[key] = json.loads(value)
        elif re.fullmatch(r"[a-z]\w+(=.+)?", token) and token != "torchrun":
            assert token.split("=")[0] in inspect.signature(function).parameters, token  # type: ignore[arg-type]
        elif not token.startswith("torchrun"):  # another value of the key before it
            given.setdefault(section, {})[key] = json.loads(token)
        check_config(build_config(given), trains=False)


def test_a_wrong_name_in_the_tables_is_noticed():
    wrong = ("tpformer train", "tpformer.layers.Linear", "parallel.tensor", 'parallel.recompute = "some"', "no/such.py")
    for token in (*wrong, "parallel.zero_stage`, `4", "tpformer.parallel.split_stages`, `shards=2"):
        with pytest.raises((AssertionError, ValueError)):
            look_up(f"x `{token}` y")


def test_names_of_ours_beside_those_of_others_exist():
    assert len(ROWS) > 100
    for _, here in ROWS:
        look_up(here)
