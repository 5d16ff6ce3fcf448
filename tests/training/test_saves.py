"""What a run's checkpoints survive: values that are not finite, disks that fail, directories that go, stops anywhere.
R1, R2, ... are the findings of ../shared/research/findings.md."""

import errno
import math
import os
import shutil
from concurrent.futures import wait
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from testing import on_every_rank
from tiny_runs import rows, sigterm_in, values_with
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from turns import in_turns, of_turn

from tpformer.config import build_config
from tpformer.parallel import local_part
from tpformer.training import saves
from tpformer.training import step as step_module
from tpformer.training.checkpoint import Checkpointer, newest_good, steps
from tpformer.training.model import ModelParts
from tpformer.training.saves import TRIES
from tpformer.training.trainer import Trainer

ON_TWO: dict[str, dict] = {"parallel": {"tensor_parallel": 2}, "data": {"valid": []}}


def names(directory) -> list[str]:
    return sorted(path.name for path in (Path(directory) / "checkpoints").iterdir())


def train(values: dict, resume: bool = False) -> tuple[list[str], str]:
    """Train, and return what was said and the error."""
    said, error = [], ""
    with mock.patch.object(Trainer, "_notice", lambda self, text: said.append(text)):
        trainer = Trainer(build_config(values_with(values, run={"resume": resume})))
        try:
            trainer.run()
        except (RuntimeError, ValueError, FloatingPointError, OSError, LookupError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    assert trainer.checkpointer._pending is None, "a run that ends has waited for its last save"
    dist.barrier()  # each rank removes what its part of a failed save left
    return said, error


def step_of(values: dict, first_sample: int) -> int:
    """The step that takes this sample."""
    return first_sample // values["train"]["global_batch_size"] + 1


def spoiled(values: dict, at: int, where: str):
    """On rank 1 a weight becomes NaN, before a step or behind its update."""
    take_step = step_module.train_step

    def spoiled_step(model, *arguments, first_sample, **options):
        weight = local_part(next(model.parts[0].parameters()).detach()).view(-1)
        spoils = step_of(values, first_sample) == at and dist.get_rank() == 1
        if spoils and where == "before":
            weight[0] = float("nan")
        result = take_step(model, *arguments, first_sample=first_sample, **options)
        if spoils and where == "behind":
            weight[0] = float("nan")
        return result

    with mock.patch.object(step_module, "train_step", spoiled_step):
        return train(values_with(values, run={"dir": f"{values['run']['dir']}-{where}"}))


@pytest.mark.parametrize(("where", "skipped"), [("behind", 2), *in_turns([("before", 3)], first=0)])
def test_r1_a_weight_that_is_no_number_is_never_saved_and_prunes_nothing(ranks, tiny_values, where, skipped):
    values = values_with(tiny_values, checkpoint={"interval": 1, "keep": 2}, **ON_TWO)
    directory = Path(f"{values['run']['dir']}-{where}")
    (notices, error), (_, other) = ranks(2).run(spoiled, values, 4, where, timeout=60)
    assert error == other and error.startswith("FloatingPointError: the run ends at step 6"), (notices, error)
    assert f" with {skipped} skipped steps in a row" in error and "--run.resume True" in error
    assert names(directory) == ["step-2", "step-3"]
    assert sum("the checkpoint waits" in line for line in notices) == 1, notices
    refused = "checkpoint of step 4 is not saved: embed_tokens.weight is not finite"
    assert sum(refused in line for line in notices) == (where == "behind"), notices
    # the advice holds: the run continues as one that nothing happened to
    again = values_with(values, run={"dir": str(directory)})
    assert [error for _, error in ranks(2).run(train, again, True)] == ["", ""]
    ranks(2).run(train, values)
    assert rows(directory) == rows(values["run"]["dir"])


def train_on_a_full_disk(values: dict, failing: list[int]):
    """On the last rank the n-th write of its tensors fails, where n is in `failing`; 0 stands for any."""
    write, failed, count = FileSystemWriter.write_data, Checkpointer.failed, [0]

    def full(*arguments):
        count[0] += 1
        if dist.get_rank() == dist.get_world_size() - 1 and {count[0], 0} & {*failing}:
            Path(arguments[0].path, "part").write_text("what was written before the disk was full")
            try:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save says it, which closes its file
        return write(*arguments)

    def known(self):
        """A save ends within the step after it."""
        wait([self._pending] if self._pending else [])
        return failed.fget(self)

    with mock.patch.object(FileSystemWriter, "write_data", full), mock.patch.object(saves, "PAUSE_SECONDS", 0.01):
        with mock.patch.object(Checkpointer, "failed", property(known)):
            return train(values)


# after three failures the interval decides; the last one is tried once more
@pytest.mark.parametrize(
    ("failing", "kept", "planned"), [([1, 3], [8, 12], [8]), *in_turns([([1, 2, 3], [12], [8, 11, 12])], first=1)]
)
def test_r2_r10_a_failed_save_is_reported_tried_again_and_leaves_nothing(ranks, tiny_values, failing, kept, planned):
    """Ranks learn of a failure when they read the step after it, that is when one more step is queued."""
    values = values_with(tiny_values, train={"steps": 12}, checkpoint={"interval": 6}, **ON_TWO)
    directory = Path(values["run"]["dir"])
    (notices, error), _ = ranks(2).run(train_on_a_full_disk, values, failing)
    said = [line for line in notices if "could not be written" in line]
    assert error == "" and len(said) == len(failing) and "[Errno 28] No space left on device" in said[0], notices
    assert str(directory / "checkpoints") in said[0] and "rank 1" in said[0]
    assert [int(line.rpartition(" ")[2]) for line in said if "goes on" in line] == planned
    assert names(directory) == sorted(f"step-{step}" for step in kept)
    assert newest_good(directory / "checkpoints", print) == 12


def test_r2_a_run_whose_last_save_fails_for_good_fails(ranks, tiny_values):
    """It waits for room, with a line for each try."""
    values = values_with(tiny_values, train={"steps": 2})
    ((notices, error),) = ranks(1).run(train_on_a_full_disk, values, [0])
    assert error.startswith("NotSaved: checkpoint") and "step-2 could not" in error and "No space left" in error
    tries = [line for line in notices if "it is tried again in" in line]
    assert [line.split(", ")[-1].split()[0] for line in tries] == [str(n) for n in range(TRIES, 0, -1)]
    assert names(values["run"]["dir"]) == [] and len(rows(values["run"]["dir"])) == 3


def full_at(name: str) -> AbstractContextManager:
    """Within, the disk is full when the file of this name is written. The error has no name, as that of a write."""
    write = Path.write_text

    def full(self, *arguments, **options):
        if self.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments, **options)

    return mock.patch.object(Path, "write_text", full)


@on_every_rank(1)
def test_r10_a_disk_that_is_full_as_the_run_starts_is_one_sentence_or_names_the_file(tiny_values):
    """The second is of ranks that meet, in which any file may fail."""
    with full_at(".start.json.tmp"), pytest.raises(ValueError) as error:
        train(tiny_values)
    assert str(error.value) == f"{tiny_values['run']['dir']}/start.json cannot be written: No space left on device"
    with full_at("attempt"), pytest.raises(OSError) as error:
        train(tiny_values)
    assert error.value.filename == f"{tiny_values['run']['dir']}/ranks/attempt"


# a file, what stands in its place, what is said
DAMAGES = [
    ("config.toml", Path.touch,
     "config.toml is empty, and no run writes such a file: bring back the settings that the run had"),
    ("config.toml", Path.mkdir, "holds a run, but its config.toml is gone: bring it back"),
    ("metrics.jsonl", lambda path: path.symlink_to(path.parent / "unmounted" / path.name),
     "metrics.jsonl is a link that leads nowhere, where a file is expected"),
]  # fmt: skip


def test_a_run_that_diverges_ends_when_its_last_checkpoint_is_written():
    checkpointer, tally = mock.Mock(), mock.Mock(diverging=True, skipped_in_a_row=3)
    run = saves.Saves(checkpointer, build_config(), 1, mock.Mock(), mock.Mock())
    with pytest.raises(FloatingPointError, match="the run ends at step 6 with 3 skipped steps in a row"):
        run.end(6, [], tally)
    assert checkpointer.method_calls == [mock.call.settle()]


@on_every_rank(1)
def test_a_damaged_run_directory_is_one_sentence_before_a_step(tiny_values):
    run = Path(tiny_values["run"]["dir"])
    train(values_with(tiny_values, train={"steps": 2}))
    whole = run.rename(run.with_name("whole"))
    for name, make, said in DAMAGES:
        shutil.copytree(whole, run)
        (run / name).unlink()
        make(run / name)
        with pytest.raises(ValueError, match=said):
            train(tiny_values, resume=True)
        shutil.rmtree(run)


def train_until(values: dict, stop: int, nan_losses=(), overflows=()) -> tuple[list[str], str]:
    """SIGTERM comes in the step `stop`; the losses of some steps are no numbers, and the gradients of some overflow."""
    original = ModelParts.gradients

    def gradients(self, batch, *, first_sample, **options):
        loss, step = original(self, batch, first_sample=first_sample, **options), step_of(values, first_sample)
        if step in overflows:
            self.parameters()[0].grad.view(-1)[0] = math.inf
        return loss * (math.nan if step in nan_losses else 1)

    with sigterm_in(stop), mock.patch.object(ModelParts, "gradients", gradients):
        return train(values)


def test_r8_a_validation_on_the_step_of_a_stop_is_done_when_the_run_resumes(ranks, tiny_values):
    values = values_with(tiny_values, train={"validation_interval": 3})
    whole = values_with(values, run={"dir": values["run"]["dir"] + "-whole"})
    assert ranks(1).run(train_until, values, 3) == [([], "")]
    assert [row["step"] for row in rows(values["run"]["dir"])] == [1, 2, 3]
    ranks(1).run(train, values, True)
    ranks(1).run(train, whole)
    assert rows(values["run"]["dir"]) == rows(whole["run"]["dir"])
    ranks(1).run(train, values, True)
    assert rows(values["run"]["dir"]) == rows(whole["run"]["dir"]), "a finished run validates no second time"


@of_turn(2)
def test_a_stop_while_steps_are_skipped_waits_until_one_is_not_and_too_many_end_the_run(ranks, tiny_values):
    """R1: no checkpoint is written of a streak, and a stop needs one. Rows count the skipped steps."""
    values = values_with(tiny_values, **ON_TWO)
    results = ranks(2).run(train_until, values, 3, (3, 4))
    assert [error for _, error in results] == ["", ""] and max(steps(Path(values["run"]["dir"]) / "checkpoints")) == 5
    run = {"dir": values["run"]["dir"] + "-ended"}
    values = values_with(values, run=run, train={"max_skipped_steps": 3}, checkpoint={"interval": 1})
    for _, error in ranks(2).run(train_until, values, 0, (2, 3, 4)):
        assert "3 steps in a row were skipped, the last one step 4: loss nan" in error, error
    found = rows(run["dir"])
    assert [(row["step"], row.get("skipped", 0)) for row in found] == [(1, 0), (2, 1), (3, 2)]


def test_a_float16_run_may_end_while_it_looks_for_its_loss_scale(ranks, tiny_values):
    """R1 counts steps whose gradients overflow, as they do when the loss scale has been doubled, as skipped ones only
    where the loss is no number, too."""
    values = values_with(tiny_values, train={"dtype": "float16"}, data={"valid": []})
    ((notices, error),) = ranks(1).run(train_until, values, 0, (), (5, 6))
    named = [line for line in notices if "not finite first in embed_tokens.weight" in line]
    assert error == "" and len(named) >= 2, notices
    assert names(values["run"]["dir"]) == ["step-4", "step-6"]
