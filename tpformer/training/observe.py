"""What a run records beside its rows: a profile of a step, and Weights & Biases. Rank 0 only."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tpformer.processes.files import is_there, replace_file, whole_file


@contextmanager
def unless_it_fails(name: str, notice: Callable[[str], object]) -> Iterator[None]:
    """Make what is beside training: a failure within, as on a full disk, is one line and does not end the run."""
    try:
        yield
    except Exception as error:  # whatever the package raises that makes it
        words = str(error).strip().splitlines()
        notice(f"{name} could not be written: {words[0] if words else type(error).__name__}")


@contextmanager
def recorded(
    directory: Path, step: int, pipeline: Any, group: Any, named: tuple[str, int], notice: Callable[[str], object]
) -> Iterator[None]:
    """Write the actions of a pipeline meanwhile to timeline.json, on rank 0. Communication: a gather over its group.

    named: the schedule and the number of its microbatches.
    """
    import torch.distributed as dist

    from tpformer.parallel import gather_actions

    with pipeline.recording() as own:
        yield
    actions = gather_actions(own, group)
    if dist.get_rank() == 0:
        with unless_it_fails("timeline.json", notice):
            kept = {"schedule": named[0], "n_microbatches": named[1], "actions": actions}
            replace_file(directory / "timeline.json", json.dumps(kept))
            notice(f"step {step} recorded: draw it with `tpformer timeline {directory}`")


@contextmanager
def profiled(path: Path, notice: Callable[[str], object]) -> Iterator[None]:
    """Write what happens meanwhile on this rank, and on its GPU, as a Chrome trace (for ui.perfetto.dev)."""
    import torch  # here, because the command imports this file before it needs torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()  # what was queued before is not of this step
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with unless_it_fails(path.name, notice):
        with whole_file(path) as temporary:
            profiler.export_chrome_trace(str(temporary))


def check_wandb(project: str) -> None:
    """ValueError if rows are to be sent to Weights & Biases and its package is not installed."""
    if project and not find_spec("wandb"):
        raise ValueError(
            f"log.wandb={project!r} needs the package wandb: pip install 'tpformer[wandb]', or leave log.wandb out"
        )


class WandbError(ValueError):
    """Weights & Biases cannot begin, as without a key or a network."""


class RowLog(Protocol):
    """What gets every row of a run beside its files."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""

    def close(self, *, failed: bool) -> None:
        """Return when all rows are sent or stored. failed: the run ends by an error."""


class TensorBoardLog:
    """TensorBoard's events, in a folder. Those of steps after the first one are replaced."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=first_step + 1)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Write the last events."""
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases that gets every row. The file wandb.id in the directory lets a resumed run go on in it.

    WANDB_MODE=offline keeps everything in the directory's folder wandb. WandbError where it cannot begin.
    """

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        path = directory / "wandb.id"
        if not is_there(path):
            replace_file(path, secrets.token_hex(8))
        try:
            self.run = wandb.init(
                project=project,
                id=path.read_text(),
                name=directory.name,
                dir=str(directory),
                config=dict(config),
                resume="allow",
            )
        except wandb.Error as error:
            raise WandbError(
                f"log.wandb={project!r} cannot begin: {error} (WANDB_MODE=offline keeps the rows in the run directory, "
                f"and without log.wandb there are none)"
            ) from None

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self.run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Wait until all rows are sent or stored. failed: the run is marked so."""
        self.run.finish(exit_code=int(failed))
