"""Which tests need the floor of torch that this project supports, 2.13, and are skipped on an older one."""

import re

import pytest
import torch

REASON = "pipelines and FSDP2 need torch 2.13: before it V-shaped schedules hang, and other bytes are held"
RUNS = {"bench", "models", "parallel", "planner", "regressions", "training"}  # folders of tests


def why_too_old(item: pytest.Item) -> str | None:
    """Why this torch cannot run a test, or None. Those marked `gpu` have no FSDP2, and name their pipelines."""
    if torch.__version__ >= (2, 13):
        return None
    pipeline = re.search(r"pipeline(?!d)", item.nodeid)  # `pipelined` is a transport
    on_gpu = item.get_closest_marker("gpu") is not None
    needed = pipeline is not None or (not on_gpu and not RUNS.isdisjoint(item.path.parts))
    return f"torch {torch.__version__}: {REASON}" if needed else None
