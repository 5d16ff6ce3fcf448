"""What tests of benches need: the repository on the path, as it is not installed as a whole, and time that is given."""

from collections.abc import Callable

import pytest

from harness.timing import Call, Effort


@pytest.fixture
def untimed() -> Callable[[dict[str, Call], Effort], dict[str, list[float]]]:
    """In place of harness.timing.measure: each call is prepared and runs once, and the n-th takes n milliseconds."""

    def measure(calls: dict[str, Call], effort: Effort) -> dict[str, list[float]]:
        for call in calls.values():
            if call.prepare is not None:
                call.prepare()
            call.run()
        return {name: [1e-3 * (index + 1)] * effort.rounds for index, name in enumerate(calls)}

    return measure
