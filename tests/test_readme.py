"""Every command of the README and of the guide works as written, in order, in a fresh clone; `make train` learns."""

import json
import os
import re
import shutil
import subprocess
import tomllib
import zipfile

import pytest
from test_repo import ROOT

PAGES = ("README.md", "docs/start.md", "docs/layers.md", "docs/kernels.md", "docs/results.md")
# what CI runs beside this test
ELSEWHERE = ("make test", "make check", "make proofs", "make compile-check")
PYTEST = "-m pytest"


def commands() -> list[str]:
    """Those of all pages, in order; a command that several pages have is run once."""
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S)]
    lines = [line.split(" #")[0].strip() for line in "".join(blocks).splitlines()]
    return [line for line in dict.fromkeys(lines) if line and not line.endswith(ELSEWHERE) and PYTEST not in line]


def test_commands_name_what_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert len(commands()) > 20
    for line in commands():
        words = [word for word in line.split() if "=" not in word]
        assert words[0] in ("make", "python3") or words[0].startswith(".venv/bin/"), line
        assert words[0] != "make" or words[1] in targets, line
        for file in re.findall(r"(?:examples|bench|checks|tests|docs)/\S+", line):
            assert (ROOT / file).exists(), line


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_readme_commands_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # cores are shared out by the commands themselves, as for a user
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "VIRTUAL_ENV")}
    for command in commands():
        result = subprocess.run(command, shell=True, cwd=clone, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        if command == "make train":
            rows = [json.loads(line) for line in (clone / "runs/gpt_tiny/metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["val_loss"] <= 2.1
            assert result.stdout.split("val_loss")[-1].count("def ") >= 1, "the sample begins with its prompt"
    wheel = [".venv/bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(wheel, cwd=clone, env=environment, check=True)
    with zipfile.ZipFile(next((clone / "dist").glob("*.whl"))) as packed:
        assert {"tpformer/py.typed", "tpformer/kernels/protocol.py"} <= set(packed.namelist())
    shutil.rmtree(clone)


def test_the_example_sets_no_derivable_field():
    values = tomllib.loads((ROOT / "examples/gpt_tiny.toml").read_text())
    keys = {key for section in values.values() for key in section}
    assert not keys & {"vocab_size", "ffn_hidden_size", "n_kv_heads", "tokenizer", "dtype", "device", "microbatch_size"}
