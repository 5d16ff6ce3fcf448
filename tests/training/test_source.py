"""Runs start from other models' weights, in any layout; what contradicts them is refused before anything starts. Where
a run's vocabulary and tokenizer come from, and that the run keeps its tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from small_runs import LAYOUTS, build, everything, merged, run_config, spoil
from testing import assert_identical
from tiny_runs import values_with, write_run
from turns import in_turns, of_turn

from tpformer.config import build_config, check_config, read_toml, to_toml
from tpformer.models import GPT
from tpformer.planner.dry_run import plan_config
from tpformer.training.companions import keep_tokenizer, kept_tokenizer, write_byte_tokenizer
from tpformer.training.data import build_dataset
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.resolve import resolve, same_tokenizer, vocabulary_note
from tpformer.training.source import from_source, open_source, source_config
from tpformer.weights.families import family_of
from tpformer.weights.tensors import TensorMap

COMMON = {"vocab_size": 300, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, **COMMON}
LLAMA = {
    "model_type": "llama", "max_position_embeddings": 32, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, **COMMON,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
MOE = LLAMA | {"model_type": "qwen3_moe", "head_dim": 6, "mlp_only_layers": [0], "num_experts": 8}
MOE |= {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_hidden_layers": 2}
PRESET = {"preset": "gpt2-124m"}
TIED = LLAMA | {"model_type": "qwen3", "head_dim": 6, "num_hidden_layers": 2, "tie_word_embeddings": True}


def make(folder, values):
    """Save random weights as `values` describe them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    family = family_of(values)
    generator = torch.Generator().manual_seed(0)
    shapes = TensorMap(family, family.read(values)).shapes
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """hub[model_type]: a directory of random weights. hub["run"] is the GPT-2 as an imported run, hub["moe-run"] the
    Qwen3-MoE, hub["export"] that run's export in several files."""
    folder = tmp_path_factory.mktemp("hub")
    made = {each["model_type"]: make(folder / each["model_type"], each) for each in (GPT2, LLAMA, TIED, MIXTRAL, MOE)}
    for kind, run in (("gpt2", "run"), ("qwen3_moe", "moe-run")):
        made[run] = folder / run
        import_weights(made[kind], made[run], report=lambda _: None)
    made["export"] = folder / "export"
    export(made["run"], made["export"], max_shard_bytes=4000)
    return made


def in_one_process(path, config=None):
    model = GPT(config or open_source(path).architecture)
    spoil([model])
    open_source(path).load([model])
    return {name: value.detach() for name, value in model.named_parameters()}


def loaded_by(layouts, path, config):
    """Parameters of the parts of each layout, filled with NaN and then from a source."""
    source, found = open_source(path), []
    for layout in layouts:
        model, optimizers = build(run_config(layout, dataclasses.asdict(config)))
        spoil(model.parts)
        source.load(model.parts)
        found.append(everything(model.parts, optimizers))
    return found


def experts_read(path) -> set[int]:
    """The experts whose tensors this rank of two reads."""
    source = open_source(path)
    model, _ = build(run_config({"tensor_parallel": 2}, dataclasses.asdict(source.architecture)))
    source.files.slice = read = mock.Mock(side_effect=source.files.slice)
    source.load(model.parts)
    names = [call.args[0] for call in read.call_args_list]
    return {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}


ALL = {
    **LAYOUTS, "tp2": {"tensor_parallel": 2, "data_parallel_replicate": 2},
    "ep2-zero3": {"data_parallel_shard": 4, "zero_stage": 3, "expert_parallel": 2},
}  # fmt: skip
CASES = {
    "llama": ("tp4",), "qwen3": ("tp2-pp2",), "gpt2": ("tp2", "v-schedule"), "run": ("tp2-pp2",),
    "export": ("tp2-zero3",), "mixtral": ("tp4", "v-schedule"), "qwen3_moe": ("tp4", "ep2-zero3"),
    "moe-run": ("tp2-zero3",),
}  # fmt: skip
IN_SUITE = ("qwen3", "qwen3_moe")


@pytest.mark.parametrize("kind", [*IN_SUITE, *in_turns(kind for kind in CASES if kind not in IN_SUITE)])
def test_every_layout_loads_what_one_process_loads(ranks, hub, kind):
    """To the bit; with 4 ranks there are fewer key-value heads than ranks. The run's tables get padding rows. A rank
    reads its own experts alone. The tied table of qwen3 is on the first and on the last stage of a pipeline. On 4 ranks
    each has one expert of the Mixtral and two of the Qwen3-MoE, whose first layer has none; ZeRO-3 cuts the experts of
    a rank once more, and with expert parallelism over the ranks that have the same."""
    path = hub[kind]
    config = dataclasses.replace(open_source(path).architecture, vocab_multiple=128)
    expected = in_one_process(path, config)
    assert ("lm_head.weight" in expected) == (kind != "qwen3")
    if kind in ("run", "export"):
        assert_identical(expected, in_one_process(hub["gpt2"], config))
    for name in expected.keys() & {"embed_tokens.weight", "lm_head.weight"}:
        assert len(expected[name]) == 384 and not expected[name][300:].any() and expected[name][299].any()
    if n_experts := {"mixtral": 4, "qwen3_moe": 8}.get(kind):
        assert ranks(2).run(experts_read, path) == [{*range(n_experts // 2)}, {*range(n_experts // 2, n_experts)}]
    results = ranks(4).run(loaded_by, [ALL[name] for name in CASES[kind]], path, config)
    for name, loaded in zip(CASES[kind], zip(*results, strict=True), strict=True):
        assert_identical(merged(loaded), expected, f"{kind} in {name}")


def test_a_model_may_have_fewer_learned_positions_and_no_other_shape(hub):
    source = open_source(hub["gpt2"])
    short = dataclasses.replace(source.architecture, seq_length=20, vocab_multiple=128)
    whole = in_one_process(hub["gpt2"])
    for path in (hub["gpt2"], hub["run"]):
        found = in_one_process(path, short)
        assert torch.equal(found["embed_positions.weight"], whole["embed_positions.weight"][:20])
        assert len(found["embed_tokens.weight"]) == 384 and not found["embed_tokens.weight"][300:].any(), "padding"
    with pytest.raises(ValueError, match="seq_length = 40, but there are 32 learned positions"):
        source.load([GPT(dataclasses.replace(source.architecture, seq_length=40))])


def start(tmp_path, tiny_values, path, **sections) -> str:
    """The file, as a user writes it, of a run of one step that changes nothing: its checkpoint has the weights that it
    started from."""
    values = {**tiny_values, "model": {"init_from": str(path), "seq_length": 16}, "optimizer": {"lr": 0.0}}
    sections = values_with(values, train={"steps": 1}, **sections)
    lines = (f"{name}.{key} = {json.dumps(value)}\n" for name, keys in sections.items() for key, value in keys.items())
    (tmp_path / "few.toml").write_text("".join(lines))
    return str(tmp_path / "few.toml")


def test_a_run_starts_from_weights_and_resumes_without_them(done, hub, tiny_values, tmp_path):
    """tests/weights/test_round_trip.py has weights of other libraries."""
    source = shutil.copytree(hub["run"], tmp_path / "source")
    file = start(tmp_path, tiny_values, source, parallel={"tensor_parallel": 2})
    assert f"weights of {source}, step " in done("pretrain", file)
    assert str(open_source(hub["gpt2"])) == str(hub["gpt2"]), "as a run that starts from it says"
    run = tmp_path / "run"
    written = build_config(read_toml(run / "config.toml")).model
    assert (written.init_from, written.vocab_size, written.seq_length) == (str(source), 300, 16), "not the data's 257"
    config = dataclasses.replace(open_source(source).architecture, vocab_multiple=128, seq_length=16)
    assert_identical(in_one_process(run), in_one_process(source, config))
    shutil.rmtree(source)
    out = done("pretrain", file, "--run.resume", "True", "--train.steps", "2")
    assert "from step 1" in out and "weights of" not in out, out


@of_turn(1)
def test_verify_compares_weights_that_a_run_starts_from(done, hub, tiny_values, tmp_path):
    file = start(tmp_path, tiny_values, hub["llama"], parallel={"tensor_parallel": 2}, optimizer={"lr": 0.01})
    assert "trains as one process does" in done("verify", file)


def test_a_run_has_its_sources_architecture_and_contradictions_are_refused(hub):
    for path in hub.values():
        source = dataclasses.replace(open_source(path).architecture, vocab_multiple=128)
        assert build_config(*from_source({"model": {"init_from": str(path)}})).model.architecture == source
    for model, words in (
        ({"n_layers": 3}, "contradicts.*n_layers = 3, there 4.*leave these keys out"),
        ({"ffn_hidden_size": 64, "bias": True}, "ffn_hidden_size = 64, there 48.*bias = True, there False"),
        (PRESET, "vocab_size = 50257, there 300"),
        ({"init_from": "/nowhere"}, "/nowhere is not a run and has no model"),
        ({"init_from": " "}, "model.init_from is empty"),  # not the current folder
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            from_source({"model": {"init_from": str(hub["llama"])}}, {"model": model})
    agreeing = {"n_heads": 8, "head_dim": 4, "seq_length": 8, "dropout": 0.1, "vocab_multiple": 1, "qkv_bias": False}
    layers = from_source({"model": {"init_from": str(hub["llama"]), **agreeing}})
    assert build_config(*layers).model.n_kv_heads == 2


@pytest.mark.parametrize("new", [{"hidden_size": 64}, {"ffn_hidden_size": 64}, {"n_layers": 3}, {"vocab_multiple": 64}])
def test_a_run_whose_settings_are_of_another_model_than_its_checkpoint_is_refused(hub, tmp_path, new):
    """What the checkpoint lacks was taken for the padding of a vocabulary, and an export had a part of the weights."""
    run = shutil.copytree(hub["run"], tmp_path / "run")
    (run / "config.toml").write_text(to_toml(build_config(read_toml(run / "config.toml"), {"model": new})))
    for use in (open_source, lambda run: export(run, tmp_path / "out")):
        with pytest.raises(ValueError, match="another model than its config.toml describes: they differ in"):
            use(run)
    assert not (tmp_path / "out").exists()


def test_what_a_run_recorded_and_its_gpu_do_not_keep_its_model_from_use(hub, tmp_path):
    """A recorded pipeline step was refused where the model has no pipeline, and a GPU where there is none."""
    run = shutil.copytree(hub["run"], tmp_path / "run")
    log = {"timeline_step": 5, "noise_interval": 3, "norm_interval": 2, "profile_step": 1}
    trained = {"parallel": {"pipeline_parallel": 2}, "train": {"device": "cuda", "microbatch_size": 1}, "log": log}
    config = build_config(read_toml(run / "config.toml"), trained)
    check_config(config, trains=False)
    (run / "config.toml").write_text(to_toml(config))
    found = source_config(run)
    check_config(found, trains=False)
    assert found.train.device is None and found.parallel.pipeline_parallel == 1
    assert source_config(run, {"train": {"device": "cuda"}}).train.device == "cuda"
    (run / "config.toml").write_text(
        to_toml(build_config(read_toml(run / "config.toml"), {"train": {"device": "cpu"}}))
    )
    assert source_config(run).train.device == "cpu"


def test_a_preset_says_the_length_beside_weights(tmp_path):
    """Of the source's fields those that a preset sets are the preset's, as those that the file sets are the file's."""
    fields = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 2048, "initializer_range": 0.01}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **fields}))
    for given, length in (({}, 2048), (PRESET, 1024), ({**PRESET, "seq_length": 64}, 64)):
        model = build_config(*from_source({"model": {"init_from": str(tmp_path), **given}})).model
        assert (model.seq_length, model.init_std, model.norm_eps) == (length, 0.01, 1e-5)


def test_an_imported_run_generates_and_does_not_resume(refused, hub, tiny_values, tmp_path):
    assert "tokenizer" in refused("generate", str(hub["run"]), "--prompt", "a", "--tensor-parallel", "2")
    file = start(tmp_path, tiny_values, hub["gpt2"], run={"dir": str(hub["run"]), "resume": True})
    assert "is an imported model, whose checkpoint has no optimizer state" in refused("pretrain", file)


def test_a_presets_vocabulary_stands_back_for_the_datas_alone(tiny_data, tmp_path):
    """N1: a model of 50,304 columns was trained on 257 ids without a word."""
    data = {"train": [str(tiny_data)]}
    config = resolve(build_config({"model": PRESET, "data": data}))
    assert (config.model.vocab_size, config.model.hidden_size) == (257, 768)
    assert vocabulary_note(config) == "model.vocab_size is 257, where the preset gpt2-124m has 50,257"
    assert resolve(build_config({"model": PRESET | {"vocab_size": 50257}, "data": data})).model.vocab_size == 50257
    again = resolve(build_config({"model": {**PRESET, "vocab_size": 257}, "data": data}))
    assert again == config, "a run's own config.toml says the same"
    for end in ("bin", "idx"):  # data that say no vocabulary
        shutil.copyfile(f"{tiny_data}.{end}", tmp_path / f"bare.{end}")
    for data in ({"train": [str(tmp_path / "bare")]}, {"train": [str(tmp_path / "absent")]}, {}):
        assert plan_config(build_config({"model": PRESET, "data": data})).model.vocab_size == 50257
    config = resolve(build_config({"model": PRESET, "data": {"train": [str(tmp_path / "bare")]}}))
    assert config.model.vocab_size == 50257 and vocabulary_note(config) is None


@pytest.fixture
def json_data(tmp_path) -> Path:
    """The prefix of a dataset that was built with a tokenizer.json, both in one folder."""
    (folder := tmp_path / "corpus").mkdir()
    write_byte_tokenizer(folder)
    (folder / "text.txt").write_text("some words to read " * 50)
    build_dataset([folder / "text.txt"], folder / "data", str(folder / "tokenizer.json"), quiet=True)
    return folder / "data"


def test_data_of_another_tokenizer_than_the_weights_or_other_data_are_refused(hub, json_data, tiny_data, tmp_path):
    source = shutil.copytree(hub["llama"], tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    for use in ("train", "valid"):
        values = {"model": {"init_from": str(source)}, "data": {use: [str(tiny_data)]}}
        with pytest.raises(ValueError, match="was built with the tokenizer bytes, but .*tpformer data build --token"):
            from_source(values)
    assert build_config(*from_source(values, {"data": {"tokenizer": "bytes"}})).data.tokenizer == "bytes"
    folder = shutil.copytree(json_data.parent, tmp_path / "other")
    path, sidecar = folder / "tokenizer.json", folder / "data.json"
    path.write_text(path.read_text().replace('"Z"', '"\\u0416"'))
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"tokenizer": str(path)}))
    with pytest.raises(ValueError, match=f"{folder}/data was built with the tokenizer .*, but {json_data} has"):
        resolve(build_config({"data": {"train": [str(json_data), str(folder / "data")]}}))
    resolve(build_config({"data": {"train": [str(json_data), str(tiny_data)]}}))  # bytes, as a tokenizer.json


def test_a_run_keeps_its_tokenizer(done, refused, json_data, tiny_values, tmp_path):
    """N5: a run whose data were deleted could not generate. It is moved, too, and exported. A folder of another
    tokenizer is not taken for the copy."""
    values = tiny_values | {"data": {"train": [str(json_data)]}}
    toml = write_run(tmp_path, values, train={"steps": 1})
    folder = Path(tiny_values["run"]["dir"], "hf")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    assert f"{folder} is in the way of the run's copy" in refused("pretrain", toml)
    shutil.rmtree(folder.parent)
    done("pretrain", toml)
    original = json_data.parent / "tokenizer.json"
    original.write_text((content := original.read_text()).replace('"Z"', '"\\u0416"'))
    err = refused("pretrain", toml, "--run.resume", "True")
    assert "data.tokenizer" in err and "other settings" in err, err
    original.unlink()  # the copy serves
    assert "is finished" in done("pretrain", toml, "--run.resume", "True", "--data.tokenizer", str(original))
    assert "bits per byte" in done("evaluate", tiny_values["run"]["dir"], "--data", str(json_data))
    shutil.rmtree(json_data.parent)
    run = shutil.move(tiny_values["run"]["dir"], tmp_path / "moved")
    assert done("generate", str(run), "--prompt", "some", "--max-new-tokens", "3").startswith("some")
    done("export", str(run), "--format", "hf", "--out", str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == content
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
