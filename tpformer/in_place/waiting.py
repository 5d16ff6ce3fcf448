"""A rank that waits for the others says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def said(what: str, patience: float) -> Iterator[None]:
    """Within, a rank that waits for the others for longer than `patience` seconds says why, once."""
    words = f"{what} has waited {patience:g} s for other ranks: call it on all of them, not on one"
    timer = Timer(patience, warnings.warn, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
