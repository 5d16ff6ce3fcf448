"""Where a run's vocabulary and tokenizer come from, and that the run keeps its tokenizer."""

import json
import shutil
from pathlib import Path

import pytest
from runs import write_run

from tpformer.config import build_config
from tpformer.planner.dry_run import plan_config
from tpformer.training.companions import keep_tokenizer, kept_tokenizer, write_byte_tokenizer
from tpformer.training.data import build_dataset
from tpformer.training.resolve import resolve, same_tokenizer, vocabulary_note
from tpformer.training.source import from_source

GPT2 = {"preset": "gpt2-124m"}


def test_a_presets_vocabulary_stands_back_for_the_datas_alone(tiny_data, tmp_path):
    """N1: a model of 50,304 columns was trained on 257 ids without a word."""
    data = {"train": [str(tiny_data)]}
    config = resolve(build_config({"model": GPT2, "data": data}))
    assert (config.model.vocab_size, config.model.hidden_size) == (257, 768)
    assert vocabulary_note(config) == "model.vocab_size is 257, where the preset gpt2-124m has 50,257"
    assert resolve(build_config({"model": GPT2 | {"vocab_size": 50257}, "data": data})).model.vocab_size == 50257
    again = resolve(build_config({"model": {**GPT2, "vocab_size": 257}, "data": data}))
    assert again == config, "a run's own config.toml says the same"
    for end in ("bin", "idx"):  # data that say no vocabulary
        shutil.copyfile(f"{tiny_data}.{end}", tmp_path / f"bare.{end}")
    for data in ({"train": [str(tmp_path / "bare")]}, {"train": [str(tmp_path / "absent")]}, {}):
        assert plan_config(build_config({"model": GPT2, "data": data})).model.vocab_size == 50257
    config = resolve(build_config({"model": GPT2, "data": {"train": [str(tmp_path / "bare")]}}))
    assert config.model.vocab_size == 50257 and vocabulary_note(config) is None


def test_weights_keep_their_vocabulary(tiny_data, tmp_path):
    values = {"vocab_size": 300, "seq_length": 32, "n_layers": 2, "hidden_size": 32, "n_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = from_source({"model": {"init_from": str(tmp_path)}, "data": {"train": [str(tiny_data)]}})
    assert resolve(build_config(*layers)).model.vocab_size == 300


@pytest.fixture
def json_data(tmp_path) -> Path:
    """The prefix of a dataset that was built with a tokenizer.json, both in one folder."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_byte_tokenizer(folder)
    (folder / "text.txt").write_text("some words to read " * 50)
    build_dataset([folder / "text.txt"], folder / "data", str(folder / "tokenizer.json"), quiet=True)
    return folder / "data"


def test_datasets_of_different_tokenizers_are_refused(json_data, tiny_data, tmp_path):
    folder = shutil.copytree(json_data.parent, tmp_path / "other")
    path, sidecar = folder / "tokenizer.json", folder / "data.json"
    path.write_text(path.read_text().replace('"Z"', '"\\u0416"'))
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"tokenizer": str(path)}))
    with pytest.raises(ValueError, match=f"{folder}/data was built with the tokenizer .*, but {json_data} has"):
        resolve(build_config({"data": {"train": [str(json_data), str(folder / "data")]}}))
    resolve(build_config({"data": {"train": [str(json_data), str(tiny_data)]}}))  # bytes, as a tokenizer.json


def test_a_run_keeps_its_tokenizer(commands, json_data, tiny_values, tmp_path):
    """N5: a run whose data were deleted could not generate. It is moved, too, and exported.

    A folder of another tokenizer is not taken for the copy.
    """
    values = tiny_values | {"data": {"train": [str(json_data)]}}
    toml = write_run(tmp_path, values, train={"steps": 1})
    folder = Path(tiny_values["run"]["dir"], "hf")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    code, out, err = commands.run("pretrain", toml)
    assert code == 2 and f"{folder} is in the way of the run's copy" in err and "Traceback" not in err, out + err
    shutil.rmtree(folder.parent)
    code, out, err = commands.run("pretrain", toml)
    assert code == 0, err
    original = json_data.parent / "tokenizer.json"
    content = original.read_text()
    original.write_text(content.replace('"Z"', '"\\u0416"'))
    code, out, err = commands.run("pretrain", toml, "--run.resume", "True")
    assert code == 2 and "data.tokenizer" in err and "other settings" in err, out + err
    original.unlink()  # the copy serves
    code, out, err = commands.run("pretrain", toml, "--run.resume", "True", "--data.tokenizer", str(original))
    assert code == 0 and "is finished" in out, out + err
    code, out, err = commands.run("evaluate", tiny_values["run"]["dir"], "--data", str(json_data))
    assert code == 0 and "bits per byte" in out, out + err
    shutil.rmtree(json_data.parent)
    run = shutil.move(tiny_values["run"]["dir"], tmp_path / "moved")
    code, out, err = commands.run("generate", str(run), "--prompt", "some", "--max-new-tokens", "3")
    assert code == 0 and out.startswith("some"), err
    code, out, err = commands.run("export", str(run), "--format", "hf", "--out", str(tmp_path / "hf"))
    assert code == 0 and (tmp_path / "hf" / "tokenizer.json").read_text() == content, out + err
    assert same_tokenizer(str(kept_tokenizer(run)), str(original)), "by the path that it was copied from"


def test_what_belongs_to_a_tokenizer_is_copied_with_it(tmp_path):
    theirs, run, other = (tmp_path / name for name in ("theirs", "run", "other"))
    for folder in (theirs, run, other):
        folder.mkdir()
    write_byte_tokenizer(theirs)
    for name in ("config.json", "chat_template.jinja", "model.safetensors"):
        (theirs / name).write_text("{}")
    assert keep_tokenizer(str(theirs / "tokenizer.json"), run)
    names = {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"}
    assert {path.name for path in (run / "hf").iterdir()} == names and len(list(run.iterdir())) == 1
    (theirs / "tokenizer.json").rename(theirs / "bpe.json")
    assert keep_tokenizer(str(theirs / "bpe.json"), other)
    assert [path.name for path in (other / "hf").iterdir()] == ["tokenizer.json"], "it stood alone"
    assert keep_tokenizer("bytes", tmp_path) and not keep_tokenizer(None, tmp_path)
    assert not keep_tokenizer(str(tmp_path / "absent.json"), tmp_path) and not (tmp_path / "hf").exists()
