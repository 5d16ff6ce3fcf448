"""Models and tokenizers that are made for a test: a tokenizer of bytes and pairs of them, as GPT-2's is, one as Llama
2's is, a run's folder with a model, and what a model says without a cache.

Belongs here: what tests of inference, weights and data share. No assertions.
"""

from pathlib import Path

import pytest
import torch

from tpformer.config import RunConfig, to_toml
from tpformer.models import GPT
from tpformer.training.checkpoint_files import write_checkpoint


def byte_level(path: Path, texts: list[str], first: str = "", special: tuple[str, ...] = ("</s>",)):
    """Save a tokenizer.json of 300 tokens at most, and return it as the library has it. first: what begins a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tpformer[hf]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": list(special), "show_progress": False}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    if first:
        begin = tokenizers.processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
        made.post_processor = begin
    made.save(str(path))
    return made


def sentencepiece_like(path: Path) -> None:
    """Words begin with a mark, the first space of a text is dropped, unknown characters are written as bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "d"), ("o", "g"), ("▁d", "og")]
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: index for index, word in enumerate([*words, *("".join(merge) for merge in merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.add_special_tokens(["</s>"])
    steps = tokenizers.decoders
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    made.save(str(path))


def save_run(run: Path, config: RunConfig, model: GPT, step: int = 1) -> None:
    """Write the folder of a run, which has a checkpoint of the model alone."""
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_checkpoint(run / "checkpoints" / f"step-{step}", parameters, step)


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], n: int) -> list[int]:
    """The n most likely tokens without a cache: for each one the model runs on the whole text."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
