"""What tests of inference share: a tokenizer of bytes and pairs of them, as GPT-2's is, and text without a cache."""

from pathlib import Path

import pytest
import torch

from tpformer.models import GPT


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


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], n: int) -> list[int]:
    """The n most likely tokens without a cache: for each one the model runs on the whole text."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
