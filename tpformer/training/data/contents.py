"""What a dataset holds, as a line that is equal for equal tokens and targets wherever the files lie.

Only reading and remembering such lines belongs here. run_directory.py compares them when a run goes on.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpformer.processes.files import file_sha256, in_words, is_there

from .indexed import IndexedDataset, dataset_paths, read_sidecar

_LARGE = 2 * 10**9  # bytes, which take seconds to read


class FileContent(NamedTuple):
    """What a .bin file, and its .mask, held when they had these sizes, modification and change times (nanoseconds)."""

    stamp: tuple[int, ...]
    content: str


def read_contents(
    prefixes: Iterable[str], known: Mapping[str, FileContent], report: Callable[[str], None]
) -> dict[str, FileContent]:
    """{absolute path of the .bin: its content, and its mask's if there is one} of datasets.

    Every file is read through once for its SHA-256. A dataset that is known, and has not been touched since, is not
    read again: sizes and both times are the same. ValueError or FileNotFoundError for a dataset that cannot be read,
    and ValueError for one whose sidecar states another SHA-256.
    """
    found: dict[str, FileContent] = {}
    for prefix in dict.fromkeys(prefixes):
        dataset = IndexedDataset(prefix)
        path = dataset.bin_path.absolute()
        with in_words(path):
            masked = is_there(dataset.mask_path)
            stamp = (*_stamp(path), *(_stamp(dataset.mask_path) if masked else ()))
            before = known.get(str(path))
            if before is None or before.stamp != stamp or not before.content.startswith(f"{dataset.dtype}, "):
                if stamp[0] > _LARGE:
                    report(f"reading {path} once for its SHA-256: {stamp[0] / 1e9:.1f} GB")
                digest, sidecar = file_sha256(path), read_sidecar(prefix) or {}
                if sidecar.get("sha256", digest) != digest:
                    raise ValueError(
                        f"{path} is damaged, or is not the file that {dataset_paths(prefix).sidecar} describes: its "
                        f"SHA-256 there is another; recopy or rebuild the dataset, or, if its tokens are meant to be "
                        f"others, remove the .json and set data.tokenizer"
                    )
                content = f"{dataset.dtype}, {stamp[0]} bytes, SHA-256 {digest}"
                if masked:
                    content += f", mask SHA-256 {file_sha256(dataset.mask_path)}"
                before = FileContent(stamp, content)
        found[str(path)] = before
    return found


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns
