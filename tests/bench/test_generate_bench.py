"""The bench `generate`: its rows, its gate and its model of the time, at tiny sizes."""

import pytest
import torch

from bench import generate as bench
from tpformer.models import GPTConfig

TINY = GPTConfig(vocab_size=50, vocab_multiple=1, seq_length=16, n_layers=2, hidden_size=8, n_heads=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CONFIG", TINY)
    monkeypatch.setattr(bench, "CONTEXTS", (4, 9))


def test_the_gate_passes_and_refuses_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    bench.check()
    right = bench.next_logits
    monkeypatch.setattr(bench, "next_logits", lambda *arguments: right(*arguments) + 1e-11)
    with pytest.raises(AssertionError, match="logits: error"):
        bench.check()


def test_rows_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "roofs", lambda: (1e9, 1e9))
    monkeypatch.setattr(bench, "timed", lambda function, repetitions: lambda: function() is None or 1e-3)
    threads = torch.get_num_threads()
    pairs = [(row["provider"], row["baseline"], row["ratio"]) for row in bench.rows(True)]
    assert torch.get_num_threads() == threads
    assert {("cached", "uncached", 1.0), ("8 texts", "1 text", 8.0), ("32 texts", "1 text", 32.0)} <= set(pairs)
    assert [baseline for _, baseline, _ in pairs].count("bytes and FLOPs") == 4


def test_the_prediction_by_hand() -> None:
    # a layer: 12 h^2 weights, 9 h biases (3 h, h, 4 h, h) and 4 h of norms; then the table and the last norm
    weights = 2 * (12 * 64 + 13 * 8) + 50 * 8 + 2 * 8
    kept = 2 * 2 * 3 * 9 * 8
    assert bench.predicted(9, 3, 1e9, 1e30) == pytest.approx(4 * (weights + kept) / 1e9)
    assert bench.predicted(9, 3, 1e30, 1e9) == pytest.approx(3 * (2 * weights + 4 * 2 * 9 * 8) / 1e9)
    assert bench.predicted(9, 1, 1e30, 1e9, cache=False) == pytest.approx(9 * (2 * weights + 2 * 2 * 9 * 8) / 1e9)
