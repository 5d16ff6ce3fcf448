"""The bench `in_place`: its row at a tiny size, and a gate that refuses what differs."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bench import in_place as bench

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 1024}


class Toy(nn.Module):
    """Its loss is its weight times the ids, and `noticed` is the share of the gradient that it gets."""

    def __init__(self, weight: float, noticed: float) -> None:
        super().__init__()
        self.weight, self.noticed = nn.Parameter(torch.tensor(weight)), noticed

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        weight = self.weight * self.noticed + self.weight.detach() * (1 - self.noticed)
        return SimpleNamespace(loss=(weight * input_ids).sum())


def test_a_row_of_the_bench(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", TINY)
    (row,) = bench.rows(True)
    assert (row["provider"], row["baseline"], row["bar"]) == (bench.OURS, bench.THEIRS, 1.2)
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["value"] > 0


def test_the_gate_refuses_another_loss_or_gradient() -> None:
    right, ids = Toy(1.0, 1.0), torch.arange(4)
    bench.compare({bench.OURS: right, bench.THEIRS: Toy(1.0, 1.0)}, ids)
    for other, what in ((Toy(1.01, 1.0), "loss: error"), (Toy(1.0, 0.99), "gradient of weight: error")):
        with pytest.raises(AssertionError, match=what):
            bench.compare({bench.OURS: other, bench.THEIRS: right}, ids)
