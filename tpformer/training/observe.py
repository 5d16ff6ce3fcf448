"""What a run records beside its rows: a profile of a step, and Weights & Biases. Rank 0 only."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpformer.processes.files import replace_file


@contextmanager
def profiled(path: Path) -> Iterator[None]:
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
    profiler.export_chrome_trace(str(path))


def check_wandb(project: str) -> None:
    """ValueError if rows are to be sent to Weights & Biases and its package is not installed."""
    if project and not find_spec("wandb"):
        raise ValueError(
            f"log.wandb={project!r} needs the package wandb: pip install 'tpformer[wandb]', or leave log.wandb out"
        )


class WandbError(ValueError):
    """Weights & Biases cannot begin, as without a key or a network."""


class WandbLog:
    """A run of Weights & Biases that gets every row. The file wandb.id in the directory lets a resumed run go on in it.

    WANDB_MODE=offline keeps everything in the directory's folder wandb. WandbError where it cannot begin.
    """

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        path = directory / "wandb.id"
        if not path.exists():
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
