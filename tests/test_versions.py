"""Below torch 2.13 tests of pipelines and of whole runs are skipped, also under `make gpu`; all others run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from versions import why_too_old


@pytest.mark.parametrize(("nodeid", "gpu", "skips"), [
    ("tests/parallel/test_layout.py::test_balanced", False, True),
    ("tests/training/test_run.py::test_resume", False, True),
    ("tests/training/test_run_gpu.py::test_bfloat16_run", True, False),
    ("tests/training/test_run_gpu.py::test_a_pipeline_on_one_gpu", True, True),
    ("tests/ops/test_pipelined_op.py::test_gradients", False, False),
    ("tests/kernels/test_matmul_kernel.py::test_on_gpu", True, False),
])  # fmt: skip
def test_what_older_versions_skip_and_the_floor_does_not(monkeypatch, nodeid, gpu, skips):
    marks = {"gpu": pytest.mark.gpu} if gpu else {}
    item: Any = SimpleNamespace(nodeid=nodeid, path=Path(nodeid.split("::")[0]), get_closest_marker=marks.get)
    for version, too_old in (("2.11.0+cu130", True), ("2.13.0+cpu", False)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        assert (why_too_old(item) is not None) == (skips and too_old), version
