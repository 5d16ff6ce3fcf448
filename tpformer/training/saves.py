"""When a run saves its checkpoints and when not, the note in the run directory that it has some, and its loss."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tpformer.config import RunConfig
from tpformer.processes.files import replace_file

from .checkpoint import Checkpointer
from .checkpoint_files import steps
from .checkpoint_metadata import CheckpointError
from .metrics import read_metrics
from .results import Tally
from .schedules import falls_due

ADVICE = (
    "lower optimizer.lr or lengthen optimizer.warmup_steps, and continue from the last checkpoint with "
    "--run.resume True --run.changes KEY, where KEY is the one that you changed"
)
TRIES, PAUSE_SECONDS = 20, 15.0  # of the last checkpoint, whose steps would be lost: five minutes
NOTE = "saved.json"  # survives the loss of the checkpoints, which may lie on another file system


class RunLost(FileNotFoundError):
    """The run directory has gone while the run trained."""


def note_saved(run: Path, step: int) -> None:
    """Write down that the run has a checkpoint. OSError names the file."""
    replace_file(run / NOTE, json.dumps({"step": step}) + "\n")


def check_history(run: Path, step: int) -> None:
    """ValueError, with the remedy, if a run has lost its configuration, or its checkpoints and would begin at step 0.

    Nothing is erased. A run that ended before its first checkpoint has none, and begins anew.
    """
    anew = f"to begin anew, set another run.dir or remove {run}"
    if not (run / "config.toml").is_file() and (steps(run / "checkpoints") or read_metrics(run / "metrics.jsonl")):
        raise ValueError(f"{run} holds a run, but its config.toml is gone: bring it back; {anew}")
    if step == 0 and (run / NOTE).exists():
        raise ValueError(
            f"{run} has had checkpoints ({run / NOTE}), and {run / 'checkpoints'} has none now: bring them back, or "
            f"mount their file system, and use --run.resume True; {anew}"
        )


def check_damaged(directory: Path) -> None:
    """CheckpointError if there are checkpoints in a directory in which none is usable."""
    if found := steps(directory):
        raise CheckpointError(
            f"{directory} has checkpoints of steps {', '.join(map(str, found))}, and none is usable (see above): "
            f"repair them, or set another run.dir to begin anew"
        )


def place_of(run: Path) -> int | None:
    """What tells a run's directory, which is locked, from a copy in its place; None without it or its config.toml."""
    try:
        return run.stat().st_ino if (run / "config.toml").exists() else None
    except OSError:
        return None


def lost(run: Path, step: int) -> RunLost:
    """The error of a run whose directory is gone after a step."""
    return RunLost(
        f"{run} is gone at step {step}: it or its config.toml was deleted, renamed or replaced, or its file system is "
        f"no longer mounted; bring it back, and continue with --run.resume True"
    )


class NotSaved(ValueError):
    """The last checkpoint cannot be written. What it says is the user's to mend."""


class Saves:
    """The steps at which a run saves: by checkpoint.interval, and again after a save that failed or had to wait.

    A save that falls due within a round of `every` steps is done when the round ends. After the n-th failure in a row
    the run saves again 2 ** (n - 1) - 1 steps later, or when the next one is due.
    save: starts saving what the run has after a step. notice: prints one line, on one rank.
    All methods are called on all ranks, with the same numbers.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: RunConfig,
        every: int,
        save: Callable[[], None],
        notice: Callable[[str], None],
    ) -> None:
        self._checkpointer, self._save, self._notice = checkpointer, save, notice
        self._interval, self._every = config.checkpoint.interval, every
        self._again: int | None = None
        self._pause = min(PAUSE_SECONDS, config.run.timeout / 4)  # the watchdog has to hear of the next try

    def due(self, step: int) -> bool:
        """Whether to save after a step."""
        return step == self._again or falls_due(step, self._interval, self._every)

    def save(self, step: int, *, diverging: bool, ending: bool) -> None:
        """Save, unless the run diverges: then it saves after the first step that is not skipped.

        A parameter that is not finite is reported, and if the run is ending raised as FloatingPointError.
        """
        if diverging:
            if self._again != step:
                self._notice(f"step {step} was skipped: the checkpoint waits for a step that is not")
            self._again = self._round_end(step + 1)
            return
        self._again = None
        try:
            self._save()
        except FloatingPointError as error:
            if ending:
                raise FloatingPointError(f"{error}; {ADVICE}") from None
            self._notice(f"{error}; {ADVICE}")

    def _round_end(self, step: int) -> int:
        """The first step from this one on after which a round ends."""
        return -(-step // self._every) * self._every

    def retry(self, step: int) -> None:
        """Report that the save in progress has failed by this step, and plan another one."""
        try:
            self._checkpointer.wait()
        except RuntimeError as error:
            again = step + 2 ** (self._checkpointer.failures - 1) - 1
            again = min(again, -(-step // self._interval) * self._interval) if self._interval > 0 else again
            self._again = self._round_end(again)
            self._notice(f"{error}; the run goes on and saves again after step {self._again}")

    def end(self, step: int, requests: Sequence[int], tally: Tally) -> None:
        """Wait for the last checkpoint. While it cannot be written, as on a full disk, it is tried for some
        minutes, unless a rank is asked to stop once more; then NotSaved.

        requests: signals that ask this rank to stop; it may grow meanwhile.
        FloatingPointError if the run diverges at its end, so that its last steps have no checkpoint.
        """
        if tally.diverging:
            self._checkpointer.settle()
            raise FloatingPointError(
                f"the run ends at step {step} with {tally.skipped_in_a_row} skipped steps in a row, and no checkpoint "
                f"of them is saved; {ADVICE}"
            )
        asked = len(requests)
        for left in reversed(range(TRIES + 1)):
            try:
                return self._checkpointer.wait()
            except RuntimeError as error:
                if left == 0 or self._checkpointer.on_any(len(requests) > asked):
                    raise NotSaved(f"{error}; the steps since the last checkpoint are lost") from None
                self._notice(
                    f"{error}; it is tried again in {self._pause:g} s, {left} times at most: make room if there is none"
                )
            time.sleep(self._pause)
            self._save()
