"""A model's tokenizer and settings of generation travel along; the byte tokenizer becomes a tokenizer.json."""

import json

import numpy
import oracle
import torch
from made import byte_level, save_run
from testing import assert_kernel_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tpformer.config import build_config
from tpformer.models import GPT
from tpformer.training.companions import keep_tokenizer, write_byte_tokenizer
from tpformer.training.data import ByteTokenizer, load_tokenizer
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.resolve import same_tokenizer
from tpformer.training.source import open_source


def test_the_byte_tokenizer_is_exact(tmp_path):
    write_byte_tokenizer(tmp_path)
    assert same_tokenizer("bytes", str(tmp_path / "tokenizer.json")), "an export is evaluated on the run's data"
    written, ours = load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer()
    assert (written.vocab_size, written.end_of_document) == (ours.vocab_size, ours.end_of_document)
    letters = numpy.random.default_rng(0).integers(0, 0x110000, 20000)
    text = "".join(chr(letter) for letter in letters if not 0xD800 <= letter < 0xE000)
    every = "".join(map(chr, range(0x500))) + "  \r\n\t a  b\n\n" + text
    assert numpy.array_equal(written.encode(every), ours.encode(every)) and written.decode(ours.encode(every)) == every
    theirs_one = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs_one(every, add_special_tokens=False).input_ids == ours.encode(every).tolist()
    assert theirs_one.decode(ours.encode(every)) == every and theirs_one.eos_token_id == 256


def test_a_trained_run_generates_in_transformers(done, tmp_path):
    """It has the byte tokenizer, and the checkpoint of a random model."""
    model = {"vocab_size": 257, "seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 4}
    model |= {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "qkv_bias": True}
    config = build_config({"model": model, "data": {"train": ["none"], "tokenizer": "bytes"}})
    run = tmp_path / "run"
    save_run(run, config, GPT(config.model.architecture), step=7)
    assert "step 7" in done("export", str(run), "--format", "hf", "--out", str(tmp_path / "out"))
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()) and type(model).__name__ == "Qwen2ForCausalLM"
    assert model.get_input_embeddings().weight.shape == (257, 32), "padded rows stay here"
    assert (model.config.eos_token_id, model.config.bos_token_id) == (256, None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = torch.tensor([tokenizer("def f", add_special_tokens=False).input_ids])
    source = open_source(run)
    ours, exact = (GPT(source.architecture, dtype=dtype).eval() for dtype in (torch.float32, torch.float64))
    source.load([ours])
    source.load([exact])
    with torch.no_grad():
        assert_kernel_close(ours(prompt), exact(prompt), model(prompt).logits, "logits")


def test_a_run_with_a_tokenizer_of_its_own_ends_its_texts_in_transformers(tmp_path):
    """No config.json says the ids of such a tokenizer, and an export said that no token ends a text."""
    made = byte_level(tmp_path / "own.json", ["some words to read"], special=("<pad>", "</s>"))
    model = {"vocab_size": 300, "seq_length": 16, "n_layers": 1, "hidden_size": 32, "n_heads": 4}
    config = build_config({"model": model, "data": {"train": ["none"], "tokenizer": str(tmp_path / "own.json")}})
    run = tmp_path / "run"
    save_run(run, config, GPT(config.model.architecture))
    assert keep_tokenizer(config.data.tokenizer, run)
    export(run, tmp_path / "out", file_format="hf")
    end = made.token_to_id("</s>")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == end == 1


def test_companions_travel_in_and_out(done, tmp_path):
    hub, run, out = (tmp_path / name for name in ("hub", "run", "out"))
    oracle.make("llama", hub)
    write_byte_tokenizer(hub)
    GenerationConfig(eos_token_id=[2, 5], do_sample=True, top_k=7).save_pretrained(hub)
    (hub / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((hub / "config.json").read_text()) | {"bos_token_id": 1, "eos_token_id": [2, 5]}
    (hub / "config.json").write_text(json.dumps(config))
    assert "step 0" in done("import", str(hub), "--out", str(run))
    export(run, out, file_format="hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (hub / name).read_bytes(), name
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, [2, 5])
    assert open_source(run).tokenizer == str(run / "hf" / "tokenizer.json")
    said: list[str] = []
    oracle.make("gpt2", tmp_path / "bare")
    import_weights(tmp_path / "bare", tmp_path / "bare-run", report=said.append)
    left_out = " = 0.1 is left out: it is a setting of training (model.dropout)"
    assert said[:3] == [f"{key}{left_out}" for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")]
    assert "has no tokenizer.json" in said[-1] and open_source(tmp_path / "bare-run").architecture.dropout == 0
    run.rename(tmp_path / "moved")
    export(tmp_path / "moved", tmp_path / "again", file_format="hf")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()
    for name in ("hub", "moved"):
        assert done("generate", str(tmp_path / name), "--prompt", "ab", "--max-new-tokens", "2").startswith("ab")
