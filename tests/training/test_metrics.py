"""metrics.jsonl survives kills and resumes; TensorBoard and the terminal show its numbers, and a loss curve is
drawn."""

import json
import math
import resource
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
from testing import assert_same

from tpformer.config import build_config
from tpformer.training.metrics import LossMean, MetricsLog, cut_metrics, plot_losses, read_metrics, rounded
from tpformer.training.trainer import Trainer


def write_rows(path, count):
    with MetricsLog(path, first_step=0, steps=count, tensorboard=False) as log:
        for step in range(1, count + 1):
            log.row(step=step, loss=1.0 / 3 / step)


def test_rows_keep_every_bit_and_a_resume_drops_later_ones_and_a_line_cut_short(tmp_path):
    write_rows(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    assert [row["loss"] for row in read_metrics(path)] == [1.0 / 3 / step for step in range(1, 6)]
    path.write_text(path.read_text()[:-7])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    cut_metrics(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("line", ["step 2", "[2]", "{}", '{"step": "2"}', '{"step": 2, "loss": "low"}', "\udcff"])
def test_a_bad_line_is_named(tmp_path, line):
    """R18: a line without a step was a KeyError without a path."""
    write_rows(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes("\n".join([lines[0], line, lines[2], ""]).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a row of metrics in JSON; delete the line"):
        cut_metrics(path, 3)


def test_rows_are_strict_json_and_what_is_not_finite_reads_as_nan(tmp_path):
    """R19: NaN and Infinity are no JSON."""
    with MetricsLog(tmp_path, first_step=0, steps=2, tensorboard=False) as log:
        log.row(step=1, loss=math.nan, grad_norm=math.inf)
    path = tmp_path / "metrics.jsonl"
    old = '{"step": 2, "loss": NaN, "grad_norm": -Infinity}\n'  # as rows were written before
    path.write_text(path.read_text() + old)
    for _ in range(2):
        rows = read_metrics(path)
        assert [math.isnan(row[name]) for row in rows for name in ("loss", "grad_norm")] == 4 * [True]
        cut_metrics(path, 2)
    assert path.read_text() == "".join(f'{{"step": {step}, "loss": null, "grad_norm": null}}\n' for step in (1, 2))


@contextmanager
def limited(size):
    """Within, no file can grow beyond `size` bytes: writes stop short, and the next ones fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rows_wait_for_room_on_the_disk(tmp_path, capsys):
    """R10. A row of which a part was written goes on there."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, first_step=0, steps=9, tensorboard=False) as log:
        log.row(step=1, loss=1.0)
        with limited(path.stat().st_size + 10):
            for step in (2, 3):
                log.row(step=step, loss=1.0 / step)
            log.norms(step=3, loss=math.pi)
        assert path.read_bytes().count(b"\n") == 1
        log.row(step=4, loss=0.25)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(step, 1.0 / step) for step in range(1, 5)]
    assert [row["step"] for row in read_metrics(tmp_path / "norms.jsonl")] == [3]
    said = capsys.readouterr().out
    assert [said.count(f"{name}.jsonl cannot be written (File too large)") for name in ("metrics", "norms")] == [1, 1]


def test_rows_that_cannot_be_written_at_the_end_are_an_error(tmp_path, capsys):
    with pytest.raises(OSError, match="File too large") as error, limited(0):
        with MetricsLog(tmp_path, first_step=0, steps=1, tensorboard=False) as log:
            log.row(step=1, loss=1.0)
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    with pytest.raises(KeyError), limited(0), MetricsLog(tmp_path, first_step=0, steps=1, tensorboard=False) as log:
        log.row(step=1, loss=1.0)
        raise KeyError("what ended the run")


def test_the_mean_of_an_interval_survives_a_stop_and_leaves_out_what_is_not_finite():
    losses = [3.0, 0.1, math.nan, 7.0, 0.3, math.inf, 0.7]
    mean, means = LossMean(3), []
    for step, loss in enumerate(losses, 1):
        means.append(mean.add(step, loss))
        state = json.loads(json.dumps(mean.state_dict()))
        mean = LossMean(3)
        mean.load_state_dict(state)
    assert means == [3.0, (3.0 + 0.1) / 2, (3.0 + 0.1) / 2, 7.0, 7.3 / 2, 7.3 / 2, 0.7]
    other = LossMean(4)
    other.load_state_dict(state)
    assert other.add(8, 1.0) == 1.0, "a sum over another interval's steps is not used"
    assert math.isnan(LossMean(1).add(1, math.nan))
    assert (rounded(1234.567), rounded(98765.4), rounded(0.123456)) == (1230.0, 98800.0, 0.123)


def interval_rows(values: dict, every: int, stop: int) -> dict[int, list[float]]:
    """The rows by step of a run that is asked to stop in a step, and resumed."""
    take = Trainer._launch

    def launch(trainer: Trainer, *arguments):
        if trainer.step + 1 == stop:
            signal.raise_signal(signal.SIGTERM)
        return take(trainer, *arguments)

    with mock.patch.object(Trainer, "_launch", launch):
        for resume in (False, True) if stop else (False,):
            trainer = Trainer(build_config(values, {"log": {"interval": every}, "run": {"resume": resume}}))
            trainer.run()
    kept = ("loss", "step_loss", "grad_norm", "lr", "tokens")
    rows = read_metrics(trainer.directory / "metrics.jsonl")
    return {int(row["step"]): [row[key] for key in kept] for row in rows}


def test_rows_are_the_means_of_their_intervals_and_a_resumed_run_has_the_same(ranks, tiny_values, tmp_path):
    """N10: the logged loss was the one of the row's step."""
    more = {"data": {**tiny_values["data"], "valid": []}, "train": {**tiny_values["train"], "steps": 8}}
    values = {**tiny_values, **more, "checkpoint": {"interval": 0}}
    runs = ("every", 1, 0), ("whole", 3, 0), ("parts", 3, 4)  # which ends when step 4 is read: behind 5
    every, whole, parts = (
        ranks(1).run(interval_rows, {**values, "run": {"dir": str(tmp_path / name)}}, interval, stop)[0]
        for name, interval, stop in runs
    )
    assert list(whole) == [3, 6, 8] and {step: row for step, row in parts.items() if step != 5} == whole
    for rows, first, step in ((whole, 1, 3), (parts, 4, 5), (whole, 4, 6), (whole, 7, 8)):
        losses = [every[each][0] for each in range(first, step + 1)]
        assert_same(rows[step][0], sum(losses) / len(losses))
        assert rows[step][1] == losses[-1]


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
