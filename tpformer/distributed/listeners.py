"""Lists that hear of what happens in this process while somebody listens: what recorders are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Listeners(Generic[Event]):
    """Those who listen now. Several may, one within the other or side by side, and each hears everything."""

    def __init__(self) -> None:
        self._lists: list[list[Event]] = []

    def tell(self, event: Event) -> None:
        """Append the event to every list that listens."""
        for events in self._lists:
            events.append(event)

    @contextmanager
    def listen(self) -> Iterator[list[Event]]:
        """Yields a list that gets every event until the context is left."""
        events: list[Event] = []
        self._lists.append(events)
        try:
            yield events
        finally:
            self._lists = [other for other in self._lists if other is not events]
