"""How a command ends: errors as one line, exit codes, and signals.

Importing this file does not import tyro, so that `tpformer --help` is quick.
"""

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable

from tpformer.launchers import JoinError
from tpformer.processes.files import what_failed
from tpformer.processes.launch import USAGE_EXIT_CODE, record_exception, say_once
from tpformer.words import message

USAGE = (ValueError, FileNotFoundError, ImportError, FloatingPointError, JoinError)
# of a disk, a path or a limit of the machine, for which no traceback is needed, and where starting again does not help
USERS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
PEER_SECONDS = 1.0  # how long other ranks leave it to rank 0 to report a mistake that all of them have found


def guarded(work: Callable[[], None]) -> None:
    """Call `work`. What a user can mend (a value, a missing file or package, a run that diverges) is reported as one
    line on stderr, with exit code 2. Other ranks than 0 wait a second before that: a launcher ends them meanwhile, if
    rank 0 has reported a mistake. Ranks of this machine's launcher never report the same twice.

    Any other exception is reported by its traceback, to which torch adds the rank, with exit code 1. In both cases the
    interpreter's shutdown is skipped: an open process group can hang or abort in it, and peers notice only a process
    that has ended. If the reader of the output has gone (`| head`), the process ends by SIGPIPE. After Ctrl-C it ends
    by SIGINT, and by another signal that raised KeyboardInterrupt by that.
    """
    try:
        try:
            work()
        finally:
            sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as error:
        # the only pipe that is written to is the output; rich turns its BrokenPipeError into SystemExit
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _end_by(signal.SIGPIPE)
    except KeyboardInterrupt as error:
        traceback.clear_frames(error.__traceback__)  # what a signal has left half entered ends with its frame
        _end_by(error.args[0] if error.args else signal.SIGINT)
    except BaseException as error:  # DCP's CheckpointException does not derive from Exception
        record_exception(error)
        usage = isinstance(error, (*USAGE, MemoryError)) or getattr(error, "errno", None) in USERS or _too_large(error)
        if usage:
            time.sleep(PEER_SECONDS if os.environ.get("RANK", "0") != "0" else 0)
            say_once(f"tpformer: {message(_words(error))}\n")
        else:
            sys.excepthook(*sys.exc_info())
        os._exit(USAGE_EXIT_CODE if usage else 1)


def _too_large(error: BaseException) -> bool:
    """Whether torch could not allocate host memory, for which it has a RuntimeError."""
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _words(error: BaseException) -> object:
    """What is wrong with a file, in the order of a sentence; of any other error its own words."""
    if isinstance(error, MemoryError) or _too_large(error):
        asked = re.search(r"\d+ bytes|[\d.]+ \wiB", str(error))
        what = asked[0] if asked else "more"
        return f"{what} at once cannot be allocated: lower the sizes (`tpformer dry-run` counts what a rank holds)"
    return what_failed(error) if isinstance(error, OSError) else error


def _end_by(number: int) -> None:
    """End this process by a signal, so that its parent learns why."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
