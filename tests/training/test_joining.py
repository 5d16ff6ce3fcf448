"""Ranks of a run that are not one another's, found as they join: each ends with one sentence, and the folder of a run
that trains is that run's."""

import json
import shutil
from pathlib import Path

import pytest
from commands import main
from tiny_runs import rows, values_with, write_run
from torch.distributed import TCPStore
from turns import of_turn

from tpformer.processes import watchdog
from tpformer.training.companions import byte_tokenizer


def impatient(*arguments: str) -> None:
    """Run `tpformer`, which waits a tenth of the time for a file that may show up late."""
    watchdog.SHARED_SECONDS /= 10
    main(*arguments)


def free_port() -> str:
    return str(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


LAUNCHERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "torchrun": (("RANK", "LOCAL_RANK"), {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}),
    "srun": (("SLURM_PROCID", "SLURM_LOCALID"), {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0"}),
}
TWO = {"parallel": {"tensor_parallel": 2}, "train": {"steps": 2}, "data": {"valid": []}}


@pytest.fixture
def join(commands, tmp_path, tiny_values):
    """join([arguments of rank 0], [of rank 1]): exit codes and stderrs of two ranks that no launcher watches, which
    have torchrun's environment, or srun's."""
    toml = write_run(tmp_path, values_with(tiny_values, **TWO))

    def started(*each: list[str], launcher: str = "torchrun") -> list[tuple[int, str]]:
        own, shared = LAUNCHERS[launcher]
        shared = shared | {"MASTER_PORT": free_port()}
        given = [words if words[:1] == ["verify"] else ["pretrain", *words] for words in each]
        ranks = [
            commands.call(impatient, command, toml, *words, **dict.fromkeys(own, str(rank)), **shared)
            for rank, (command, *words) in enumerate(given)
        ]
        return [(code, err) for code, _, err in (rank.finish(100) for rank in ranks)]

    return started


@pytest.mark.parametrize(("first", "second", "said"), [
    ([], ["--optimizer.lr", "0.25"], "rank 1 has optimizer.lr = 0.25 where rank 0 has "),
    (["--data.tokenizer", "{one}"], ["--data.tokenizer", "{two}"], "rank 1 has data.tokenizer = "),
    ([], ["verify"], "rank 1 has command = 'verify' where rank 0 has 'pretrain'"),
    ([], ["--run.dir", "{other}"], "rank 1 does not see what rank 0 has just written"),
    ([], ["--log.interval", "3", "--run.timeout", "100", "--checkpoint.keep", "2"], ""),
])  # fmt: skip
def test_ranks_that_differ_are_refused_before_a_step(join, tmp_path, first, second, said):
    places = {name: str(tmp_path / f"{name}.json") for name in ("one", "two")} | {"other": str(tmp_path / "other")}
    for name, end in (("one", "</s>"), ("two", "<|endoftext|>")):
        tokenizer = byte_tokenizer()
        tokenizer["added_tokens"][0]["content"] = end
        Path(places[name]).write_text(json.dumps(tokenizer))
    ends = join(*([word.format(**places) for word in words] for words in (first, second)))
    if said:
        assert all(code == 2 and said in err and err.count("\n") == 1 for code, err in ends), ends
        assert not rows(tmp_path / "run")
    else:
        assert [code for code, _ in ends] == [0, 0] and len(rows(tmp_path / "run")) == 2, ends


@of_turn(3)
def test_ranks_of_another_launcher_join(join, tmp_path):
    """tests/test_readme.py runs torchrun itself."""
    assert [code for code, _ in join([], [], launcher="srun")] == [0, 0] and len(rows(tmp_path / "run")) == 2


@pytest.mark.parametrize(("master", "rank", "said"), [
    ("127.0.0.1", "0", "rank 0 of 2 on "),
    ("127.0.0.1", "1", "rank 1 of 2 on "),
    ("no such host", "1", "at no such host:"),
])  # fmt: skip
def test_a_rank_that_finds_no_other_says_so_in_one_sentence(commands, tmp_path, tiny_values, master, rank, said):
    toml = write_run(tmp_path, values_with(tiny_values, run={"timeout": 0.5}, **TWO))
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": free_port(), "RANK": rank}
    code, _, err = commands.run("pretrain", toml, **told)
    assert code == 2 and said in err and "did not find the others" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_whose_folder_goes_or_is_replaced_by_a_copy_ends(commands, tmp_path, tiny_values, copied):
    """R6. Its lock is in the folder that was, so another run may be in the copy."""
    more = {**TWO, "train": {"steps": 100_000}, "checkpoint": {"interval": 0}}
    job, run = commands.start("pretrain", write_run(tmp_path, values_with(tiny_values, **more))), tmp_path / "run"
    job.wait_until(lambda: len(rows(run)) > 2, "step 3")
    if copied:
        shutil.copytree(run, tmp_path / "copy")
        run.rename(tmp_path / "moved")
        (tmp_path / "copy").rename(run)
    else:
        while run.exists():  # the run writes into it meanwhile
            shutil.rmtree(run, ignore_errors=True)
    code, _, err = job.finish()
    assert code == 2 and f"{run} is gone at step" in err and "replaced" in err and "Traceback" not in err, err
