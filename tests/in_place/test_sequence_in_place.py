"""With sequence_parallel=True a model that exists takes the steps of one process, whatever its layers look like."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import transformers
from testing import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.families.training import in_float64
from tpformer import parallelize
from tpformer.distributed import build_mesh
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.dtensor import full_tensor

VOCAB, BATCH = 28, 2
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_key_value_heads": 2}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES | HEADS),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SIZES | HEADS | {"head_dim": 4}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", SIZES | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("OPTConfig", "OPTForCausalLM", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SIZES | HEADS | {"experts_implementation": "eager"}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", SIZES | NO_DROPOUT | {"embedding_size": 16}),
    "bart": ("BartConfig", "BartForConditionalGeneration", SIZES | BART | {"decoder_start_token_id": 1}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
}  # fmt: skip


def build(family: str) -> nn.Module:
    config, model, options = MODELS[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.train()


def ids(seq: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, seq), generator=torch.Generator().manual_seed(seed))


@in_float64()
def train(model: nn.Module, steps: list[dict]) -> dict[str, torch.Tensor]:
    """Results, all gradients and the parameters of AdamW's steps; each step has its length and the model's options."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = {}
    for number, options in enumerate(steps):
        tokens = ids(options["seq"], number)
        result = model(tokens, labels=tokens, **{name: value for name, value in options.items() if name != "seq"})
        optimizer.zero_grad()
        result.loss.backward()
        found |= {f"logits {number}": result.logits.detach()}
        found |= {f"states {number}.{i}": x.detach() for i, x in enumerate(result.get("hidden_states") or ())}
        found |= {
            f"{name} {number}": full_tensor(p.grad).clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        optimizer.step()
    return found | {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


@cache
def in_one_process(family: str, *steps: tuple) -> dict[str, torch.Tensor]:
    return train(build(family), [dict(step) for step in steps])


def on_rank(family: str, t: int, checkpointed: bool, steps: list[dict]) -> tuple[dict, list[str], list[str]]:
    model = build(family)
    parallelize(model, build_mesh("cpu", tensor_parallel=t)["tp"], sequence_parallel=True)
    if checkpointed:
        # a backward recomputes outside of the mode that train has set
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), in_float64())}
        model.gradient_checkpointing_enable(again)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = train(model, steps)
    kept = [reason for reason in model._tpformer.plan.kept.values() if "whole sequence" in reason]
    return found, [str(each.message) for each in said if "sequence shards" in str(each.message)], kept


def check(ranks, family: str, t: int, *steps: tuple, checkpointed: bool = False) -> list[list[str]]:
    expected = in_one_process(family, *steps)
    results = ranks(t).run(on_rank, family, t, checkpointed, [dict(step) for step in steps])
    for found, _, kept in results:
        assert kept == []
        assert_same(found, expected)
    return [said for _, said, _ in results]


EVEN, UNEVEN = (("seq", 8),), (("seq", 7),)


@pytest.mark.parametrize(("family", "t"), [("llama", 4), *((family, 2) for family in MODELS if family != "llama")])
def test_steps_are_those_of_one_process(ranks, family, t):
    """Every chain of layers says once that a length does not fit: an encoder and a decoder are two. Four ranks share
    two key-value heads."""
    text = (
        f"7 tokens a sequence cannot be shared equally by {t} tensor-parallel ranks: such batches run without sequence "
        f"shards; pad them to a multiple"
    )
    for said in check(ranks, family, t, EVEN, UNEVEN, EVEN):
        assert said == [text] * (2 if family in ("bart", "t5") else 1)


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_recomputed_layers_have_the_same_gradients(ranks, family):
    check(ranks, family, 2, EVEN, EVEN, checkpointed=True)


def test_hidden_states_are_whole(ranks):
    check(ranks, "llama", 2, EVEN, (*EVEN, ("output_hidden_states", True)), EVEN)


def generated(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    return model.eval().generate(ids(8, 0), **options), model.generate(ids(7, 0), **options)


def generated_on_rank(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    return generated(parallelize(build(family), mesh, sequence_parallel=True))


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_generation_is_that_of_one_process(ranks, family):
    expected = generated(build(family))
    for found in ranks(2).run(generated_on_rank, family):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def counted_on_rank() -> tuple[list, list]:
    model = build("llama")
    parallelize(model, build_mesh("cpu", tensor_parallel=2)["tp"], sequence_parallel=True)
    first, second = model.model.layers
    kept = {}
    second.register_forward_hook(lambda _, args, kwargs, __: kept.update(kwargs), with_kwargs=True)
    model(ids(8, 0), use_cache=False)
    x = torch.randn(BATCH, 4, 16, dtype=torch.float64, requires_grad=True)
    second._forward_hooks.clear()  # the gather after the last layer
    with record_collectives() as forward:
        y = second(x, **kept)
    with record_collectives() as backward:
        y.sum().backward()
    return forward, backward


def test_collectives_of_one_layer(ranks):
    whole, norm = BATCH * 8 * 16 * 8, 16 * 8
    gather, scatter = ("all_gather", whole), ("reduce_scatter", whole)
    for forward, backward in ranks(2).run(counted_on_rank):
        assert forward == [gather, scatter, gather, scatter]
        assert sorted(backward) == sorted(
            [gather, scatter, gather, gather, ("all_reduce", whole), *[("all_reduce", norm)] * 2]
        )


class Block(nn.Module):
    """A layer of one's own with a scale of its own. mixing: it looks at the next token before its norm."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale, self.mixing, self.late = nn.Parameter(torch.ones(16)), mixing, nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, late: bool = False) -> torch.Tensor:
        y = self.norm(x.roll(1, 1) if self.mixing else x)
        y = x + self.scale * self.down(torch.tanh(self.up(self.late(y) if late else y)))
        return y if other is None else y + other


class Skips(nn.Module):
    """Its third layer also gets what the first one returned, and the code before the fourth one looks at all tokens."""

    def __init__(self, mixing: tuple[bool, ...] = (False,) * 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(each) for each in mixing).double()

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        first = self.blocks[0](x)
        third = self.blocks[2](self.blocks[1](first, late=late), first)
        return self.blocks[3](third + third.mean(1, keepdim=True))


class Recomputed(Skips):
    """One layer after another, each recomputed by its user's own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def tokens(seq: int) -> torch.Tensor:
    return torch.randn(BATCH, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq))


def own_model(kind: type[Skips], *mixing: bool, t: int = 1) -> nn.Module:
    mesh = None if t == 1 else build_mesh("cpu", tensor_parallel=t)["tp"]
    return parallelize(kind(mixing), mesh, sequence_parallel=t > 1, example=(tokens(4),))


def own_on_rank(kind: type[Skips], t: int, *mixing: bool) -> tuple[list[str], dict]:
    model = own_model(kind, *mixing, t=t)
    with record_collectives() as record:
        y = model(tokens(8))
    names = [name for name, _ in record]
    y.square().sum().backward()
    return names, {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "mixing", "gathers"), [
    (Skips, (False,) * 4, 3 + 3), (Skips, (False, True, False, False), 2 + 2), (Recomputed, (False,) * 4, 4 + 1),
])  # fmt: skip
def test_own_layers_get_the_tokens_that_they_need(ranks, kind, mixing, gathers):
    """Each MLP on shards gathers, and so does each end of a chain. Layers that mix tokens or get others run whole."""
    _, expected = own_on_rank(kind, 1, *mixing)
    for names, found in ranks(2).run(own_on_rank, kind, 2, *mixing):
        assert names.count("all_gather") == gathers
        assert_same(found, expected)


def refused_on_rank() -> list[str]:
    said: list[str] = []

    def refused(call: Callable) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        said.append(str(caught.value))

    refused(lambda: own_model(Skips, *(True,) * 4, t=2))
    own, recomputed = own_model(Skips, *(False,) * 4, t=2), own_model(Recomputed, *(False,) * 4, t=2)
    refused(lambda: own(tokens(8), late=True))
    refused(lambda: recomputed(tokens(7)).sum().backward())
    llama = parallelize(build("llama"), build_mesh("cpu", tensor_parallel=2)["tp"], sequence_parallel=True)
    llama.gradient_checkpointing_enable()
    refused(lambda: llama(ids(7, 0)))
    refused(lambda: llama(ids(8, 0), output_hidden_states=True))
    return said


def test_refusals_say_why(ranks):
    expected = [
        "no layer of this Skips can run on sequence shards: blocks.0 (a Block computes something else from a part",
        "blocks.1.late runs, but did not in the example",
        "blocks.0 is recomputed after a forward with hidden states as outputs, or with a sequence that 2 ranks cannot",
        "7 tokens a sequence cannot be shared equally by 2 tensor-parallel ranks, and gradient checkpointing needs",
        "hidden states are asked for, and gradient checkpointing needs sequence shards throughout: leave them out",
    ]
    for said in ranks(2).run(refused_on_rank):
        assert [text[text.find(part) :][: len(part)] for text, part in zip(said, expected, strict=True)] == expected
