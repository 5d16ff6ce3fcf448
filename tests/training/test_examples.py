"""Each example can start, and has the published size and layout. The SLURM script starts torchrun on its nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import losses, write_run
from turns import of_turn

from tpformer.config import build_config, check_config, read_toml
from tpformer.training.resolve import with_vocab_size

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text()


# Billions of parameters as printed, GPUs, tensor-parallel, pipeline and expert ranks, microbatch, batch in samples.
# Of gpt3: arXiv:2104.04473, section 5.1, and its authors' arXiv:2205.05198, table 3. Of the others of the name:
# arXiv:2104.04473, table 1, whose model-parallel ranks share tensors within a node of 8 GPUs
ALL = {
    "gpt_1.7b": ("1.7", 32, (1, 1), 16, 512), "gpt_3.6b": ("3.6", 64, (2, 1), 16, 512),
    "gpt_7.5b": ("7.5", 128, (4, 1), 16, 512), "gpt_18b": ("18.4", 256, (8, 1), 8, 1024),
    "gpt_39b": ("39.1", 512, (8, 2), 4, 1536), "gpt_76b": ("76.1", 1024, (8, 4), 2, 1792),
    "gpt_145b": ("145.6", 1536, (8, 8), 2, 2304), "gpt_310b": ("310.1", 1920, (8, 16), 1, 2160),
    "gpt_530b": ("529.6", 2520, (8, 35), 1, 2520), "gpt_1t": ("1008.0", 3072, (8, 64), 1, 3072),
    "gpt3_175b": ("174.6", 1024, (8, 8), 1, 1536), "llama3_8b": ("8.0", 8, (1, 1), 1, 64),
    "llama3_70b": ("70.6", 64, (8, 1), 2, 512),
    # layouts of Megatron-Bridge's recipes
    "qwen3_235b": ("235.1", 256, (2, 8, 32), 1, 1024), "deepseek_v3_like": ("674.8", 1024, (2, 8, 64), 1, 15360),
}  # fmt: skip
SMALL = ("gpt_tiny", "moe_tiny", "context_tiny", "fp8_tiny")  # of no paper, for a laptop


@pytest.mark.parametrize("name", ALL)
def test_an_example_can_start_and_fits_and_is_the_published_row(name):
    parameters, gpus, ranks, *batch = ALL[name]
    config = build_config(read_toml(EXAMPLES / f"{name}.toml"))
    config = with_vocab_size(config, config.model.known_vocab_size)  # its data, which are absent, would come first
    check_config(config)
    layout = config.parallel
    tp, pp, dp, ep = layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.expert_parallel
    assert (tp, pp, *([] if ep is None else [ep])) == ranks and layout.world_size == tp * pp * dp == gpus
    assert [config.microbatch_size, config.train.global_batch_size] == batch
    assert f"{config.model.n_parameters / 1e9:.1f}" == parameters
    comment, text = (EXAMPLES / f"{name}.toml").read_text().split("\n", 1)
    assert f"{parameters}B parameters" in comment and f"on {gpus} GPUs" in comment
    # which tests/planner/test_rank_memory.py compares with the prediction
    gigabytes = int(re.search(r"^# predicted: (\d+) GB of 80,", text, re.MULTILINE)[1])
    assert gigabytes < 72, "a margin for what is not counted: libraries, and what the allocator cannot use"
    axes = f"{tp} x {pp} x {dp}" + (f", ep {ep}" if ep else "")
    numbers = f"{parameters}B", gpus, axes, layout.zero, ", ".join(map(str, batch)), gigabytes
    assert f"| [{name}.toml]({name}.toml) | {' | '.join(map(str, numbers))} |" in README


def test_the_readme_lists_all_large_examples():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {*ALL, *SMALL}
    assert re.findall(r"^\| \[(.+)\.toml\]", README, re.MULTILINE) == [*ALL]


STUBS = {
    "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "torchrun": "printf '%s\\n' \"$@\"",
}
SLURM = {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_ID": "70012", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def stubbed(folder: Path, *names: str, **slurm: str) -> dict[str, str]:
    """An environment in which SLURM's commands are stubs, for a job on the nodes node3 and node4."""
    for name in names:
        (folder / name).write_text(f"#!/bin/bash\n{STUBS[name]}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, **SLURM, **slurm, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def slurm(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = ["bash", str(EXAMPLES / "slurm.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, **options)


def test_the_slurm_script_starts_torchrun(tmp_path):
    script = EXAMPLES / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    result = slurm("run.toml", "--train.steps", "5", env=stubbed(tmp_path, *STUBS))
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    rendezvous = {"--rdzv-backend": "c10d", "--rdzv-id": "70012", "--rdzv-endpoint": "node3:20012"}
    options = {"--nnodes": "2", "--nproc-per-node": "8", "--max-restarts": "3", **rendezvous}
    assert dict(zip(words[0:12:2], words[1:12:2], strict=True)) == options
    assert words[12:] == "-m tpformer.cli pretrain run.toml --train.steps 5 --run.resume True".split()
    # a directive after the first command would be ignored by sbatch
    assert "#SBATCH" not in script.read_text().split("set -euo")[1]
    result = slurm(env=stubbed(tmp_path, *STUBS))
    assert result.returncode == 2 and "usage: sbatch" in result.stderr


@of_turn(1)
def test_the_slurm_script_trains_and_continues(tmp_path, tiny_values):
    """SLURM is stubbed and torchrun is not. A node of two ranks is submitted, and once more with more steps."""
    toml = write_run(tmp_path, tiny_values, parallel={"tensor_parallel": 2})
    environment = stubbed(tmp_path, "scontrol", "srun", SLURM_NNODES="1", SLURM_GPUS_ON_NODE="2", OMP_NUM_THREADS="1")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    for steps in (2, 4):
        result = slurm(toml, "--train.steps", str(steps), env=environment)
        assert result.returncode == 0, result.stderr
    assert [step for step, *_ in losses(tiny_values["run"]["dir"])] == [1, 2, 3, 4]
    assert "from step 2" in result.stdout
