"""The numbers of docs/moe.md follow from formulas, presets and fields; test_results.py has those that are measured."""

import dataclasses
import re
import sys

from test_repo import ROOT

sys.path.insert(0, str(ROOT))  # the repository is not installed as a whole

from checks.layout_cases import MOE_CASES  # noqa: E402
from tpformer.config import ModelSection, TrainSection, preset_config  # noqa: E402

PAGE = (ROOT / "docs/moe.md").read_text()


def table(header: str) -> list[list[str]]:
    """The cells of the rows below a header that begins so."""
    lines = PAGE.split(f"\n| {header}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def gather(ranks: int) -> float:
    """Rows that a rank receives, over all rows, if all ranks send all to all."""
    return (ranks - 1) / ranks


def all_to_all(ranks: int, k: int) -> float:
    """The same, if a row is sent once to each of its experts. Each rank has as many rows, and as many experts."""
    return gather(ranks) * k / ranks


def one_copy(ranks: int, k: int) -> float:
    """The same, if a row is sent once to each rank that has experts of it, for independent choices."""
    return gather(ranks) * (1 - (1 - 1 / ranks) ** k)


def test_volumes():
    rows = table("ranks of experts")
    assert [row[0] for row in rows] == ["4", "8", "64"]
    for cells in rows:
        ranks = int(cells[0])
        wanted = [[gather(ranks)], *([of(ranks, k) for k in (2, 4, 6, 8)] for of in (all_to_all, one_copy))]
        assert cells[1:] == [" / ".join(f"{share:.2f}" for share in shares) for shares in wanted]
    assert f"{gather(8) / one_copy(8, 8):.1f} times less" in PAGE and f"{gather(8) / one_copy(8, 2):.1f} times" in PAGE
    ratios = [gather(64) / all_to_all(64, k) for k in (8, 2)]
    assert "{:.0f} to {:.0f} times as much".format(*ratios) in PAGE


def test_memory():
    rows = table("model | h")
    assert len(rows) == 3
    for _, h, f, k, kept in rows:
        assert float(kept) == round(2 + 4 * int(k) * int(f) / int(h), 1)
    for cells, name in zip(rows, ("mixtral-8x7b", "qwen3-30b-a3b"), strict=False):
        config = preset_config(name)
        assert [int(cell) for cell in cells[1:4]] == [config.hidden_size, config.expert_size, config.experts_per_token]


def test_presets():
    rows = table("preset")
    assert len(rows) == 3
    for name, parameters, active, routed in rows:
        config = preset_config(name)
        assert parameters == f"{config.n_parameters / 1e9:.1f}B"
        assert active == f"{config.n_active_parameters / 1e9:.1f}B"
        assert routed == f"{config.n_experts}, {config.experts_per_token}"


def test_all_keys_of_experts_are_listed_with_their_defaults():
    listed = {}
    for keys, defaults, _ in table("key"):
        listed |= dict(zip(re.findall(r"[a-z_.]+", keys), defaults.split(", "), strict=True))
    sections = {"model": ModelSection, "train": TrainSection}
    fields = {
        f"{name}.{field.name}": field.default
        for name, section in sections.items()
        for field in dataclasses.fields(section)
        if re.search("expert|router|balance|first_dense", field.name) and field.name != "expert_capacity"
    }
    unset = {"model.n_experts": "none", "model.expert_ffn_size": "that of an MLP"}
    assert listed == {key: unset.get(key, str(value).lower()) for key, value in fields.items()} | unset
    assert "`expert_capacity`" in PAGE


def test_the_number_of_layouts():
    assert f"trains {len(MOE_CASES)} layouts" in PAGE
