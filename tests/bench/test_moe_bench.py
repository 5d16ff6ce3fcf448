"""The bench of experts: its two models, what it requires, and its files and page from a run of few steps."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from commands import Commands, execute

from bench.moe import DENSE, EQUAL, SECTION, SPARSE, make_row, page, problems, settings
from tpformer.config import RunConfig, check_config

# Runs in a process of its own, and starts commands.
RUN = """
from multiprocessing import get_context
from types import SimpleNamespace
import bench.moe as moe
from bench.runner import main
from testing import build_small_split
from tpformer import cli

def fork(command, **options):  # a command without its imports
    assert command[:3] == [sys.executable, "-m", "tpformer.cli"] and options["cwd"] == moe.ROOT
    process = get_context("fork").Process(target=cli.main, args=(command[3:],))
    process.start(), process.join()
    return SimpleNamespace(returncode=process.exitcode, stderr="")

example = moe.read_toml(moe.EXAMPLE)
example["model"] |= {"hidden_size": 32, "n_layers": 1, "expert_ffn_size": 16, "seq_length": 16, "n_experts": 4}
example["train"] |= {"steps": 4, "global_batch_size": 8}
example["log"], example["parallel"] = {"interval": 2}, {}
moe.read_toml = lambda path: {section: dict(keys) for section, keys in example.items()}
moe.build_stdlib, moe.QUICK_STEPS, moe.SEEDS, moe.subprocess = build_small_split, 2, (3,), SimpleNamespace(run=fork)
results = Path(sys.argv[1])
assert main(["moe", "--quick"], [moe.BENCH], results) == 0 and not results.exists()
sys.exit(main(["moe"], [moe.BENCH], results))
"""


def config(name: str) -> RunConfig:
    return settings(name, Path("folder"), (Path("a"), Path("b")), 1, None)


def test_the_two_differ_in_experts_alone() -> None:
    sparse, dense = config(SPARSE), config(DENSE)
    check_config(sparse), check_config(dense)
    assert abs(sparse.model.n_active_parameters / dense.model.n_active_parameters - 1) < EQUAL
    assert sparse.model.n_parameters > 1.5 * dense.model.n_parameters
    for section in ("data", "parallel", "optimizer", "checkpoint", "log"):
        assert getattr(sparse, section) == getattr(dense, section)
    assert sparse.train.seed == dense.train.seed == 1 and sparse.train.steps == dense.train.steps


def content(sparse: float, dense: float, active: int = 1000) -> dict:
    def run(loss: float, **others: float) -> list[dict]:
        return [{"tokens_per_second": 9.0, **others}, {"tokens_per_second": 5.0, **others}, {"val_loss": loss}]

    rows = [
        make_row(SPARSE, config(SPARSE), [run(sparse, expert_load=1.5, expert_entropy=0.9)]),
        make_row(DENSE, config(DENSE), [run(dense)]),
    ]
    rows[0]["active_parameters"], rows[1]["active_parameters"] = active, 1000
    return {"rows": rows}


def test_what_is_required() -> None:
    assert problems(content(1.4, 1.5)) == []
    assert "not below the dense model's 1.5" in problems(content(1.5, 1.5))[0]
    assert "not below" in problems(content(float("nan"), 1.5))[0]
    assert "are 1.020 of the dense" in problems(content(1.4, 1.5, 1020))[0]
    row = content(1.4, 1.5)["rows"][0]
    assert row["tokens_per_second"] == 5 and row["expert_load"] == [1.5]


def test_the_section_is_replaced() -> None:
    result = {
        **content(1.4, 1.5), **{"tokens": 10**6, "steps": 600, "speed_ratio": 0.5, "date": "2026-11-25"},
        **{"machine": {"cpu": "a CPU", "cores": 2}, "versions": {"torch": "2.13"}},
    }  # fmt: skip
    before, after = "# Title\n\n## What\n\ntext\n\n", "\n## More\n\ntext\n"
    found = page(f"{before}{SECTION}\nold\n{after}", result)
    assert found.startswith(before + SECTION) and found.endswith(after) and "old" not in found
    assert "Experts end 0.100 nats/byte lower, at 0.50 of" in found and page(found, result) == found


@pytest.mark.timeout(300)
def test_a_run_writes_rows_and_picture(commands: Commands, tmp_path: Path) -> None:
    code, out, err = commands.call(execute, RUN, str(tmp_path / "results")).finish()
    assert code in (0, 1), err  # after few steps either may be ahead
    assert "nothing is written: called with an option" in out
    path = tmp_path / "results" / "cpu" / "moe.json"
    result = json.loads(path.read_text())
    sparse, dense = result["rows"]
    assert len(sparse["losses"]) == len(dense["losses"]) == 1 and result["seeds"] == [3]
    assert dense["expert_load"] is None and all(1 <= load <= 2 for load in sparse["expert_load"])
    assert result["tokens"] == 4 * 8 * 16 and bool(problems(result)) == code
    ElementTree.parse(path.with_suffix(".svg"))
