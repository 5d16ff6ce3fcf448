"""metrics.jsonl survives kills and resumes. TensorBoard, Weights & Biases and the terminal show its numbers, and a
loss curve is drawn."""

import itertools
import json
import math
import resource
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from testing import assert_same, on_every_rank
from tiny_runs import rows, sigterm_in, values_with, write_run
from turns import needs_extras

from tpformer.config import build_config
from tpformer.training.metrics import LossMean, MetricsLog, cut_metrics, plot_losses, read_metrics, rounded
from tpformer.training.observe import WandbLog
from tpformer.training.trainer import Trainer, pretrain


def test_rows_keep_every_bit_and_a_resume_drops_later_ones_and_a_line_cut_short_and_a_bad_line_is_named(tmp_path):
    """R18: a line without a step was a KeyError without a path."""
    with MetricsLog(tmp_path, first_step=0, steps=5, tensorboard=False) as log:
        for step in range(1, 6):
            log.row(step=step, loss=1.0 / 3 / step)
    if find_spec("matplotlib"):
        assert plot_losses(tmp_path) == tmp_path / "plots" / "loss.png"
        assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "metrics.jsonl"
    assert [row["loss"] for row in read_metrics(path)] == [1.0 / 3 / step for step in range(1, 6)]
    path.write_text(path.read_text()[:-7])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    cut_metrics(path, 2)
    first, last = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (first, last)] == [1, 2]
    for line in ("step 2", "[2]", "{}", '{"step": "2"}', '{"step": 2, "loss": "low"}', "\udcff"):
        path.write_bytes("\n".join([first, line, last, ""]).encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a row of metrics in JSON; delete the line"):
            cut_metrics(path, 3)


def test_brackets_of_a_path_and_colons_are_shown_as_they_are(tmp_path, capsys):
    """Those of a run directory ended a run on a full disk, as they were taken for markup."""
    with MetricsLog(tmp_path, first_step=0, steps=2, tensorboard=False) as log:
        log.note("runs[/lr=1] :x: [b]")
    assert "runs[/lr=1] :x: [b]" in capsys.readouterr().out


def test_rows_are_strict_json_and_what_is_not_finite_reads_as_nan(tmp_path):
    """R19: NaN and Infinity are no JSON."""
    with MetricsLog(tmp_path, first_step=0, steps=2, tensorboard=False) as log:
        log.row(step=1, loss=math.nan, grad_norm=math.inf)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "loss": NaN, "grad_norm": -Infinity}\n')  # as rows were once
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
    """R10. A row of which a part was written goes on there. capsys, because pytest itself captures in a file, which is
    limited, too."""
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
    # at the end it is an error
    with pytest.raises(OSError, match="File too large") as error, limited(0):
        with MetricsLog(tmp_path, first_step=4, steps=5, tensorboard=False) as log:
            log.row(step=5, loss=1.0)
    assert error.value.filename == str(path)
    with pytest.raises(KeyError), limited(0), MetricsLog(tmp_path, first_step=4, steps=5, tensorboard=False) as log:
        log.row(step=5, loss=1.0)
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
    log = {"interval": every, "profile_step": 2 if every == 1 else 0}
    with sigterm_in(stop):
        for resume in (False, True)[: 1 + (stop > 0)]:
            Trainer(build_config(values, {"log": log, "run": {"resume": resume}})).run()
    kept = ("loss", "step_loss", "grad_norm", "lr", "tokens")
    return {int(row["step"]): [row[key] for key in kept] for row in rows(values["run"]["dir"])}


def test_rows_are_means_of_their_intervals_also_in_a_resumed_run_and_a_step_is_profiled(ranks, tiny_values, tmp_path):
    """N10: the logged loss was the one of the row's step."""
    values = values_with(tiny_values, data={"valid": []}, train={"steps": 8}, checkpoint={"interval": 0})
    runs = ("every", 1, 0), ("whole", 3, 0), ("parts", 3, 4)  # which ends when step 4 is read: behind 5
    every, whole, parts = (
        ranks(1).run(interval_rows, values_with(values, run={"dir": str(tmp_path / name)}), interval, stop)[0]
        for name, interval, stop in runs
    )
    events = json.loads((tmp_path / "every" / "profile.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events), "a matrix product of the step"
    assert not (tmp_path / "whole" / "profile.json").exists()
    assert list(whole) == [3, 6, 8] and {step: row for step, row in parts.items() if step != 5} == whole
    for found, first, step in ((whole, 1, 3), (parts, 4, 5), (whole, 4, 6), (whole, 7, 8)):
        losses = [every[each][0] for each in range(first, step + 1)]
        assert_same(found[step][0], sum(losses) / len(losses))
        assert found[step][1] == losses[-1]


def samples_and_tokens(values: dict) -> tuple[list[int], list[int]]:
    """Of a run that is resumed with other batches: where the samples of the step after each part begin, and tokens."""
    begins = []
    for steps, size in ((2, 8), (3, 16), (5, 4)):
        train = {"steps": steps, "global_batch_size": size, "microbatch_size": 2}
        more = {"run": {"resume": True, "changes": ["train.global_batch_size"]}, "train": train}
        trainer = Trainer(build_config(values, more, {"log": {"interval": 1}}))
        trainer.run()
        begins.append(trainer.batches.take(steps + 1).first)
    return begins, [row["tokens"] for row in rows(values["run"]["dir"])]


def test_a_run_that_goes_on_with_another_batch_leaves_out_no_sample_and_counts_none_twice(ranks, tiny_values):
    values = values_with(tiny_values, data={"valid": []}, checkpoint={"interval": 0})
    taken = list(itertools.accumulate((8, 8, 16, 4, 4)))
    begins, tokens = ranks(1).run(samples_and_tokens, values)[0]
    assert begins == [taken[1], taken[2], taken[4]]
    assert tokens == [count * values["model"]["seq_length"] for count in taken]


def test_a_row_is_a_line_and_on_a_terminal_a_bar(tmp_path, monkeypatch, capsys):
    with MetricsLog(tmp_path, first_step=0, steps=4, tensorboard=False) as log:
        log.row(step=3, loss=2.5, lr=3e-4, tokens=12345, grad_norm=math.inf)
    assert "step 3/4  loss 2.5000  lr 0.0003  tokens 12,345  grad_norm inf\n" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take a pipe for a terminal
    with MetricsLog(tmp_path, first_step=0, steps=4, tensorboard=False) as log:
        log.note("12 layers, lr 3e-4")
        log.row(step=3, loss=2.5, tokens_per_second=1234.0, mfu=0.25)
        log.row(step=3, val_loss=2.75)
        bar = log._progress.tasks[0]
        assert (bar.completed, bar.total, bar.description) == (3, 4, "loss 2.5000  1,234 tokens/s  MFU 25.0%")
    out = capsys.readouterr().out
    assert "step 3/4" in out, "validation is a line of its own"
    assert "12 layers, lr 3e-4" in out, "numbers are not coloured, and a table stays one"


def test_rows_reach_tensorboard_and_a_wandb_run_that_is_the_same_after_a_resume(tmp_path, monkeypatch, capsys):
    """Stand-ins take the place of both, which need not be installed."""
    writer = mock.Mock()
    monkeypatch.setattr("tpformer.training.metrics.find_spec", lambda name: name == "tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    with MetricsLog(tmp_path, first_step=6, steps=9, tensorboard=True) as log:
        log.row(step=7, loss=2.5, lr=0.125)
    opened, made = mock.call.SummaryWriter(tmp_path / "tensorboard", purge_step=7), mock.call.SummaryWriter()
    numbers = [made.add_scalar("loss", 2.5, 7), made.add_scalar("lr", 0.125, 7)]
    assert writer.mock_calls == [opened, *numbers, made.close()]
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(KeyError):
        for row in ({"step": 1}, {"step": 2}, {}):
            wandb = WandbLog(tmp_path, "gpt", {"train": {"steps": 2}})
            with MetricsLog(tmp_path, first_step=0, steps=2, wandb=wandb) as log:
                log.row(**row, loss=0.5)
    first, *others = module.init.call_args_list
    assert others == [first, first], "the same id"
    given = {"project": "gpt", "resume": "allow", "dir": str(tmp_path), "config": {"train": {"steps": 2}}}
    assert given.items() <= first.kwargs.items() and len(first.kwargs["id"]) == 16
    run = module.init.return_value
    assert run.log.mock_calls == [mock.call({"loss": 0.5}, step=step) for step in (1, 2)]
    assert [call.kwargs["exit_code"] for call in run.finish.mock_calls] == [0, 0, 1], "the last one fails"
    # what fails there gets no more rows, and the run goes on
    writer.SummaryWriter.return_value.add_scalar.side_effect = OSError("disk\nfull")
    run.log.side_effect = BrokenPipeError("gone")
    with MetricsLog(tmp_path, first_step=7, steps=9, tensorboard=True, wandb=wandb) as log:
        for step in (8, 9):
            log.row(step=step, loss=1.0)
    said = capsys.readouterr().out
    wanted = ("TensorBoard could not be written: disk\n", "Weights & Biases could not be written: gone\n")
    assert [said.count(f"rows for {name}") for name in wanted] == [1, 1]
    assert '"step": 9' in (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]


@on_every_rank(1)
def test_without_wandb_a_run_ends_in_one_sentence(tiny_values):
    """Where Weights & Biases is not installed, and where it knows no user. It was the traceback of a failed step."""
    error = type("Error", (Exception,), {})
    wandb = SimpleNamespace(init=mock.Mock(side_effect=error("No API key configured.")), Error=error)
    for installed, words in (
        (None, "ValueError: log.wandb='gpt' needs the package wandb: pip install 'tpformer[wandb]', or"),
        ("yes", "WandbError: log.wandb='gpt' cannot begin: No API key configured. (WANDB_MODE=offline "),
    ):
        with mock.patch.dict(sys.modules, wandb=wandb), pytest.raises(Exception) as failure:
            with mock.patch("tpformer.training.observe.find_spec", return_value=installed):
                pretrain(build_config(tiny_values, {"log": {"wandb": "gpt"}}))
        assert f"{failure.typename}: {failure.value}".startswith(words)


@needs_extras
@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_itself_offline(done, tiny_values, tmp_path):
    done("pretrain", write_run(tmp_path, tiny_values, log={"wandb": "tpformer-test"}), WANDB_MODE="offline")
    directory = Path(tiny_values["run"]["dir"])
    (stored,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    assert (directory / "wandb.id").read_text() in stored.name
    content = stored.read_bytes()
    assert all(name.encode() in content for row in read_metrics(directory / "metrics.jsonl") for name in row)
