"""The GPU benches: without a GPU they show predictions and write nothing. Marked `gpu`: each as a whole, --quick."""

from pathlib import Path

import pytest
import torch

from bench.__main__ import BENCHES
from bench.runner import main

NAMES = [bench.name for bench in BENCHES if bench.device == "cuda"]
MAKEFILE = (Path(__file__).resolve().parents[2] / "Makefile").read_text()


def test_make_bench_runs_every_one_of_them():
    listed = MAKEFILE.split("GPU_BENCHES := ")[1].split("\n\n")[0].replace("\\", " ").split()
    assert {*NAMES} - {"nvlink"} <= {*listed}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_predictions_without_a_gpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main([name], BENCHES, tmp_path) == 0
    said = capsys.readouterr().out
    assert f"{name} needs " in said and "nothing is measured, nothing is written" in said
    assert "PREDICTION, not a measurement" in said and not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_quick_on_a_gpu(name: str, tmp_path: Path):
    assert main([name, "--quick"], BENCHES, tmp_path) == 0
    assert not list(tmp_path.iterdir())
