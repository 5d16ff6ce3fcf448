"""Whole runs through the `tpformer` command: stopped, resumed, damaged, sampled from, refused. Runs whose ranks are
killed or raise are in test_faults.py."""

import json
import shutil
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tpformer.config import build_config, to_toml
from tpformer.training.metrics import read_metrics


def write_run(folder: Path, values: dict, **sections: dict) -> Path:
    path = folder / "run.toml"
    path.write_text(to_toml(build_config(values, sections)))
    return path


def losses(directory: Path) -> list[tuple[int, float, float]]:
    return [
        (row["step"], row["loss"], row["grad_norm"])
        for row in read_metrics(directory / "metrics.jsonl")
        if "loss" in row
    ]


def test_what_a_run_says_when_it_is_started_again(commands, tmp_path, tiny_values):
    """Nothing is overwritten. A damaged newest checkpoint is named, and the one before goes on. Without a usable one,
    or without any (R5), it does not begin anew."""
    toml = str(write_run(tmp_path, tiny_values))
    directory = Path(tiny_values["run"]["dir"])
    code, out, _ = commands.run("pretrain", toml)
    assert code == 0 and "M x N x K" not in out, "N9: one rank has no use for the table of its linears"
    before, resume = losses(directory), ("pretrain", toml, "--run.resume", "True")
    for arguments, words in (
        (("pretrain", toml), ["already holds a run", "--run.resume"]),
        ((*resume, "--model.n-layers", "3"), ["model.n_layers: 2 -> 3"]),
    ):
        code, _, err = commands.run(*arguments)
        assert code == 2 and all(word in err for word in words) and losses(directory) == before, err
    file = next((directory / "checkpoints" / "step-6").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, out, err = commands.run(*resume)
    assert code == 0 and "from step 4" in out and losses(directory) == before, err
    assert "checkpoint of step 6 is not usable" in out and file.name in out and "SHA-256" in out
    code, out, err = commands.run(*resume)
    assert code == 0 and "from step 6" in out, "the bad one of step 6 was replaced by a good one"
    for manifest in directory.glob("checkpoints/step-*/manifest.json"):
        manifest.unlink()
    code, out, err = commands.run(*resume)
    assert code == 2 and "checkpoints of steps 4, 6, and none is usable" in err, out + err
    shutil.rmtree(directory / "checkpoints")
    code, out, err = commands.run(*resume)
    assert code == 2 and "has had checkpoints" in err and "bring them back" in err and "Traceback" not in err, out + err
    for name in ("config.toml", "saved.json"):
        (directory / name).unlink()
    code, out, err = commands.run("pretrain", toml)
    assert code == 2 and "its config.toml is gone" in err, out + err
    assert losses(directory) == before


@pytest.mark.proof
def test_generate_prints_several_texts_and_says_where_the_model_ends(commands, tmp_path, tiny_values):
    toml = str(write_run(tmp_path, tiny_values))
    directory = tiny_values["run"]["dir"]
    assert commands.run("pretrain", toml)[0] == 0
    (tmp_path / "prompt.txt").write_text("class A:\n")
    options = [
        "--prompt",
        "def f",
        "--prompt",
        "import",
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--samples",
        "2",
    ]
    options += ["--max-new-tokens", "100", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--stop", "e"]
    code, out, err = commands.run("generate", directory, *options)
    texts = out.split("--- prompt ")[1:]
    assert code == 0 and [text[:11] for text in texts] == [f"{p}, sample {s}" for p in (1, 2, 3) for s in (1, 2)], err
    assert texts[0][12:].startswith("def f") and texts[5][12:].startswith("class A:\n")
    assert all("e" not in text[12:].removeprefix(prompt) for text, prompt in zip(texts[:2], ["def f"] * 2, strict=True))
    assert "texts may need 108 positions, but the model was trained with" in err
    for wrong, words in (
        ("--top-p=2", "top_p=2.0 must be"),
        ("--max-new-tokens=-1", "give at least 0"),
        ("--stop=", "empty"),
    ):
        code, out, err = commands.run("generate", directory, "--prompt", "a", wrong)
        assert code == 2 and words in err and not out, (out, err)


def test_ranks_of_another_launcher_join_instead_of_starting_ranks(commands, tmp_path, tiny_values):
    """Ranks get torchrun's environment; tests/test_readme.py runs torchrun itself."""
    toml = str(write_run(tmp_path, tiny_values, parallel={"tensor_parallel": 2}, train={"steps": 2}))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    del store
    ranks = [commands.start("pretrain", toml, RANK=str(r), LOCAL_RANK=str(r), **variables) for r in range(2)]
    for rank in ranks:
        code, _, err = rank.finish()
        assert code == 0, err
    assert len(losses(Path(tiny_values["run"]["dir"]))) == 2


def test_a_vocabulary_smaller_than_the_datas_is_named_before_any_rank_starts(commands, tmp_path, tiny_values):
    """tests/test_imports.py has the mistakes that are found without data."""
    code, out, err = commands.run("pretrain", str(write_run(tmp_path, tiny_values)), "--model.vocab-size", "50")
    assert code == 2 and "50" in out + err and "vocab_size" in out + err
    assert "Traceback" not in err and not Path(tiny_values["run"]["dir"]).exists()


def test_a_transport_that_cannot_run_is_refused_before_the_first_step(commands, tmp_path, tiny_values):
    toml = write_run(tmp_path, tiny_values, parallel={"tensor_parallel": 2, "transport": "fused"})
    code, out, err = commands.run("pretrain", str(toml))
    assert code == 2 and "tpformer: fused needs a CUDA device" in err and "Traceback" not in err, out + err


def test_overrides_reach_the_run(commands, tmp_path, tiny_values):
    toml = str(write_run(tmp_path, tiny_values))
    options = "--model.n-layers 3 --model.seq-length 8 --parallel.tensor-parallel 2 --train.steps=2".split()
    code, out, err = commands.run("pretrain", toml, *options, "--run.dir", str(tmp_path / "other"))
    assert code == 0 and "M x N x K" in out, err
    rows = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    keys = {"step", "loss", "step_loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
    assert [set(row) for row in rows] == [keys, keys, {"step", "val_loss"}]
    assert rows[1]["tokens"] == 2 * 4 * 8
    stored = (tmp_path / "other" / "config.toml").read_text()
    assert "n_layers = 3" in stored and "vocab_size = 257" in stored and "ffn_hidden_size" not in stored


def test_a_recorded_pipeline_step_is_drawn(commands, tmp_path, tiny_values):
    parallel = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B", "data_parallel_shard": 2}
    more = {"model": {"n_layers": 4}, "log": {"timeline_step": 2}, "data": {"valid": []}}
    toml = str(write_run(tmp_path, tiny_values, parallel=parallel, **more))
    directory = Path(tiny_values["run"]["dir"])
    code, out, err = commands.run("pretrain", toml, "--train.steps", "2")
    assert code == 0 and "tpformer timeline" in out, err
    code, out, err = commands.run("timeline", str(directory))
    assert code == 0, err
    trace = json.loads((directory / "plots" / "pipeline.json").read_text())
    computed = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"][0] in "FB"]
    assert len(computed) == 2 * 2 * 2 * 2, "forward and backward of 2 microbatches in 2 stages on 2 ranks"
    assert "Interleaved1F1B" in (directory / "plots" / "pipeline.svg").read_text()
    code, _, err = commands.run("timeline", str(tmp_path))
    assert code == 2 and "--log.timeline-step" in err
