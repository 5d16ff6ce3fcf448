"""Records who calls whom while something runs, so that a page can be held against what happened.

Belongs here: the record of one process. tests/test_architecture.py says what is run and what is compared.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TraceFunction = Callable[[FrameType, str, Any], Any]
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
        self._files: dict[str, str | None] = {}  # by a code object's name of it; None: not of the library
        self._running = _Running()

    def _file(self, name: str) -> str | None:
        path = Path(name).resolve()  # tpformer/kernels is a link
        inside = path.is_file() and any(path.is_relative_to(ROOT / package) for package in ("tpformer", "kernels"))
        return str(path.relative_to(ROOT)) if inside else None

    def _called(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        code = frame.f_code
        if code.co_filename not in self._files:
            self._files[code.co_filename] = self._file(code.co_filename)
        file = self._files[code.co_filename]
        if file is None:
            return None
        function = file, code.co_qualname
        running = self._running.functions
        for caller in running:
            self.order.setdefault((caller, function), len(self.order))
        running.append(function)
        frame.f_trace_lines = False
        return self._returned

    def _returned(self, frame: FrameType, event: str, _: object) -> TraceFunction:
        if event == "return":
            self._running.functions.pop()
        return self._returned

    @contextmanager
    def recording(self) -> Iterator[None]:
        """This thread's calls, and those of threads that it starts.

        A trace function is called for functions alone, a profile function for C's and for every return as well: in
        Triton's interpreter that is three times as often.
        """
        before = sys.gettrace()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]
