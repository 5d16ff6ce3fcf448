"""What a run writes while it trains: metrics.jsonl, the console, TensorBoard, the loss curve. Rank 0 only."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tpformer.processes.files import replace_file


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, none if it does not exist. A last line that a kill cut short is left out.

    ValueError names any other bad line.
    """
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not JSON; delete the line to continue") from None
    return rows


def cut_metrics(path: Path, step: int) -> None:
    """Remove the rows after `step`, because a resumed run writes them again."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows))


class MetricsLog:
    """Writes each row to metrics.jsonl, the console and TensorBoard. Use as a context manager.

    first_step: the step after which the run begins, 0 for a new one. steps: its last step. tensorboard: whether events
    are written, too, where tensorboard is installed.
    """

    def __init__(self, directory: Path, *, first_step: int, steps: int, tensorboard: bool) -> None:
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.console = Console()
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._steps = steps
        self._writer = None
        if tensorboard and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(directory / "tensorboard", purge_step=first_step + 1)

    def __enter__(self) -> "MetricsLog":
        self._file = self.path.open("a")
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def advance(self, step: int) -> None:
        """Move the console's progress bar to a step."""
        self._progress.update(self._task, completed=step)

    def row(self, **values: float) -> None:
        """Write one row, which needs `step`. Reading it gives numbers of the same bits."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        step = int(values["step"])
        if self._writer is not None:
            for name, value in values.items():
                if name != "step":
                    self._writer.add_scalar(name, value, step)
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items() if name != "step")
        if self.console.is_terminal and "val_loss" not in values:
            mfu = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
            brief = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s{mfu}"
            self._progress.update(self._task, completed=step, description=brief)
        else:
            self.console.print(f"step {step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a text on the console."""
        self.console.print(text, highlight=False, soft_wrap=True)


def _short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if math.isfinite(value) and abs(value) >= 1e-2 else f"{value:.3g}"


def plot_losses(directory: Path) -> Path | None:
    """Draw plots/loss.png from metrics.jsonl: training and validation loss by step. None without matplotlib."""
    if not find_spec("matplotlib"):
        return None
    from matplotlib.figure import Figure

    rows = read_metrics(directory / "metrics.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else None, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path = directory / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
