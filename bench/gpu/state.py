"""What came of the items so far: one JSON file, whole at any time, which is written before and after each of them.

Belongs here: outcomes, what makes a result one of the present source, and what an item is expected to take.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.provenance import commit, digest, write_json
from harness.sources import files

from .items import Item

SCHEMA = 1
MEASURED, MISSED = "measured", "bar missed"
FAILED, LIMIT, STOPPED, UNFINISHED = "failed", "over its limit", "cut off", "did not end"
DONE = (MEASURED, MISSED)


class Entry(NamedTuple):
    """What came of an item when it last began. seconds: what it took when it last ended by itself, before if not now.

    key: of its sources, the machine and the command. dirty: whether the tree had changes that no commit has.
    """

    key: str
    outcome: str
    seconds: float | None
    figure: str
    commit: str | None
    dirty: bool | None
    date: str


class State:
    """The entries of one machine by item, and their file."""

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path, self.machine = path, dict(machine)
        found = json.loads(path.read_text()) if path.exists() else {"items": {}}
        self.entries = {name: Entry(**fields) for name, fields in found["items"].items()}
        self.keys: dict[tuple[Item, tuple[str, ...]], str] = {}  # all of them take seconds, and are asked for each item

    def key(self, item: Item, arguments: tuple[str, ...]) -> str:
        """What a result of this command depends on, with the sources as they are when a call first asks."""
        if (item, arguments) not in self.keys:
            parts = [digest(files(item.sources)), sorted(self.machine.items()), arguments, item.environment]
            self.keys[item, arguments] = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return self.keys[item, arguments]

    def done(self, name: str, key: str) -> bool:
        """Whether the item was measured with this key."""
        entry = self.entries.get(name)
        return entry is not None and entry.key == key and entry.outcome in DONE

    def failed(self, name: str) -> bool:
        """Whether the item began, and was not measured."""
        return name in self.entries and self.entries[name].outcome not in DONE

    def expected(self, item: Item) -> float:
        """Seconds that the item takes: as it did, else by its estimate."""
        entry = self.entries.get(item.name)
        return item.seconds if entry is None or entry.seconds is None else entry.seconds

    def begin(self, item: Item, key: str) -> None:
        """Note that the item has begun, should this process be killed before it ends."""
        old = self.entries.get(item.name)
        seconds = None if old is None else old.seconds
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.entries[item.name] = Entry(key, UNFINISHED, seconds, "", **commit(), date=today)
        self.write()

    def end(self, item: Item, outcome: str, seconds: float, figure: str) -> None:
        """Note what came of it."""
        entry = self.entries[item.name]
        took = round(seconds, 1) if outcome in DONE else entry.seconds
        self.entries[item.name] = entry._replace(outcome=outcome, seconds=took, figure=figure)
        self.write()

    def write(self) -> None:
        items = {name: entry._asdict() for name, entry in self.entries.items()}
        write_json(self.path, {"schema": SCHEMA, "machine": self.machine, "items": items})
