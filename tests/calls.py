"""Records who calls whom while something runs, so that a page can be held against what happened.

Belongs here: the record of one process. tests/test_architecture.py says what is run and what is compared.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
Function = tuple[str, str]  # file in the repository, qualified name: ("tpformer/cli/run.py", "parse_run")


class _Running(threading.local):
    """The functions of this thread that have not yet returned, after None."""

    def __init__(self) -> None:
        self.functions: list[Function | None] = [None]


class Calls:
    """(caller, callee) -> how many pairs had been seen before; callers are all functions that had not yet returned.

    The caller None stands for nothing: (None, f) says when f was first called.
    """

    def __init__(self) -> None:
        self.order: dict[tuple[Function | None, Function], int] = {}
        self._functions: dict[object, Function | None] = {}
        self._running = _Running()

    def _function(self, code: CodeType) -> Function | None:
        path = Path(code.co_filename).resolve()  # tpformer/kernels is a link
        inside = path.is_relative_to(ROOT) and path.is_file()
        return (str(path.relative_to(ROOT)), code.co_qualname) if inside else None

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._functions:
            self._functions[code] = self._function(code)
        function = self._functions[code]
        if function is None:
            return
        running = self._running.functions
        if event == "return":
            if len(running) > 1:  # what ran before the recording began returns, too
                running.pop()
            return
        for caller in running:
            self.order.setdefault((caller, function), len(self.order))
        running.append(function)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """This thread's calls, and those of threads that it starts."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
