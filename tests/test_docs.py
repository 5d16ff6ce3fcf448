"""The pages of docs/: pictures are what their script draws, names of ours exist, the numbers of moe.md follow from
formulas, presets and fields. `make docs` follows links."""

import dataclasses
import importlib
import inspect
import json
import pydoc
import re
import runpy

import pytest
from test_repo import ROOT

from checks.layout_cases import MOE_CASES
from tpformer.cli import COMMANDS
from tpformer.config import Layout, ModelSection, RunConfig, TrainSection, build_config, check_config, preset_config
from tpformer.config.refused import REFUSED

PICTURES = ROOT / "docs/pictures"
ROWS = re.findall(r"^\| (?!---)(.+) \| (.+) \|$", (ROOT / "docs/coming_from.md").read_text(), re.M)
# values that keys of the tables are tried with
FITTING: dict = {"model": {"n_heads": 16, "hidden_size": 1024}, "train": {"global_batch_size": 1024}}
EXPERTS = {"n_experts": 64, "activation": "swiglu", "bias": False}
# docs/moe.md: tests/bench/test_results.py has the numbers that are measured
MOE = (ROOT / "docs/moe.md").read_text()


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


def test_the_log_and_the_site_list_all_days_newest_first():
    days = sorted((path.stem for path in (ROOT / "docs/log").glob("*.md")), reverse=True)
    for listing in ("docs/LOG.md", "mkdocs.yml"):
        assert re.findall(r"\blog/([\d-]+)\.md", (ROOT / listing).read_text()) == days, listing
    for day in days:
        text = (ROOT / f"docs/log/{day}.md").read_text()
        assert text.startswith(f"# {day}\n\n## ") and set(re.findall(r"^## (\S+): ", text, re.M)) == {day}


def test_what_the_site_leaves_out_exists():
    packages = [importlib.import_module(f"tpformer.{path.parent.name}") for path in ROOT.glob("tpformer/*/__init__.py")]
    for name in (ROOT / "docs/site/internal.txt").read_text().splitlines():
        first, _, member = name.partition(".")
        owners = [getattr(package, first, None) for package in packages]
        there = any(hasattr(owner, member or "__doc__") for owner in owners if owner is not None)
        assert there or name.startswith("#"), name


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
            fields = RunConfig.__dataclass_fields__[section].default_factory.__dataclass_fields__
            assert key in fields or f"{section}.{key}" in REFUSED, token
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


def table(header: str, page: str = MOE) -> list[list[str]]:
    """The cells of the rows below a header that begins so."""
    lines = page.split(f"\n| {header}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def received(ranks: int, k: int) -> tuple[float, float, float]:
    """Rows that a rank receives, over all rows, if each is sent to all, once to each of its k experts, or once to each
    rank that has experts of it. Each rank has as many rows, and as many experts, and choices are independent."""
    gather = (ranks - 1) / ranks
    return gather, gather * k / ranks, gather * (1 - (1 - 1 / ranks) ** k)


def test_volumes_of_experts():
    for cells, ranks in zip(table("ranks of experts"), (4, 8, 64), strict=True):
        gather, *others = zip(*(received(ranks, k) for k in (2, 4, 6, 8)), strict=True)
        wanted = [" / ".join(f"{share:.2f}" for share in shares) for shares in (gather[:1], *others)]
        assert cells == [str(ranks), *wanted]
    plain, once = ([received(p, k)[0] / received(p, k)[way] for k in (8, 2)] for p, way in ((64, 1), (8, 2)))
    assert f"{once[0]:.1f} times less" in MOE and f"{once[1]:.1f} times" in MOE
    assert "{:.0f} to {:.0f} times as much".format(*plain) in MOE


def test_memory_of_experts():
    *rows, _ = table("| h | f |", (ROOT / "docs/memory.md").read_text())
    assert len(rows) == 5
    for _, *cells in rows:
        (h, f, k, shared, n), (branch, routing) = map(int, cells[:5]), cells[5:]
        assert (branch, routing) == (f"{2 + 4 * (k * f + shared) / h:.3g}", f"{(12 * k + 4 * n) / h:.2f}")
    for row, name in zip(rows, ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"), strict=False):
        config = preset_config(name)
        assert row[1:4] == [str(size) for size in (config.hidden_size, config.expert_size, config.experts_per_token)]


def test_presets_of_experts():
    rows = table("preset")
    assert len(rows) == 3
    for name, *cells in rows:
        config = preset_config(name)
        sizes = [f"{number / 1e9:.1f}B" for number in (config.n_parameters, config.n_active_parameters)]
        assert cells == [*sizes, f"{config.n_experts}, {config.experts_per_token}"]


def test_all_keys_of_experts_are_listed_with_their_defaults_and_the_layouts_are_counted():
    listed = {}
    for keys, defaults, _ in table("key"):
        listed |= dict(zip(re.findall(r"[a-z_.]+", keys), defaults.split(", "), strict=True))
    wanted = {}
    for name, section in {"model": ModelSection, "parallel": Layout, "train": TrainSection}.items():
        for field in dataclasses.fields(section):
            if re.search("expert|router|balance|first_dense", field.name):
                wanted[f"{name}.{field.name}"] = str(field.default).lower()
    assert listed == wanted | {"model.n_experts": "none", "model.expert_ffn_size": "that of an MLP"}
    assert "`expert_capacity`" in MOE and f"trains {len(MOE_CASES)} layouts" in MOE
