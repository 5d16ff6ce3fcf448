"""What a dataset holds, as a line that is equal for equal tokens wherever the files lie.

Only reading and remembering such lines belongs here. run_directory.py compares them when a run goes on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tpformer.processes.files import file_sha256, in_words

from .indexed import IndexedDataset

_LARGE = 2 * 10**9  # bytes, which take seconds to read


class FileContent(NamedTuple):
    """What a .bin file held when it had these size, modification and change times (in nanoseconds)."""

    stamp: tuple[int, int, int]
    content: str


def read_contents(
    prefixes: Iterable[str], known: Mapping[str, FileContent], report: Callable[[str], None]
) -> dict[str, FileContent]:
    """{absolute path of the .bin: its content} of datasets.

    Every file is read through once for its SHA-256. One that is known, and has not been touched since, is not read
    again: its size and both times are the same. ValueError or FileNotFoundError for a dataset that cannot be read.
    """
    found: dict[str, FileContent] = {}
    for prefix in dict.fromkeys(prefixes):
        dataset = IndexedDataset(prefix)
        path = dataset.bin_path.absolute()
        with in_words(path):
            state = path.stat()
            stamp = (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            before = known.get(str(path))
            if before is None or before.stamp != stamp or not before.content.startswith(f"{dataset.dtype}, "):
                if state.st_size > _LARGE:
                    report(f"reading {path} once for its SHA-256: {state.st_size / 1e9:.1f} GB")
                content = f"{dataset.dtype}, {state.st_size} bytes, SHA-256 {file_sha256(path)}"
                before = FileContent(stamp, content)
        found[str(path)] = before
    return found
