"""`python -m bench faults`: runs of 4 processes in which something goes wrong at random, and what is left of them.

Belongs here: the kinds of faults, what must follow each, and the table. How a fault is made inside of a process is in
faulty_run.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bars import Bar, write_bars
from harness.runner import Bench, Report, columns
from tpformer.config import build_config, to_toml
from tpformer.training.checkpoint_files import step_path, steps
from tpformer.training.data import build_dataset
from tpformer.training.metrics import read_metrics

from .faulty_run import BATCH, Command, Fault

EACH, QUICK_EACH = 10, 1
TIMEOUT = 10.0  # run.timeout, seconds
MARGIN = 30.0  # seconds beyond it, in which a job has to end: 4 ranks start and stop on the cores that there are
STEPS, INTERVAL = 20, 4
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "TP2 DP2 ZeRO-3": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
    "TP4": {"tensor_parallel": 4},
    "PP2 DP2": {"pipeline_parallel": 2, "data_parallel_shard": 2, "zero_stage": 1},
}
# kind -> (what the command prints, with {rank}, {step}, {file} and {run}; its exit code, None: it is killed)
KINDS: Mapping[str, tuple[str, int | None]] = {
    "kill -9": (r"rank {rank} of 4 was killed by SIGKILL", 0),
    "raise": (r"rank {rank} of 4 failed with exit code 1 \(.*injected in step {step}", 0),
    "SIGSTOP": (r"no heartbeat from rank {rank}", 0),
    "SIGTERM during a save": (r"stopped at step \d+; checkpoint written", 3),
    "ENOSPC": (r"{run}/checkpoints/.*No space left on device", 0),
    "EIO on a read": (r"step {step} is not usable: .*{file}.*Input/output error", 0),
    "truncated file": (r"step {step} is not usable: .*{file}", 0),
    "flipped bit": (r"step {step} is not usable: .*{file}", 0),
    "NaN in a weight": (r"steps in a row were skipped, the last one step \d+: loss nan", 2),
    "NaN in a gradient": (r"steps in a row were skipped, the last one step \d+: .*not finite first in \w", 2),
    "deleted directory": (r"{run} is gone at step \d+", 2),
    "dead launcher": (r"", None),
}
AT_REST = ("EIO on a read", "truncated file", "flipped bit")  # what happens to the files of a run that was stopped
RESTARTED = ("kill -9", "raise", "SIGSTOP")
NOTE = (
    "Each run has 4 processes, a layout drawn at random, a checkpoint every 4 steps, and a fault at a random moment. "
    "seconds: until the job has ended, or its ranks have started again, and the most. lost: completed checkpoints that "
    "are gone or not good at the end. hung: jobs that took longer than run.timeout and 30 s. unnamed: faults whose "
    "rank or file was not named, or whose exit code was another. different: runs whose losses and norms, after "
    "restart or resume, are not those of an undisturbed run, bit by bit. Nobody can name a dead launcher: its ranks "
    "have to be gone."
)
Row = dict[str, Any]


class Job:
    """One run: its directory, its commands in order, and its clock."""

    def __init__(self, folder: Path, data: Path, layout: str, fault: Fault) -> None:
        self.folder, self.run, self.fault = folder, folder / "run", fault
        self.commands: list[Command] = []
        self.hung = False
        self.complete: list[int] = []  # the steps of the checkpoints that were complete when the fault came
        values: dict[str, dict[str, Any]] = {
            "run": {"dir": str(self.run), "timeout": TIMEOUT, "max_restarts": 1 if fault.kind in RESTARTED else 0},
            "model": {"seq_length": 16, "n_layers": 4, "hidden_size": 32, "n_heads": 4},
            "data": {"train": [str(data)]},
            "parallel": LAYOUTS[layout],
            "train": {"steps": STEPS, "global_batch_size": BATCH, "max_skipped_steps": 3},
            "optimizer": {"warmup_steps": 2},
            "checkpoint": {"interval": INTERVAL, "keep": 1000},
            "log": {"interval": 1, "plot": False, "tensorboard": False},
        }
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text(to_toml(build_config(values)))

    def start(self, fault: Fault | None, *options: str) -> Command:
        """Start or resume the run."""
        arguments = ["pretrain", str(self.folder / "run.toml"), "--run.resume", "True", *options]
        self.commands.append(Command(self.folder, len(self.commands), arguments, fault))
        return self.commands[-1]

    def end(self, command: Command, seconds: float = TIMEOUT + MARGIN) -> int | None:
        """Wait for a command."""
        began = time.monotonic()
        code = command.wait(seconds)
        self.hung |= time.monotonic() - began >= seconds
        return code

    def wait_for(self, happened: Any, command: Command) -> None:
        """Wait until something has happened, or the command has ended."""
        deadline = time.monotonic() + TIMEOUT + MARGIN
        while not happened() and command.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.002)

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = re.match(r'{"step": (\d+)', lines[-1]) if lines and lines[-1].endswith("\n") else None
        return int(found[1]) if found else 0

    def losses(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of every step."""
        return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(self.run / "metrics.jsonl")]


def disturb(job: Job, chance: random.Random) -> tuple[int | None, float, Fault]:
    """Let the fault happen. Returns the exit code, the seconds that it took, and the fault with its file."""
    fault = job.fault
    if fault.kind in AT_REST:
        return _damage(job, chance)
    command = job.start(fault)
    if fault.kind == "SIGTERM during a save":
        job.wait_for(
            lambda: any(job.run.glob("checkpoints/.saving-*")) and job.step() >= fault.step - INTERVAL, command
        )
    else:
        job.wait_for(lambda: job.step() >= fault.step - 2 * (fault.kind == "raise"), command)
    time.sleep(chance.random() * 0.05)  # so that a signal comes anywhere in a step
    job.complete = steps(job.run / "checkpoints")
    began, ranks = time.monotonic(), command.ranks()
    if fault.kind in RESTARTED:
        if fault.kind != "raise":
            os.kill(ranks[fault.rank], signal.SIGKILL if fault.kind == "kill -9" else signal.SIGSTOP)
        job.wait_for(lambda: len(command.ranks()) == len(ranks) and not {*ranks} & {*command.ranks()}, command)
    elif fault.kind == "SIGTERM during a save":
        os.kill(command.process.pid, signal.SIGTERM)  # type: ignore[arg-type]
    elif fault.kind == "deleted directory":
        job.run.rename(job.folder / "away")
    elif fault.kind == "dead launcher":
        os.kill(command.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() - began < MARGIN:
            time.sleep(0.01)
        job.hung |= any(Path(f"/proc/{pid}").exists() for pid in ranks)
    seconds = time.monotonic() - began
    code = job.end(command)
    if fault.kind not in RESTARTED and fault.kind != "dead launcher":
        seconds = time.monotonic() - began
    if fault.kind == "deleted directory":
        shutil.rmtree(job.run, ignore_errors=True)  # what a save that was under way has written there
        (job.folder / "away").rename(job.run)
    return code, seconds, fault


def _damage(job: Job, chance: random.Random) -> tuple[int | None, float, Fault]:
    """Stop the run, damage a file of its newest checkpoint or make it unreadable, and resume."""
    command = job.start(None)
    job.wait_for(lambda: job.step() >= job.fault.step, command)
    os.kill(command.process.pid, signal.SIGTERM)  # type: ignore[arg-type]
    job.end(command)
    *job.complete, newest = steps(job.run / "checkpoints")
    path = chance.choice(sorted(step_path(job.run / "checkpoints", newest).iterdir()))
    if job.fault.kind == "EIO on a read":
        path = path.parent / chance.choice([name for name in os.listdir(path.parent) if name != "manifest.json"])
    content = path.read_bytes()
    if job.fault.kind == "truncated file":
        path.write_bytes(content[: chance.randrange(len(content))])
    elif job.fault.kind == "flipped bit":
        bit = chance.randrange(8 * len(content))
        path.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
    fault = job.fault._replace(step=newest, file=path.name)
    command, began = job.start(fault), time.monotonic()
    job.wait_for(lambda: "not usable" in command.said, command)
    seconds = time.monotonic() - began
    return job.end(command), seconds, fault


def try_fault(job: Job, layout: str, expected: Sequence[tuple[int, float, float]], chance: random.Random) -> Row:
    """Let the fault happen, resume the run if it has ended, and judge what is left."""
    code, seconds, fault = disturb(job, chance)
    said = job.commands[-1].said
    words, wanted = KINDS[fault.kind]
    names = {key: re.escape(str(value)) for key, value in fault._asdict().items()}
    named = re.search(words.format(run=re.escape(str(job.run)), **names), said) is not None
    finished = job.step() == STEPS and code == 0
    if not finished:
        job.end(job.start(None))
    lost = set(job.complete) - set(good(job.run / "checkpoints"))
    row: Row = {"kind": fault.kind, "layout": layout, "rank": fault.rank, "step": fault.step, "file": fault.file}
    row |= {"seconds": round(seconds, 2), "lost": sorted(lost), "hung": job.hung}
    row |= {"named": named and (wanted is None or code == wanted), "identical": job.losses() == list(expected)}
    if not row["named"] or not row["identical"] or lost or job.hung:
        row["said"] = "\n".join(command.said for command in job.commands)[-4000:]
    return row


def good(checkpoints: Path) -> list[int]:
    """The steps whose checkpoints can be used."""
    from tpformer.training.checkpoint_files import CheckpointError, check_files

    found = []
    for step in steps(checkpoints):
        try:
            check_files(step_path(checkpoints, step))
            found.append(step)
        except CheckpointError:
            pass
    return found


def seconds_of(kind: str, rows: Sequence[Row]) -> tuple[float, float]:
    """Median and largest of a kind's seconds."""
    found = [row["seconds"] for row in rows if row["kind"] == kind]
    return statistics.median(found), max(found)


def table_line(kind: str, rows: Sequence[Row]) -> list[str]:
    """A kind's faults, and how many of them ended otherwise than they should."""
    own = [row for row in rows if row["kind"] == kind]
    counts = [len(own), sum(len(row["lost"]) for row in own), sum(row["hung"] for row in own)]
    counts += [sum(not row[key] for row in own) for key in ("named", "identical")]
    return [kind, *map(str, counts), *(f"{each:.1f}" for each in seconds_of(kind, rows))]


def draw(path: Path) -> Path:
    """A bar for each kind of fault."""
    note = (
        "Seconds from a fault until its job has ended or its ranks have started again: a kind's median, and its most."
    )
    rows = json.loads(path.read_text())["rows"]
    found = {kind: seconds_of(kind, rows) for kind in KINDS}
    bars = [Bar("", kind, {"seconds": median}, f"{median:.1f} ({most:.1f})") for kind, (median, most) in found.items()]
    return write_bars(path, note, "seconds", bars)


def run(options: argparse.Namespace) -> Report:
    """Try every kind of fault, in random order."""
    chance = random.Random(options.seed)
    faults = [kind for kind in KINDS for _ in range(QUICK_EACH if options.quick else EACH)]
    chance.shuffle(faults)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tpformer-faults-") as directory:
        folder = Path(directory)
        (folder / "text.txt").write_text("".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(2000)))
        build_dataset([folder / "text.txt"], folder / "data", "bytes", quiet=True)
        expected = {}
        for number, kind in enumerate(faults):
            layout = chance.choice(list(LAYOUTS))
            if layout not in expected:
                job = Job(folder / f"undisturbed-{number}", folder / "data", layout, Fault("", 0, 0))
                assert job.end(job.start(None), 300) == 0, job.commands[0].said
                expected[layout] = job.losses()
            fault = Fault(kind, chance.randrange(4), chance.randint(INTERVAL + 1, STEPS - 6))
            job = Job(folder / str(number), folder / "data", layout, fault)
            rows.append(try_fault(job, layout, expected[layout], chance))
            print(f"{number + 1}/{len(faults)} {kind}, {layout}: {rows[-1]['seconds']} s", flush=True)
    bad = [row for row in rows if "said" in row]
    table = columns(["fault"], ("runs", "lost", "hung", "unnamed", "different", "seconds", "most"))
    for kind in KINDS:
        table.add_row(*table_line(kind, rows))
    problems = [f"{row['kind']} on rank {row['rank']}, {row['layout']}: {row}" for row in bad]
    return Report([table], {"rows": rows}, problems, f"{len(rows)} faults: nothing lost, nothing hung, all named")


BENCH = Bench(
    name="faults",
    description="120 random faults in runs of 4 processes: what is lost, what hangs, what is named, what goes on",
    options={
        "--quick": {"action": "store_true", "help": "one fault of each kind, nothing written"},
        "--seed": {"type": int, "default": 0, "help": "of what is drawn at random"},
    },
    run=run,
    draw=draw,
    note=NOTE,
)
