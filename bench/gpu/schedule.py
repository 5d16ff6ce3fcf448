"""Runs items one after the other, each as a subprocess with a limit, until the time is over.

Belongs here: which item is next, and how one is begun, ended and judged. What has been done is in the state's file
whenever this process may end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import util
from pathlib import Path
from typing import NamedTuple

from harness.provenance import ROOT
from tpformer.processes.parent import end_with_parent

from . import cache
from .figures import figure
from .items import INTO, TORCH, Command, Item
from .state import DONE, FAILED, LIMIT, MEASURED, MISSED, STOPPED, State

MARGIN, SPARE = 1.2, 5.0  # an item begins if so many times its seconds, and so many more, are left
MEASURE, REHEARSE, FILL = "measure", "rehearse", "fill"
UNMEASURED = 3600.0  # seconds after which an item is ended that measures nothing, on a machine that may be busy
GRACE = 5.0  # seconds between asking a process to end and ending it
LOOKS = 0.05  # seconds


class Stop:
    """Whether somebody has asked this process to end: with `kill`, or on the keyboard."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, *signal_and_frame: object) -> None:
        self.asked = True


class Session(NamedTuple):
    """One call: what it may run, where its results go, and until when, by time.monotonic.

    way: MEASURE; REHEARSE, which needs no GPU; or FILL, which needs none either, and compiles what the items call.
    kernels: how many were compiled, and how many were found in Triton's cache.
    """

    items: Sequence[Item]
    folder: Path
    state: State
    until: float
    stop: Stop
    way: str = MEASURE
    say: Callable[[str], object] = print
    kernels: Counter[str] = Counter()

    @property
    def pretends(self) -> bool:
        """Whether nothing is measured."""
        return self.way != MEASURE

    def command(self, item: Item) -> Command:
        compilation = item.compilation or item.command
        return {MEASURE: item.command, REHEARSE: item.rehearsal, FILL: compilation}[self.way]

    def key(self, item: Item) -> str:
        return self.state.key(item, self.command(item).arguments)

    def possible(self, item: Item) -> bool:
        """Whether all is there that the item needs."""
        if self.way == FILL:
            return item.compilation is not None
        return self.pretends or not item.tool or shutil.which(item.tool[0]) is not None

    def limit(self, item: Item) -> float:
        """Seconds after which an item is ended."""
        return UNMEASURED if self.pretends else item.limit

    def log(self, item: Item) -> Path:
        return self.folder / "logs" / f"{item.name.replace(' ', '_')}.txt"


def order(session: Session) -> list[Item]:
    """What is not measured yet: first what began and was not, then by value per second."""
    state = session.state
    left = [item for item in session.items if session.possible(item) and not state.done(item.name, session.key(item))]
    return sorted(left, key=lambda item: (not state.failed(item.name), -item.value / max(state.expected(item), 1.0)))


def run(session: Session) -> None:
    """Take items as long as one fits into what is left of the time."""
    tried: set[str] = set()
    while not session.stop.asked:
        left = session.until - time.monotonic()
        waiting = [item for item in order(session) if item.name not in tried]
        item = next((each for each in waiting if MARGIN * session.state.expected(each) + SPARE <= left), None)
        if item is None:
            break
        tried.add(item.name)
        take(session, item, left)


def take(session: Session, item: Item, left: float) -> None:
    """Run one item, and note what came of it."""
    session.state.begin(item, session.key(item))
    session.say(f"{item.name}: begins, {left:.0f} s are left" if left < float("inf") else f"{item.name}: begins")
    result, log = session.folder / session.command(item).result, session.log(item)
    before = stamp(result)
    begun = time.monotonic()
    code = execute(session, item, begun + min(session.limit(item), left))
    seconds = time.monotonic() - begun
    if code is None:
        outcome = STOPPED if session.stop.asked or seconds < session.limit(item) else LIMIT
    elif code in (0, 1) and stamp(result) != before:
        outcome = MISSED if code else MEASURED
    else:
        outcome = FAILED
    found = figure(result) if outcome in DONE else last_line(log)
    session.state.end(item, outcome, seconds, "" if session.pretends and outcome in DONE else found)
    kernels = kernels_of(result) if outcome in DONE else {}
    session.kernels.update(kernels)
    session.say(f"{item.name}: {words(session, outcome)}, {seconds:.1f} s{in_words(kernels)}")


def words(session: Session, outcome: str) -> str:
    """An outcome, which is none of a measurement where nothing was measured."""
    done = {MEASURE: outcome, REHEARSE: "rehearsed", FILL: "compiled"}[session.way]
    return done if outcome in DONE else outcome if session.way == MEASURE else f"{done}: {outcome}"


def kernels_of(result: Path) -> dict[str, int]:
    """How many kernels a result's process compiled and found, if it says so."""
    return json.loads(result.read_text()).get("kernels", {}) if result.suffix == ".json" else {}


def in_words(kernels: Mapping[str, int]) -> str:
    return "".join(f", {number} kernels {what}" for what, number in sorted(kernels.items()))


def stamp(path: Path) -> int | None:
    """The time at which a file was written, in nanoseconds; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def last_line(log: Path) -> str:
    """The last line of a log that says anything."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


def filled(text: str, session: Session) -> str:
    return text.replace(INTO, str(session.folder))


def environment(session: Session, item: Item) -> dict[str, str]:
    """The variables of an item's process: the repository's modules, and Triton's cache. A rehearsal does not share the
    cache, because its kernels are of other sizes."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    torch = util.find_spec("torch")
    of_torch = str(Path((torch and torch.origin) or "").parent)
    own = {name: filled(text, session).replace(TORCH, of_torch) for name, text in item.environment}
    shared = {} if session.way == REHEARSE else cache.environment()
    return {**os.environ, **shared, "PYTHONPATH": paths, **({} if session.pretends else own)}


def execute(session: Session, item: Item, until: float) -> int | None:
    """The exit code of an item's command, whose output goes to its log; None if it and its children had to be ended."""
    tool = () if session.pretends else item.tool
    command = [*tool, sys.executable, *session.command(item).arguments]
    log = session.log(item)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [filled(part, session) for part in command], cwd=ROOT, env=environment(session, item),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        while process.poll() is None and time.monotonic() < until and not session.stop.asked:
            time.sleep(LOOKS)
        ended = process.poll() is None
        end(process)
    return None if ended else process.returncode


def end(process: subprocess.Popen) -> None:
    """End a process, if it has not ended, and all that it has started: they have a session of their own."""
    if process.poll() is None:
        send(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
    send(process.pid, signal.SIGKILL)
    process.wait()


def send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # all of it has ended
