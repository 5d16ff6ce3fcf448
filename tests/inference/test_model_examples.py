"""The notebook of examples/ runs as it stands, and checks its result. The scripts are test_readme.py's."""

import json

import pytest
from commands import ROOT, python


@pytest.mark.proof
def test_the_notebook_runs(tmp_path):
    """Its cells are plain Python, so they run as one script; matplotlib draws without a screen."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples/walk.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
    script = tmp_path / "walk.py"
    script.write_text("import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join(code))
    assert "logits differ by" in python(script)
