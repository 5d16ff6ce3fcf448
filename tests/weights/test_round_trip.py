"""Models of transformers come in, compute the same, and go out as they came; transformers is the oracle."""

import json

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from testing import assert_identical, assert_same, on_every_rank
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from turns import in_turns

from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.models import GPT
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.source import open_source


def ours(directory) -> dict[str, torch.Tensor]:
    """Float64 logits of the model in a directory, which may be a run; with experts also the gradients of a loss."""
    source, ids = open_source(directory), oracle.ids()
    model = GPT(source.architecture, dtype=torch.float64).eval()
    source.load([model])
    found = {"logits": model(ids).detach()}
    if source.architecture.n_experts:
        model.train()(ids[:, :-1], targets=ids[:, 1:]).backward()
        # without the rows that pad the vocabulary
        found |= {name: p.grad[: source.architecture.vocab_size] for name, p in model.named_parameters()}
    return found


def theirs(model) -> dict[str, torch.Tensor]:
    """The same of a model of theirs."""
    model, ids = oracle.exact(model), oracle.ids()
    with in_float64():
        found = {"logits": model(ids).logits.detach()}
        if "num_experts_per_tok" in model.config.to_dict():
            logits = model(ids[:, :-1]).logits
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
            found |= {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    return found


def tensors_in(directory) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def bits(directory) -> dict:
    return {name: (x.dtype, tuple(x.shape), x.view(torch.uint8)) for name, x in tensors_in(directory).items()}


# what others have, one of these has beside something else, or a test below has it
CHOSEN = ("llama-biases-heads", "qwen3-tied", "mixtral-window", "qwen3-moe-dense-first", "gpt2-untied-gelu")


@pytest.mark.parametrize("name", [*CHOSEN, *in_turns(name for name in oracle.MODELS if name not in CHOSEN)])
def test_in_and_out(tmp_path, name):
    model = oracle.make(name, tmp_path / "hub", max_shard_size="20KB")
    import_weights(tmp_path / "hub", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", file_format="hf", max_shard_bytes=30000)
    assert_identical(bits(tmp_path / "out"), bits(tmp_path / "hub"))
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    # an import does not remember its family
    plainest = LlamaForCausalLM if name == "mistral-no-window" else type(model)
    assert type(again) is plainest and len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = theirs(model)
    assert_identical(theirs(again.eval()), expected)
    for directory in ("hub", "run", "out"):
        assert_same(ours(tmp_path / directory), expected, directory)


@pytest.mark.parametrize("name, dtype", [
    ("llama", torch.bfloat16), ("gpt2", torch.float16), ("llama", None), ("gpt2", None)
])  # fmt: skip
def test_dtypes_stay(tmp_path, name, dtype):
    """None: norms in float32, the rest in bfloat16."""
    oracle.make(name, tmp_path / "hub", torch.float32 if dtype is None else dtype)
    if dtype is None:
        mixed = {k: v if "ln_" in k or "norm" in k else v.bfloat16() for k, v in tensors_in(tmp_path / "hub").items()}
        save_file(mixed, tmp_path / "hub" / "model.safetensors")
    import_weights(tmp_path / "hub", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", file_format="hf")
    assert_identical(bits(tmp_path / "out"), bits(tmp_path / "hub"))
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
    assert_same(ours(tmp_path / "gpt2"), theirs(model))
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
    assert_same(ours(tmp_path / "llama"), theirs(model))


@on_every_rank(4)
def test_ranks_that_fsdp2_shards_read_a_quarter_of_the_experts_each(tmp_path):
    """Without FSDP2 tests/training/test_source.py asks it, and that every layout loads the same."""
    if dist.get_rank() == 0:
        oracle.make("mixtral", tmp_path)
    dist.barrier()
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=2)
    source, read = open_source(tmp_path), []
    alone = GPT(source.architecture)
    source.load([alone])
    model = GPT(source.architecture, tp=mesh["tp"], device="meta")
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device="cpu")
    slice_of = source.files.slice
    source.files.slice = lambda name: [read.append(name), slice_of(name)][1]
    source.load([model])
    found = {name: full_tensor(value).clone() for name, value in model.state_dict().items()}
    assert_identical(found, dict(alone.state_dict()))
    # of 3 layers with 3 matrices in each of 4 experts
    assert len({name for name in read if ".experts." in name}) == 3 * 3 * 4 // 4
