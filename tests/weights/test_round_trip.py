"""Models of transformers come in, compute the same, and go out as they came; transformers is the oracle."""

import json

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from testing import assert_same
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tpformer.models import GPT
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.source import open_source


def ours(directory) -> torch.Tensor:
    """Float64 logits of the model in a directory, which may be a run."""
    source = open_source(directory)
    model = GPT(source.architecture, dtype=torch.float64).eval()
    source.load([model])
    with torch.no_grad():
        return model(oracle.ids())


def tensors_in(directory) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and value.shape == b[name].shape, name
        assert torch.equal(value.view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", oracle.MODELS)
def test_in_and_out(tmp_path, name):
    model = oracle.make(name, tmp_path / "hub", max_shard_size="20KB")
    import_weights(tmp_path / "hub", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", file_format="hf", max_shard_bytes=30000)
    same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "out"))
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    # an import does not remember its family
    plainest = LlamaForCausalLM if name == "mistral-no-window" else type(model)
    assert type(again) is plainest and len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = oracle.logits(model)
    assert torch.equal(oracle.logits(again.eval()), expected)
    for directory in ("hub", "run", "out"):
        assert_same(ours(tmp_path / directory), expected, directory)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("llama", None), ("gpt2", None)]
)
def test_dtypes_stay(tmp_path, name, dtype):
    """None: norms in float32, the rest in bfloat16."""
    oracle.make(name, tmp_path / "hub", torch.float32 if dtype is None else dtype)
    if dtype is None:
        mixed = {k: v if "ln_" in k or "norm" in k else v.bfloat16() for k, v in tensors_in(tmp_path / "hub").items()}
        save_file(mixed, tmp_path / "hub" / "model.safetensors")
    import_weights(tmp_path / "hub", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", file_format="hf")
    same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == ("float32" if dtype is None else str(dtype).removeprefix("torch."))
    export(tmp_path / "run", tmp_path / "cast", file_format="hf", dtype="bfloat16")
    assert {value.dtype for value in tensors_in(tmp_path / "cast").values()} == {torch.bfloat16}


def test_old_files_are_read(tmp_path):
    """Names without prefix, buffers, the head beside the table that it is tied to, and RoPE as version 4 wrote it."""
    model = oracle.make("gpt2", tmp_path / "gpt2")
    state = tensors_in(tmp_path / "gpt2")
    old = {name.removeprefix("transformer."): value for name, value in state.items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)} | {"h.1.attn.masked_bias": torch.ones(())}
    save_file(old, tmp_path / "gpt2" / "model.safetensors")
    assert_same(ours(tmp_path / "gpt2"), oracle.logits(model))
    model = oracle.make("llama-3.1", tmp_path / "llama")
    values = json.loads((tmp_path / "llama" / "config.json").read_text())
    scaling = {"type" if key == "rope_type" else key: value for key, value in values.pop("rope_parameters").items()}
    values |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "tie_word_embeddings": True}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(values))
    state = tensors_in(tmp_path / "llama")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(state, tmp_path / "llama" / "model.safetensors")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert_same(ours(tmp_path / "llama"), oracle.logits(model))
