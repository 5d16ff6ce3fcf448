"""The tokens of a text that is too long to be tokenized at once. Nothing else belongs here."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tpformer.words import shown

_OVERLAP = 1 << 12  # characters that two windows share: in their middle both must have the same tokens
_LONGEST = 1 << 22  # characters of a window


def encode_windows(encode: Callable[[str], Any], pieces: Iterable[str]) -> Iterator[np.ndarray]:
    """The ids of a text in pieces, int64 (n,) for each window: together those of the whole text.

    encode: gives an object with the `ids` of a string, and the `offsets` (begin, end) of each in it. Windows overlap,
    and are joined where their tokens are the same ones, so that the beginning and the end of a window decide nothing.
    Memory: that of a window, which grows where they differ. ValueError if they differ over 4 million characters.
    """
    text, begin, found = "", 0, None  # the tokens of `text` from the character `begin` on are not given yet
    for piece in pieces:
        if found is None:
            text, found = piece, encode(piece)
            continue
        following = text[-_OVERLAP:] + piece
        after = encode(following)
        border = _border(found, after, len(text) - _OVERLAP)
        if border is not None:
            yield _ids(found, begin, border + len(text) - _OVERLAP)
            text, begin, found = following, border, after
        elif len(text) > _LONGEST:
            raise ValueError(
                f"more than {_LONGEST} characters after {shown(text[:20])} cannot be tokenized in parts, as they "
                f"repeat themselves: leave them out"
            )
        else:
            text += piece
            found = encode(text)
    if found is not None:
        yield _ids(found, begin, None)


def _starts(encoding: Any) -> np.ndarray:
    return np.fromiter((begin for begin, _ in encoding.offsets), np.int64)


def _ids(encoding: Any, begin: int, end: int | None) -> np.ndarray:
    """The ids of the tokens that begin at the characters begin, ..., end - 1."""
    ids = np.array(encoding.ids, dtype=np.int64)
    if begin == 0 and end is None:
        return ids
    starts = _starts(encoding)
    return ids[np.searchsorted(starts, begin) : len(ids) if end is None else np.searchsorted(starts, end)]


def _border(before: Any, after: Any, offset: int) -> int | None:
    """A character of `after`'s text where both go on with the same tokens. offset: where its text begins in before's.

    None if they do not agree on all tokens of a quarter of the overlap.
    """
    if offset < 0:
        return None
    found = []
    for encoding, shift in ((before, offset), (after, 0)):
        starts = _starts(encoding) - shift
        if (np.diff(starts) < 0).any():
            return None
        part = slice(*np.searchsorted(starts, (_OVERLAP // 2, _OVERLAP * 3 // 4)))
        found.append((starts[part], np.array(encoding.ids)[part]))
    (starts, ids), (others, other_ids) = found
    agree = len(starts) > 0 and np.array_equal(starts, others) and np.array_equal(ids, other_ids)
    return int(starts[0]) if agree else None
