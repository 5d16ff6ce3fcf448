"""What a run says of settings without effect, and of its memory under a budget, on a device that is pretended."""

import pytest
import torch

from tpformer.config import build_config
from tpformer.training.summary import Reserved, notices

GIB = 2**30


def test_a_run_says_which_of_its_settings_do_nothing():
    config = build_config({"optimizer": {"decay_fraction": 0.5}, "train": {"device": "cpu"}})
    assert notices(config) == ['optimizer.decay_fraction=0.5 does nothing without optimizer.schedule = "wsd"']


@pytest.mark.parametrize("share, text", [
    (1.02, "memory after 2 steps: 40.80 GiB reserved, 40.00 GiB predicted"),
    (0.98, "memory after 2 steps: 39.20 GiB reserved, 40.00 GiB predicted"),
    (1.05, "warning: memory after 2 steps: 42.00 GiB reserved, 40.00 GiB predicted, 5.0% more"),
    (0.9, "warning: memory after 2 steps: 36.00 GiB reserved, 40.00 GiB predicted, 10.0% less"),
])  # fmt: skip
def test_memory_is_compared_once_after_the_second_step(share, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: round(share * 40 * GIB))
    said: list[str] = []
    reserved, none = Reserved(40 * GIB), Reserved(None)
    for step in range(4):
        reserved.compare(torch.device("cuda", 0), said.append)
        none.compare(torch.device("cuda", 0), said.append)
        assert said == [text] * (step > 0)
    other = Reserved(40 * GIB)
    for _ in range(3):
        other.compare(torch.device("cpu"), said.append)
    assert len(said) == 1, "a CPU has no such count"
