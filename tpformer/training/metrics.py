"""What a run writes while it trains: metrics.jsonl, the console, TensorBoard, the loss curve. Rank 0 only.

Belongs here: rows, and what is made of them.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tpformer.processes.files import is_there, make_folder, naming, replace_file, whole_file

from .observe import RowLog, TensorBoardLog, unless_it_fails


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, none if it does not exist. A last line that a kill cut short is left out.

    A number that was not finite is NaN. ValueError names any other bad line.
    """
    lines = path.read_bytes().splitlines(keepends=True) if is_there(path) else []
    rows = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None and line.endswith(b"\n"):
            raise ValueError(f"{path}:{number} is not a row of metrics in JSON; delete the line to continue")
        if row is not None:
            rows.append(row)
    return rows


def is_validated(path: Path, step: int) -> bool:
    """Whether a metrics.jsonl has a validation loss of a step."""
    return any(row["step"] == step and "val_loss" in row for row in read_metrics(path))


def _row(line: bytes) -> dict[str, float] | None:
    """The numbers of a line; None unless it is an object of numbers with a step."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)  # NaN and infinities of rows written before
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    row = {name: math.nan if value is None else value for name, value in row.items()}
    plain = all(type(value) is float or (type(value) is int and abs(value) < 2**63) for value in row.values())
    return row if plain else None


def _line(row: dict[str, float]) -> str:
    """A row as a line of strict JSON, which has no NaN and no infinity: null stands for both."""
    values = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(values, allow_nan=False) + "\n"


def cut_metrics(path: Path, step: int) -> None:
    """Remove the rows after `step`, because a resumed run writes them again."""
    if is_there(path):
        replace_file(path, "".join(_line(row) for row in read_metrics(path) if row["step"] <= step), to_disk=True)


def rounded(value: float) -> float:
    """A measured value with the three digits that it has."""
    return float(f"{value:.3g}")


class Speed:
    """Tokens per second from one row to the next. tokens: those before the first step."""

    def __init__(self, tokens: int) -> None:
        self._since, self._tokens = time.perf_counter(), tokens

    def until(self, at: float, tokens: int) -> float:
        """The mean speed since the row before. at: a time.perf_counter, at which there were `tokens` in all."""
        speed = (tokens - self._tokens) / (at - self._since)
        self._since, self._tokens = at, tokens
        return speed

    def leave_out(self, seconds: float) -> None:
        """Do not count a time in which nothing was trained."""
        self._since += seconds


class LossMean:
    """The mean loss of the steps since the last multiple of `interval`; losses that are not finite are left out.

    Its sum goes into checkpoints, so that the mean of an interval in which a run stopped is that of a run that did not.
    """

    def __init__(self, interval: int) -> None:
        self.interval, self._sum, self._count = interval, 0.0, 0

    def add(self, step: int, loss: float) -> float:
        """Add a step's loss and return the mean; NaN if no loss of the interval is finite."""
        if step % self.interval == 1 % self.interval:
            self._sum, self._count = 0.0, 0
        if math.isfinite(loss):
            self._sum, self._count = self._sum + loss, self._count + 1
        return self._sum / self._count if self._count else math.nan

    def state_dict(self) -> dict[str, float]:
        """The sum, for a checkpoint."""
        return {"interval": self.interval, "sum": self._sum, "count": self._count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state that state_dict returned. With another interval, or without a state, begin anew."""
        if state.get("interval") == self.interval:
            self._sum, self._count = float(state["sum"]), int(state["count"])


ROWS = ("metrics.jsonl", "norms.jsonl")  # the files of rows in a run's directory


class RowFile:
    """Appends rows to a file. Those that cannot be written, as on a full disk, are kept until the next is written.

    notice: prints one line, when that begins.
    """

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self.path, self._notice = path, notice
        self._unwritten, self._failing = b"", False

    def add(self, row: dict[str, float]) -> None:
        """Write a row, and before it those that are kept."""
        self._unwritten += _line(row).encode()
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                self._notice(f"{self.path} cannot be written ({error.strerror}): its rows are kept until it can be")
            self._failing = True

    def close(self) -> None:
        """Write what is kept. OSError names the file."""
        with naming(self.path):
            self._write()

    def _write(self) -> None:
        if self._unwritten:
            with self.path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        self._failing = False


class MetricsLog:
    """Writes each row to metrics.jsonl, the console and TensorBoard. Use as a context manager.

    A full disk does not end a run: rows wait for room. Those that wait when the log is closed are an OSError.
    TensorBoard and wandb get no more rows after a failure of theirs.

    first_step: the step after which the run begins, 0 for a new one. steps: its last step. tensorboard: whether events
    are written, too, where tensorboard is installed. wandb: what else gets the rows; closed with this log.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_step: int,
        steps: int,
        tensorboard: bool = False,
        wandb: RowLog | None = None,
    ) -> None:
        self._rows, self._norms = (RowFile(directory / name, self.note) for name in ROWS)
        self.console = Console(markup=False, emoji=False)  # a path may have brackets
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._steps = steps
        self._others: dict[str, RowLog] = {} if wandb is None else {"Weights & Biases": wandb}
        if tensorboard and find_spec("tensorboard"):
            with unless_it_fails("rows for TensorBoard", self.note):
                self._others["TensorBoard"] = TensorBoardLog(directory / "tensorboard", first_step)

    def __enter__(self) -> "MetricsLog":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        for name, other in self._others.items():
            with unless_it_fails(f"the last rows for {name}", self.note):
                other.close(failed=kind is not None)
        with suppress(OSError) if kind is not None else nullcontext():  # what ended the run says more
            self._rows.close()
            self._norms.close()

    def advance(self, step: int) -> None:
        """Move the console's progress bar to a step."""
        self._progress.update(self._task, completed=step)

    def row(self, **values: float) -> None:
        """Write one row, which needs `step`. Reading it gives numbers of the same bits."""
        self._rows.add(values)
        step = self._send(values)
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items() if name != "step")
        if self.console.is_terminal and "val_loss" not in values:
            mfu = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
            brief = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s{mfu}"
            self._progress.update(self._task, completed=step, description=brief)
        else:
            self.console.print(f"step {step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def norms(self, **values: float) -> None:
        """Write a row of norms.jsonl, which needs `step`. It is not shown on the console."""
        self._norms.add(values)
        self._send(values)

    def _send(self, row: dict[str, float]) -> int:
        """Give a row to TensorBoard and Weights & Biases. Returns its step."""
        step, values = int(row["step"]), {name: value for name, value in row.items() if name != "step"}
        for name, other in [*self._others.items()]:
            del self._others[name]  # which gets no more rows, if this fails
            with unless_it_fails(f"rows for {name}", self.note):
                other.row(step, values)
                self._others[name] = other
        return step

    def note(self, text: str) -> None:
        """Print a text on the console."""
        self.console.print(text, highlight=False, soft_wrap=True)


def _short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 100:
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
    make_folder(path.parent)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return path
