"""Which tests need torch 2.13, the oldest version that this project supports whole, and are skipped on older ones."""

import re

import pytest
import torch

REASON = "pipelines and FSDP2 need torch 2.13: in older ones V-shaped schedules hang, and FSDP2 holds other bytes"
RUNS = {"bench", "lessons", "models", "parallel", "planner", "regressions", "training"}  # folders of tests


def why_too_old(item: pytest.Item) -> str | None:
    """Why this torch cannot run a test, or None if it can.

    Of the tests marked `gpu` only those with pipelines need the newer torch, and "pipeline" is in their names.
    """
    if torch.__version__ >= (2, 13):
        return None
    pipeline = re.search(r"pipeline(?!d)", item.nodeid)  # `pipelined` is a transport
    on_gpu = item.get_closest_marker("gpu") is not None
    needed = pipeline is not None or (not on_gpu and not RUNS.isdisjoint(item.path.parts))
    return f"torch {torch.__version__}: {REASON}" if needed else None
