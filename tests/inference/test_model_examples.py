"""The examples about a whole model, and the notebook, run as they stand; each checks its own result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(path: Path) -> str:
    """What a script prints; AssertionError, with its error, if it fails."""
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "ending"), [("continue_llama.py", "of the largest\n"), ("lora.py", "merged and exported\n")]
)
def test_a_script_runs(name, ending):
    pytest.importorskip("transformers")
    assert (EXAMPLES / name).read_text().count("\n") < 80
    assert run(EXAMPLES / name).endswith(ending)


@pytest.mark.proof
def test_the_notebook_runs(tmp_path):
    """Its cells are plain Python, so they run as one script; matplotlib draws without a screen."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    cells = json.loads((EXAMPLES / "walk.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
    script = tmp_path / "walk.py"
    script.write_text("import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join(code))
    assert "logits differ by" in run(script)
