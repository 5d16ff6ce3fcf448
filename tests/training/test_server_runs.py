"""Whole runs by parameter servers, stopped and resumed."""

import pytest
from tiny_runs import losses, values_with
from turns import in_turns

from tpformer.config import build_config
from tpformer.training.trainer import Trainer


def losses_of_runs(values: dict, server: dict) -> list[list[tuple]]:
    """The losses of a whole run of four steps, and of one that stops after two and is resumed."""
    found = []
    for name, ends in (("whole", [4]), ("parts", [2, 4])):
        run = {"dir": f"{values['run']['dir']}-{name}", "resume": True}
        for steps in ends:
            Trainer(build_config(values, {"run": run, "parallel": server, "train": {"steps": steps}})).run()
        found.append(losses(run["dir"]))
    return found


@pytest.mark.parametrize("exchange", ["stale_server arrivals=0,1,1", *in_turns(["sync_server"], first=2)])
def test_a_run_that_is_resumed_is_one_that_was_not(ranks, done, tiny_values, exchange):
    optimizer = {"schedule": "constant", "warmup_steps": 0, "lr": 3e-3}
    values = values_with(tiny_values, data={"valid": []}, optimizer=optimizer, train={"microbatch_size": 1})
    server = {"data_parallel_replicate": 2, "exchange": exchange}
    whole, parts = ranks(2).run(losses_of_runs, values, server)[0]
    assert whole == parts and len(whole) == 4 and whole[-1][1] < whole[0][1]
    done("generate", f"{tiny_values['run']['dir']}-whole", "--max-new-tokens", "3")  # in one process, without workers
