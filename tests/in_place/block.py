"""A block between tied tables whose linears are of every kind, and how it is sharded in place.

Belongs here: the model that the primitives and verify are tested with. Models of transformers are in tiny.py.
"""

import torch
from tiny import VOCAB
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from tpformer import ops
from tpformer.in_place.linears import make_column, make_embedding, make_row
from tpformer.in_place.summing import sum_gradients
from tpformer.layers import TensorParallel

HIDDEN = 10


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    """Tied tables around a block with a fused projection, heads that share a scale, and a norm on rows."""

    enter = leave = nn.Identity()

    def __init__(self, linear: type[nn.Module] = nn.Linear, wide: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, HIDDEN, padding_idx=5)
        self.norm, self.heads = Scale(HIDDEN), Scale(2)
        self.fused, self.column, self.row = linear(HIDDEN, 2 * wide), linear(HIDDEN, wide), linear(wide, HIDDEN)
        self.split = linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.table.weight
        for module in (self.double(), self.fused, self.column, self.row, self.split):
            if hasattr(module, "bias"):
                nn.init.normal_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        x = self.enter(self.table(input_ids))
        y = self.norm(x)
        gate, up = self.fused(y).chunk(2, -1)
        heads = (torch.tanh(gate) * up * self.column(y)).unflatten(-1, (-1, 2))
        x = self.leave(x + self.row(self.heads(heads).flatten(-2)))
        logits = self.head(x + self.split(x))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.roll(1, 1).flatten(), reduction="sum")
        return CausalLMOutput(loss=loss, logits=logits)


def in_place(model: Model, tp: TensorParallel, fault: str | None = None) -> Model:
    """The model, sharded; with sequence shards between `enter` and `leave`. fault: what is done wrong."""
    width = model.column.weight.shape[0] if isinstance(model.column, nn.Linear) else model.column.nf
    chunk = -(-width // tp.size)
    first, last = tp.rank * chunk, min((tp.rank + 1) * chunk, width)
    dim = None
    if tp.sequence_parallel:
        dim = 1
        model.enter = lambda x: ops.scatter_rows(x.movedim(1, 0), tp.group).movedim(0, 1)
        model.leave = lambda x: ops.gather_rows(x.movedim(1, 0), tp.group).movedim(0, 1)
        sum_gradients(model.norm, tp)
    make_embedding(model.table, tp)
    make_column(model.fused, tp, rows=[slice(first, last), slice(width + first, width + last)], sequence_dim=dim)
    others = [slice((first + chunk) % width, (first + chunk) % width + chunk)]
    make_column(model.column, tp, rows=others if fault == "heads are permuted" else None, sequence_dim=dim)
    if fault != "a norm's gradient is not summed":
        sum_gradients(model.heads, tp)
    make_row(model.row, tp, sequence_dim=dim)
    make_row(model.split, tp, split_input=True)
    make_column(model.head, tp, gather_output=True)
    return model
