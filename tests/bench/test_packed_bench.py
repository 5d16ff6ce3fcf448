"""The bench of packed runs: what it counts, what it calls a problem, and the page beside its results."""

import copy
import json

import torch

from bench import packed
from bench.live import Live
from bench.provenance import RESULTS

COMMITTED = json.loads((RESULTS / "cpu" / "packed.json").read_text())


def test_the_most_bytes_alive_at_once_by_hand() -> None:
    before = torch.ones(1000)
    with Live([before]) as live:
        x = torch.ones(250)  # 1000 bytes
        y = x + 1  # 2000
        del x
        z = torch.cat([y, y])  # 3000
        z[3:].add_(1)  # a view, and memory that is there
        del y
        before.mul_(2)
        torch.ones(125)  # 2500
    assert live.peak == 3000


def test_the_committed_results_hold_and_are_on_the_page() -> None:
    assert packed.problems_of(COMMITTED) == []
    assert {row["steps"] for row in COMMITTED["rows"]} == {packed.STEPS}
    text = packed.PAGE.read_text()
    assert packed.page(text, COMMITTED) == text, "run python -m bench packed"


def test_other_bits_a_high_peak_and_a_slow_layer_are_problems() -> None:
    content = copy.deepcopy(COMMITTED)
    content["rows"][0]["same_parameters"] = False
    content["rows"][1]["packed"] = 0
    content["large"]["peaks"][1]["step"] = int(0.9 * content["large"]["peaks"][0]["step"])
    content["predicted"][1]["forward"] *= 2
    first, second, peak, slow = packed.problems_of(content)
    assert first == "1 rank, recompute none: the packed run has other bits"
    assert second == "1 rank, recompute mlp: nothing was packed"
    assert peak == "the peak of a step is 10.0% lower, not 15%" and slow.startswith("hidden 8192: packing is predicted")
