"""Every README command works as written, in order, in a fresh clone with a new environment; `make train` learns."""

import json
import os
import shutil
import subprocess
import tomllib

import pytest
from test_repo import ROOT, readme_commands

# what CI runs beside this test
ELSEWHERE = ("make test", "make check", "make proofs", "make compile-check", "-m pytest")


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_readme_commands_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # cores are shared out by the commands themselves, as for a user
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "VIRTUAL_ENV")}
    for command in readme_commands():
        if any(command.endswith(other) for other in ELSEWHERE):
            continue
        result = subprocess.run(command, shell=True, cwd=clone, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        if command == "make train":
            rows = [json.loads(line) for line in (clone / "runs/gpt_tiny/metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["val_loss"] <= 2.1
            assert result.stdout.split("val_loss")[-1].count("def ") >= 1, "the sample begins with its prompt"
    shutil.rmtree(clone)


def test_the_example_sets_no_derivable_field():
    values = tomllib.loads((ROOT / "examples/gpt_tiny.toml").read_text())
    keys = {key for section in values.values() for key in section}
    assert not keys & {"vocab_size", "ffn_hidden_size", "n_kv_heads", "tokenizer", "dtype", "device", "microbatch_size"}
