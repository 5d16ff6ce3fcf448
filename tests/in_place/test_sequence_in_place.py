"""Sequence shards in models of one's own: which layers run on them, what they gather, and why it is refused."""

import warnings

import pytest
import torch
from steps import tp_mesh
from testing import assert_same, on_every_rank
from tiny import batch, tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpformer import parallelize
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.dtensor import full_tensor

BATCH = 2
PLAIN, MIXING, FLAT, BORROWING = "plain", "mixing", "flat", "borrowing"
WITHIN, REENTRANT, TRAINED, SCALED = "within", "reentrant", "trained", "scaled"


class Block(nn.Module):
    """kind: MIXING looks at the next token before its norm, FLAT runs its MLP on rows (batch * seq, hidden), BORROWING
    uses a parameter of another module, which would not sum its gradient. WITHIN, REENTRANT and TRAINED
    recompute their MLP. SCALED recomputes its scale, like TRAINED without a graph and in training alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale, self.kind, self.late = nn.Parameter(torch.ones(16)), kind, nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, late: bool = False) -> torch.Tensor:
        y = self.norm(x.roll(1, 1) if self.kind == MIXING else x)
        y = self.late(y) if late else y * self.late.weight if self.kind == BORROWING else y
        y = y.flatten(0, 1) if self.kind == FLAT else y
        if self.kind in (WITHIN, REENTRANT) or (self.kind == TRAINED and self.training):
            y = checkpoint(self.mlp, y, use_reentrant=self.kind != WITHIN)
        else:
            y = self.mlp(y).view(x.shape)
        if self.kind == SCALED and self.training:
            y = checkpoint(lambda y: self.scale * y, y, use_reentrant=True)
        else:
            y = self.scale * y
        return x + y + (0 if other is None else other)

    def mlp(self, y: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(y)))


class Skips(nn.Module):
    """Its third layer also gets what the first one returned, and the code before the fourth one looks at all tokens."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(each) for each in kinds).double()

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        first = self.blocks[0](x)
        third = self.blocks[2](self.blocks[1](first, late=late), first)
        return self.blocks[3](third + third.mean(1, keepdim=True))


class Recomputed(Skips):
    """One layer after another, each recomputed by its user's own code."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputed):
    reentrant = True


class Sharing(Skips):
    """Each layer has two blocks; the second ones of the last two layers have one MLP."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__(kinds)
        self.blocks = nn.ModuleList(nn.Sequential(block, Block(PLAIN)) for block in self.blocks).double()
        self.blocks[3][1].up, self.blocks[3][1].down = self.blocks[2][1].up, self.blocks[2][1].down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens(seq: int) -> torch.Tensor:
    return torch.randn(BATCH, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq))


def own_model(model: type[Skips], kinds: tuple[str, ...], t: int) -> nn.Module:
    return parallelize(model(kinds), tp_mesh() if t > 1 else None, sequence_parallel=t > 1, example=(tokens(4),))


def own_on_rank(model: type[Skips], kinds: tuple[str, ...], t: int) -> tuple[list[str], dict]:
    model = own_model(model, kinds, t)
    with record_collectives() as record:
        y = model(tokens(8).requires_grad_())
    names = [name for name, _ in record]
    y.square().sum().backward()
    return names, {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("model", "kinds", "gathers"), [
    *((Skips, (each,) * 4, 3 + 3) for each in (PLAIN, FLAT, WITHIN, REENTRANT, TRAINED)),
    *((each, (PLAIN,) * 4, 4 + 1) for each in (Recomputed, Reentrant)),
    *((Skips, (PLAIN, each, PLAIN, PLAIN), 2 + 2) for each in (MIXING, BORROWING)),
])  # fmt: skip
def test_own_layers_get_the_tokens_that_they_need(ranks, model, kinds, gathers):
    """Each MLP on shards gathers, and so does each end of a chain. Layers that mix tokens, get others or use
    what others hold run whole."""
    _, expected = own_on_rank(model, kinds, 1)
    for names, found in ranks(2).run(own_on_rank, model, kinds, 2):
        assert names.count("all_gather") == gathers
        assert_same(found, expected)


def test_layers_that_have_a_part_in_common_run_whole(ranks):
    """What a layer runs on shards would run on shards where others call it, too."""
    _, expected = own_on_rank(Sharing, (PLAIN,) * 4, 1)
    for names, found in ranks(2).run(own_on_rank, Sharing, (PLAIN,) * 4, 2):
        assert "all_gather" in names
        assert_same(found, expected)


@on_every_rank(2)
def test_refusals_say_why() -> None:
    own, recomputed, reentrant = (own_model(each, (PLAIN,) * 4, 2) for each in (Skips, Recomputed, Reentrant))
    within, trained, scaled = (own_model(Skips, (each,) * 4, 2) for each in (WITHIN, TRAINED, SCALED))
    checkpointed = parallelize(tiny("llama").train(), tp_mesh(), sequence_parallel=True)
    checkpointed.gradient_checkpointing_enable()
    for words, call in (
        (r"no layer of this Skips can run on sequence shards: blocks.0 \(a Block computes something else from a part",
         lambda: own_model(Skips, (MIXING,) * 4, 2)),
        ("blocks.1.late runs, but did not in the example", lambda: own(tokens(8), late=True)),
        ("blocks.0 is recomputed after a forward with hidden states as outputs, or with a sequence that 2 ranks cannot",
         lambda: recomputed(tokens(7)).sum().backward()),
        ("blocks.0 is recomputed after a forward with hidden states as outputs, or with a sequence that 2 ranks cannot",
         lambda: reentrant(tokens(7).requires_grad_()).sum().backward()),
        ("blocks.[013] is recomputed after a forward with hidden states as outputs, or with a sequence that 2 ranks",
         lambda: trained(tokens(7).requires_grad_()).sum().backward()),
        ("use_reentrant=True computes mul again with a parameter of a layer on sequence shards, where nothing would",
         lambda: scaled(tokens(8).requires_grad_()).sum().backward()),
        ("7 tokens a sequence cannot be shared equally by 2 tensor-parallel ranks, and gradient checkpointing needs",
         lambda: within(tokens(7))),
        ("7 tokens a sequence cannot be shared equally by 2 tensor-parallel ranks, and gradient checkpointing needs",
         lambda: checkpointed(**batch(7, 0))),
        ("hidden states are asked for, and gradient checkpointing needs sequence shards throughout: leave them out",
         lambda: checkpointed(**batch(8, 0), output_hidden_states=True)),
    ):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match=words), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
