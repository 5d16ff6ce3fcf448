"""Below torch 2.13 tests of pipelines and of whole runs are skipped, also under `make gpu`; all others run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from versions import why_too_old

# nodeid -> (whether it is marked `gpu`, whether an older torch skips it)
ITEMS = {
    "tests/parallel/test_split.py::test_balanced": (False, True),
    "tests/training/test_run.py::test_resume": (False, True),
    "tests/training/test_run_gpu.py::test_bfloat16_run": (True, False),
    "tests/training/test_run_gpu.py::test_a_pipeline_on_one_gpu": (True, True),
    "tests/ops/test_pipelined_op.py::test_gradients": (False, False),
    "tests/kernels/test_matmul_kernel.py::test_on_gpu": (True, False),
}


def skipped(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    found = []
    for nodeid, (gpu, _) in ITEMS.items():
        marks = {"gpu": pytest.mark.gpu} if gpu else {}
        item = SimpleNamespace(nodeid=nodeid, path=Path(nodeid.split("::")[0]), get_closest_marker=marks.get)
        found += [nodeid] if why_too_old(item) is not None else []  # type: ignore[arg-type]
    return found


def test_what_older_versions_skip_and_the_floor_does_not(monkeypatch):
    assert skipped(monkeypatch, "2.11.0+cu130") == [nodeid for nodeid, (_, skips) in ITEMS.items() if skips]
    assert skipped(monkeypatch, "2.13.0+cpu") == []
