"""A config.json or a file that cannot be had is refused by name, in one sentence, before anything is allocated."""

import json
import shutil
import time
from pathlib import Path

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tpformer.models import GPTConfig
from tpformer.training.export import new_directory
from tpformer.training.importing import import_weights
from tpformer.training.source import describe, open_source
from tpformer.weights.families import FAMILIES, family_for
from tpformer.weights.family import Field, meaning

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHERS = "phi phi3 gemma gemma2 gemma3_text qwen2_moe qwen3_next deepseek_v3 gpt_neox llama4 smollm3".split()
KNOWN = "known here are llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gpt2"
# a model of the oracle's, changed fields, words of what is said
FIELDS = [
    *(("llama", {"model_type": kind}, f"model_type = {kind!r}", KNOWN) for kind in (*OTHERS, None)),
    ("llama", {"n_experts": 8, "auto_map": {}}, "auto_map, n_experts", "nobody here has checked for llama"),
    ("llama", {"attention_bias": True}, "attention_bias = True and mlp_bias = ", "one bias for both"),
    ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'", "'silu', 'gelu_pytorch_tanh'"),
    ("llama", {"hidden_size": "32"}, "hidden_size = '32'", "expected int"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers = True", "expected int"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps = None", "expected float"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config", "export the model in 16 or 32 bits"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type = 'yarn'"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "the same in all layers"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "attention_factor": 2.0}}, "rope_parameters.attention_factor"),
    ("llama", {"rope_theta": 5.0}, "rope_theta = 5.0 and rope_parameters.rope_theta = 10000.0"),
    ("llama", {"rope_scaling": SCALED}, "rope_parameters and rope_scaling, which differ"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5", "whole heads"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "attend alike"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1", "adds no noise"),
    ("mixtral", {"num_experts_per_tok": 5}, "experts_per_token=5 of n_experts=4"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2", "mlp_only_layers"),
    ("qwen3-moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]", "only the first layers"),
    ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1", "only the first layers"),
    ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, "first_dense_layers=3 of n_layers=3"),
    ("qwen3-moe", {"num_experts": 8}, "num_experts = 8 and num_local_experts = 6: keep one"),
    ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size", "nobody here"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("gpt2", {"n_embd": 0}, "hidden_size=0"),
]


def test_fields_that_mean_something_else_are_refused(tmp_path):
    for kind, changes, *words in FIELDS:
        oracle.configuration(kind).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(ValueError) as error:
            describe(tmp_path)
        said = str(error.value)
        assert "\n" not in said and all(word in said for word in (*words, str(tmp_path))), said


def test_every_field_of_transformers_is_known():
    """No field that version 5.23 or the hub's configurations have is refused unseen, whatever a family's defaults."""
    for name, (kind, _) in oracle.MODELS.items():
        family = FAMILIES[kind]
        config = family.read(oracle.configuration(name).to_dict())
        assert meaning(family.read(family.write(config))) == meaning(config)
        assert family_for(config).cannot_say(config) == []
        theirs_of = AutoConfig.for_model(kind).to_dict()
        derived = {"num_key_value_heads": theirs_of.get("num_attention_heads"), "head_dim": 128}
        for key, field in family.fields.items():
            if not isinstance(field, Field):
                continue
            expected = theirs_of.get(key, theirs_of.get(field.also))
            expected = expected or None if field.prefix else expected  # an empty list of layers
            assert field.default == expected or (field.default is None and expected == derived.get(key)), (kind, key)
        if family.has_rope:
            assert family.read({}).rope_base == theirs_of["rope_parameters"]["rope_theta"], kind


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    oracle.make("llama", folder / "whole")
    oracle.make("llama", folder / "shards", max_shard_size="20KB")
    oracle.make("mixtral", folder / "experts")
    return folder


def tensors(change, kind="whole"):
    """Which model is damaged, and a damage that changes the tensors of its one file."""

    def damage(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return kind, damage


def text(change, kind="whole", name="config.json"):
    """The same of the text of a file."""
    return kind, lambda folder: (folder / name).write_text(change((folder / name).read_text()))


def index(change):
    """The same of which file has which tensor."""

    def changed(old):
        values = json.loads(old)
        change(values["weight_map"])
        return json.dumps(values)

    return text(changed, "shards", "model.safetensors.index.json")


def truncate(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-7])


def link(name):
    """A file of the folder becomes a link to one that is not of it."""

    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(__file__)

    return "whole", damage, f"{name} is a link to {__file__}, outside of its folder"


Q = "model.layers.1.self_attn.q_proj.weight"
BIAS, BASE = Q.replace("weight", "bias"), Q.removeprefix("model.")
FIRST, THIRD, FIFTH = (f"model.layers.1.block_sparse_moe.experts.{index}.w1.weight" for index in (0, 2, 4))
# what is damaged, how, words of what is said
DAMAGES = {
    "extra": (*tensors(lambda s: s.update(extra=torch.ones(1))), "has extra, which no part"),
    "missing": (*tensors(lambda s: s.pop(Q)), f"has no {Q}"),
    "head": (*tensors(lambda s: s.pop("lm_head.weight")), "lm_head.weight, though tie_word_embeddings is false"),
    "shape": (*tensors(lambda s: s.update({Q: s[Q][:-1].clone()})), f"{Q} as (31, 32)", "json makes it (32, 32)"),
    "int8": (*tensors(lambda s: s.update({Q: s[Q].to(torch.int8)})), f"{Q} in I8", "quantized"),
    "float8": (*tensors(lambda s: s.update({Q: s[Q].to(torch.float8_e4m3fn)})), f"{Q} in F8_E4M3"),
    "twice": (*tensors(lambda s: s.update({BASE: s[Q].clone()})), "which are the same tensor"),
    "bias": (*tensors(lambda s: s.update({BIAS: torch.ones(32)})), "q_proj.bias, which no part"),
    "no expert": (*tensors(lambda s: s.pop(THIRD), "experts"), f"has no {THIRD}"),
    "expert": (*tensors(lambda s: s.update({FIFTH: s[FIRST].clone()}), "experts"), f"has {FIFTH}, which no part"),
    "truncated": ("shards", truncate, "model-00002-of-", "is damaged"),
    "absent": (*index(lambda w: w.update({Q: "model-7.safetensors"})), "model-7.safetensors does not exist"),
    "unlisted": (*index(lambda w: w.pop(Q)), f"differ in {Q}"),
    "pickles": (
        "whole",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "a pickle that could run any program",
        "save_pretrained",
    ),
    "tied": (
        *text(lambda old: old.replace('_embeddings": false', '_embeddings": true')),
        "lm_head.weight that differs from the embedding's table",
    ),
    "nothing": ("whole", lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "json": (*text(lambda old: "{"), "config.json is not valid JSON"),
    "linked tokens": link("merges.txt"),
    "linked tensors": link("model.safetensors"),
    "linked config": link("config.json"),
    "way up": (*index(lambda w: w.update({Q: "../private"})), "names the file ../private, which cannot lie in it"),
    "way out": (*index(lambda w: w.update({Q: "/private"})), "names the file /private, which cannot lie in it"),
    "index": (*text(lambda old: "[]", "shards", "model.safetensors.index.json"), "JSON object"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_and_leave_nothing(hub, tmp_path, name):
    kind, damage, *words = DAMAGES[name]
    shutil.copytree(hub / kind, tmp_path / "hub")
    damage(tmp_path / "hub")
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        import_weights(tmp_path / "hub", tmp_path / "run")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"], "nothing is left behind"


def begin(out):
    with new_directory(Path(out)):
        time.sleep(600)


def test_what_a_killed_import_left_is_removed(commands, hub, tmp_path):
    """Neither a directory that a live process fills is touched, nor one of the user's."""
    run = tmp_path / "run"
    (tmp_path / ".run-notes").mkdir()
    other = commands.call(begin, str(run))
    try:
        other.wait_until(lambda: any(tmp_path.glob(".run-*/whole")), "a directory is begun")
        for left in (3, 2):
            import_weights(hub / "whole", run)
            assert open_source(run).architecture.n_layers == 3 and len(list(tmp_path.iterdir())) == left
            shutil.rmtree(run)
            other.close()  # by SIGKILL
    finally:
        other.close()
    assert [path.name for path in tmp_path.iterdir()] == [".run-notes"]


def test_a_hub_cache_of_links_in_a_directory_that_cannot_be_written(hub, tmp_path):
    """Files of the hub's cache are links into another folder; names may have dots."""
    cache = tmp_path / "models--a--b.v1"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "snapshot.2"
    shutil.copytree(hub / "shards", blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(file.rename(blobs / str(number)))
    snapshot.chmod(0o555)
    import_weights(snapshot, tmp_path / "run.v1")
    assert open_source(tmp_path / "run.v1").architecture.n_layers == 3
    for source, out, words in (
        (snapshot, tmp_path / "run.v1", "exists and is not an empty directory"),
        (tmp_path / "run.v1", tmp_path / "again", "is a run already"),
        (snapshot, Path("/proc/run"), "/proc/run cannot be made"),
    ):
        with pytest.raises(ValueError, match=words):
            import_weights(source, out)


ROPE = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
QWEN3_MOE = {**ROPE, "qk_norm": True, "n_experts": 8, "expert_ffn_size": 64}
ROUTERS = {"router_bias": True, "shared_expert_size": 64, "router_score": "sigmoid", "router_scale": 2.5}
ROUTERS |= {"router_groups": 2}
UNSAID = [
    ({"norm": "layernorm", "position": "rope"}, "nearest is ", "norm = layernorm"),
    (ROPE | {"rope_interleaved": True}, "llama", "rope_interleaved = True"),
    ({"n_kv_heads": 3}, "gpt2", "n_kv_heads = 3"),
    ({"activation": "swiglu"}, "gpt2", "activation = swiglu"),
    *((QWEN3_MOE | {key: value}, "qwen3_moe", f"{key} = {value}") for key, value in ROUTERS.items()),
]


def test_architectures_that_no_family_can_say():
    for fields, *words in UNSAID:
        with pytest.raises(ValueError, match="--format tpformer") as error:
            family_for(GPTConfig(vocab_size=100, **fields))
        assert all(word in str(error.value) for word in words), str(error.value)
    # transformers' own rule for Llama is that heads divide hidden; Mistral has the same tensors without it
    wide = GPTConfig(vocab_size=100, hidden_size=100, n_heads=3, head_dim=32, **ROPE)
    assert family_for(wide).model_type == "mistral"
