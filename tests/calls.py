"""Records who calls whom while something runs, so that a page can be held against what happened.

Belongs here: the record of one process. tests/test_architecture.py says what is run and what is compared.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
Function = tuple[str, str]  # file in the repository, qualified name: ("tpformer/cli.py", "parse_run")


class Calls:
    """(caller, callee) -> how many pairs had been seen before; callers are all functions that had not yet returned.

    The caller None stands for nothing: (None, f) says when f was first called.
    """

    def __init__(self) -> None:
        self.order: dict[tuple[Function | None, Function], int] = {}
        self._functions: dict[object, Function | None] = {}

    def _function(self, frame: FrameType) -> Function | None:
        code = frame.f_code
        if code not in self._functions:
            path = Path(code.co_filename).resolve()  # tpformer/kernels is a link
            inside = path.is_relative_to(ROOT) and path.is_file()
            self._functions[code] = (str(path.relative_to(ROOT)), code.co_qualname) if inside else None
        return self._functions[code]

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (callee := self._function(frame)) is None:
            return
        self.order.setdefault((None, callee), len(self.order))
        above = frame.f_back
        while above is not None:
            if (caller := self._function(above)) is not None:
                self.order.setdefault((caller, callee), len(self.order))
            above = above.f_back

    @contextmanager
    def recording(self) -> Iterator[None]:
        """This thread's calls, and those of threads that it starts."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
