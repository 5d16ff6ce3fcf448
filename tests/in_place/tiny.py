"""Tiny models of transformers with random values, and steps of training, which tests of models in place share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bench.families.models import BERT, FAMILIES, VOCAB, Family
from bench.families.training import in_float64
from tpformer.distributed.dtensor import full_tensor

HIDDEN = 32
KNOWN = (*FAMILIES, Family("ALBERT", "AlbertForMaskedLM", {**BERT, "embedding_size": HIDDEN}))
# what a configuration has besides those of bench/families, by the family's name in small letters
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "gemma2", "phi3", "olmo2"), {"num_key_value_heads": 2}),
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 11, "intermediate_size": 48, "experts_implementation": "batched_mm"},
    **dict.fromkeys(("deepseekv3", "gptoss"), {"experts_implementation": "eager"}),  # grouped_mm lacks float64
}


def built(name: str, **options: Any) -> nn.Module:
    """A model with the values that transformers draws. options: of its configuration."""
    family = next(each for each in KNOWN if each.name.lower().replace("-", "") == name)
    family = family._replace(options={**family.options, **OPTIONS.get(name, {}), **options})
    return family.model_class(family.config())


def tiny(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model with the same values on every rank. options: of its configuration."""
    torch.manual_seed(0)
    made = built(name, **options)
    for parameter in made.parameters():  # larger than transformers draws them, and no two elements equal
        nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(dtype).eval()


def batch(seq: int, seed: int, size: int = 2, **options: Any) -> dict[str, Any]:
    """What a model that predicts tokens is called with in one step of training."""
    ids = torch.randint(3, VOCAB, (size, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, **options}


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards the modules have the classes and the parameters that they had."""

    def classes_and_parameters() -> list:
        return [(type(each), [*map(id, each.parameters(recurse=False))]) for each in module.modules()]

    before = classes_and_parameters()
    yield
    assert classes_and_parameters() == before


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters by name."""
    named = {name.removeprefix("_orig_mod."): full_tensor(p.detach()) for name, p in model.named_parameters()}
    return {name: x.clone() for name, x in named.items()}


@in_float64()
def train(model: nn.Module, steps: list[dict], clip: Any = None, kind: Any = torch.optim.AdamW) -> tuple[dict, dict]:
    """Losses, logits, hidden states, norms that clip(model) returns, and gradients of steps; the parameters.

    kind: the optimizer's. AdamW takes half of the time of a model of many shapes.
    """
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = {}
    for number, options in enumerate(steps):
        result = model(**options)
        optimizer.zero_grad()
        result.loss.backward()
        found |= {f"loss {number}": result.loss.detach(), f"logits {number}": result.logits.detach()}
        found |= {f"states {number}.{i}": x.detach() for i, x in enumerate(result.get("hidden_states") or ())}
        if clip is not None:
            found[f"norm {number}"] = clip(model)
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[f"{name.removeprefix('_orig_mod.')} {number}"] = full_tensor(p.grad).clone()
        optimizer.step()
    return found, values(model)
