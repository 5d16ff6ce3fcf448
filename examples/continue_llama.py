"""Go on training a Llama, and give it back to transformers: import, train, export, and compare the logits.

python examples/continue_llama.py [DIR TEXT...]   a directory of transformers, and texts; or a tiny Llama, made here
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tpformer.models import GPT
from tpformer.training.source import open_source

RUN = """
[run]
dir = "{work}/continued"
[model]
init_from = "{work}/imported"
seq_length = 64
[data]
train = ["{work}/data"]
[parallel]
tensor_parallel = 2
[optimizer]
warmup_steps = 2
[train]
steps = 20
"""


def tiny_llama(directory):
    """Save a random Llama, and a byte-level tokenizer that is trained on this file, as transformers does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([__file__], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=letters))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), num_key_value_heads=2, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)


def tpformer(*words):
    """Run a command."""
    print("$ tpformer", *words, flush=True)
    subprocess.run([sys.executable, "-m", "tpformer.cli", *map(str, words)], check=True)


def main(work, directory=None, *texts):
    """Everything is written to the folder `work`."""
    if directory is None:
        directory, texts = work / "llama", [__file__]
        tiny_llama(directory)
    tpformer("import", directory, "--out", work / "imported")
    tokenizer = work / "imported" / "hf" / "tokenizer.json"
    tpformer("data", "build", *texts, "--out", work / "data", "--tokenizer", tokenizer)
    (work / "run.toml").write_text(RUN.format(work=work))
    tpformer("pretrain", work / "run.toml")
    tpformer("export", work / "continued", "--format", "hf", "--out", work / "exported")
    source = open_source(work / "continued")
    ours = GPT(source.architecture).eval()
    source.load([ours])
    theirs = AutoModelForCausalLM.from_pretrained(work / "exported", dtype=torch.float32)
    ids = torch.randint(theirs.config.vocab_size, (2, 32))
    with torch.no_grad():
        expected = theirs(ids).logits
        difference = (ours(ids)[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max()
    print(f"logits differ by {difference:.1e} of the largest")
    assert difference < 1e-4


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), *sys.argv[1:])
