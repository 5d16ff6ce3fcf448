"""Sites that a slow link joins: the seconds of a step by hand, and the table. test_search.py has what is refused."""

import math

from tpformer.config import build_config
from tpformer.planner.sites import Sites, link_of, round_seconds, sites_table, synchronous_seconds

CONFIG = build_config({"model": {"preset": "gpt2-1.5b", "vocab_size": 50257}})
STEP, LATENCY, GIGABIT = 1.2, 0.03, 1e9 / 8
SITES = Sites(2, link_of("1Gb/s", LATENCY))


def test_a_step_by_hand():
    """Each of two sites sends all parameters once; of three sites each sends four thirds of them. A fragment that has
    less to travel than its delay costs nothing."""
    n = CONFIG.model.n_parameters
    assert math.isclose(synchronous_seconds(CONFIG, STEP, SITES, 2), STEP + 2 * n / GIGABIT + 2 * LATENCY)
    rounds = {
        "diloco every=1": 4 * n / GIGABIT + 2 * LATENCY,
        "diloco every=30": (4 * n / GIGABIT + 2 * LATENCY) / 30,
        "diloco every=100 send=int8": ((1 + 4 / 256) * n / GIGABIT + 2 * LATENCY) / 100,
        "diloco every=100 send=bfloat16": (2 * n / GIGABIT + 2 * LATENCY) / 100,
        "diloco every=100 fragments=4 delay=20": 0.0,
        "diloco every=100 fragments=4 delay=5": (4 * n / GIGABIT + 2 * LATENCY - 4 * 5 * STEP) / 100,
    }
    for text, wanted in rounds.items():
        assert math.isclose(round_seconds(CONFIG, STEP, SITES, text) - STEP, wanted, abs_tol=1e-12), text
    three = Sites(3, SITES.link)
    assert math.isclose(round_seconds(CONFIG, STEP, three, "diloco every=1") - STEP, 16 / 3 * n / GIGABIT + 4 * LATENCY)
    coded = round_seconds(CONFIG, STEP, three, "diloco every=1 send=bfloat16") - STEP
    assert math.isclose(coded, 4 * n / GIGABIT + 4 * LATENCY)


def test_the_table_has_a_row_for_each_link():
    table = sites_table(CONFIG, STEP, [SITES, Sites(2, link_of("500 Mb/s", 0.0))])
    assert list(table.columns[0].cells) == ["1 Gb/s, 30 ms", "0.5 Gb/s, 0 ms"]
    assert all(cell == f"{STEP:.2f}" for cell in table.columns[1].cells)


def test_the_command_shows_a_sites_layout_and_the_table(commands):
    code, out, err = commands.run("plan", "--preset", "gpt2-124m", "--gpus", "4", "--batch", "64", "--within",
                                  "tp=1,pp=1", "--sites", "2", "--between", "1Gb/s")  # fmt: skip
    assert code == 0 and "2 sites, each 2 x h100 in tp=1,pp=1,dp=2" in out and "1 Gb/s, 30 ms" in out, out + err
