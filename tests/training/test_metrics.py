"""metrics.jsonl survives kills and resumes; TensorBoard and the terminal show its numbers, and a loss curve is
drawn."""

import json
import sys
from types import SimpleNamespace

import pytest

from tpformer.training.metrics import MetricsLog, cut_metrics, plot_losses, read_metrics


def write_rows(path, count):
    with MetricsLog(path, first_step=0, steps=count, tensorboard=False) as log:
        for step in range(1, count + 1):
            log.row(step=step, loss=1.0 / 3 / step)


def test_rows_keep_every_bit(tmp_path):
    write_rows(tmp_path, 3)
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0 / 3 / step for step in (1, 2, 3)]


def test_resume_drops_later_rows_and_a_line_cut_short(tmp_path):
    write_rows(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-7])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    cut_metrics(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    write_rows(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', "step 2"))
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        read_metrics(path)


def test_tensorboard_gets_every_number_at_its_step(tmp_path, monkeypatch):
    """A stand-in takes the place of tensorboard, which need not be installed."""
    written = []

    def writer(directory, purge_step):
        written.append((directory, purge_step))
        return SimpleNamespace(
            add_scalar=lambda *scalar: written.append(scalar), close=lambda: written.append("closed")
        )

    monkeypatch.setattr("tpformer.training.metrics.find_spec", lambda name: name == "tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    with MetricsLog(tmp_path, first_step=6, steps=9, tensorboard=True) as log:
        log.row(step=7, loss=2.5, lr=0.125)
    assert written == [(tmp_path / "tensorboard", 7), ("loss", 2.5, 7), ("lr", 0.125, 7), "closed"]


def test_on_a_terminal_the_bar_shows_the_newest_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take a pipe for a terminal
    with MetricsLog(tmp_path, first_step=0, steps=4, tensorboard=False) as log:
        log.row(step=3, loss=2.5, tokens_per_second=1234.0, mfu=0.25)
        log.row(step=3, val_loss=2.75)
        bar = log._progress.tasks[0]
        assert (bar.completed, bar.total, bar.description) == (3, 4, "loss 2.5000  1,234 tokens/s  MFU 25.0%")
    assert "step 3/4" in capsys.readouterr().out, "validation is a line of its own"


def test_lines_on_the_console_are_short_and_plain(tmp_path, monkeypatch, capsys):
    values = {"loss": 2.5, "lr": 3e-4, "tokens": 12345, "tokens_per_second": 4321.5, "grad_norm": float("inf")}
    with MetricsLog(tmp_path, first_step=0, steps=4, tensorboard=False) as log:
        log.row(step=3, **values)
    line = "step 3/4  loss 2.5000  lr 0.0003  tokens 12,345  tokens_per_second 4,322  grad_norm inf\n"
    assert line in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    with MetricsLog(tmp_path, first_step=0, steps=4, tensorboard=False) as log:
        log.note("12 layers, lr 3e-4")
    assert "12 layers, lr 3e-4" in capsys.readouterr().out, "numbers are not coloured, and a table stays one"


def test_the_loss_curve_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    write_rows(tmp_path, 3)
    path = plot_losses(tmp_path)
    assert path == tmp_path / "plots" / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
