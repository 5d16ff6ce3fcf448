"""A plan with the fused styles gives what the same plan gives with torch's: results and every gradient."""

import itertools

import pytest
import torch
from testing import assert_same
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.styles import (
    FusedColwiseParallel,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    FusedVocabParallel,
)

BATCH, SEQ, HIDDEN, WIDE, VOCAB = 2, 8, 8, 16, 12
TORCH = {"col": ColwiseParallel, "row": RowwiseParallel, "norm": SequenceParallel, "vocab": RowwiseParallel}
FUSED = {
    "col": FusedColwiseParallel,
    "row": FusedRowwiseParallel,
    "norm": FusedSequenceParallel,
    "vocab": FusedVocabParallel,
}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.mlp = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN), MLP()
        self.second, self.other, self.last = nn.RMSNorm(HIDDEN), MLP(), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double()

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.mlp(self.first(x))
        x = x + self.other(self.second(x))
        return self.head(self.last(x))


def sequence_plan(kinds, others):
    """torchtitan's shape of a plan; `others` for a part of the modules."""
    rows, local = Shard(1), {"use_local_output": False}
    return {
        "table": kinds["vocab"](input_layouts=Replicate(), output_layouts=rows),
        "first": kinds["norm"](use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=rows, desired_input_layouts=Replicate()),
        "mlp.gate": kinds["col"](),
        "mlp.up": others["col"](),
        "mlp.down": kinds["row"](output_layouts=rows),
        "second": others["norm"](),
        "other.gate": kinds["col"](input_layouts=rows, **local),
        "other.up": kinds["col"](input_layouts=rows, **local),
        "other.down": others["row"](output_layouts=rows),
        "last": kinds["norm"](),
        "head": kinds["col"](input_layouts=rows, output_layouts=Replicate()),
    }


def whole_plan(kinds, others):
    """Without sequence shards: all rows on every rank, and DTensors between some modules."""
    return {
        "table": kinds["vocab"](input_layouts=Replicate()),
        "mlp.gate": kinds["col"](use_local_output=False),
        "mlp.up": others["col"](use_local_output=False),
        "mlp.down": kinds["row"](),
        "other.gate": kinds["col"](output_layouts=Replicate()),
        "other.up": others["col"](output_layouts=Replicate()),
        "other.down": kinds["row"](input_layouts=Replicate()),
        "head": kinds["col"](output_layouts=Replicate(), use_local_output=False),
    }


def step(model):
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    logits = full_tensor(model(ids))
    logits.logsumexp(-1).pow(2).sum().backward()
    return {"y": logits.detach()} | {name: full_tensor(p.grad) for name, p in model.named_parameters()}


def on_rank(t, styles):
    """A step with each plan, by the names of what is made."""
    mesh, found = build_mesh("cpu", tensor_parallel=t)["tp"], {}
    for plan, (kinds, others) in itertools.product((sequence_plan, whole_plan), styles):
        model = Model()
        if mesh.get_local_rank():
            with torch.no_grad():  # parallelize_module gives all ranks rank 0's values
                for module in (model.table, model.mlp.gate, model.mlp.down):
                    module.weight.zero_()
        model = parallelize_module(model, mesh, plan(kinds, others))
        assert all(isinstance(p, DTensor) for p in model.mlp.parameters())
        found[f"{plan.__name__} {kinds['col'].__name__} {others['col'].__name__}"] = step(model)
    return found


@pytest.mark.parametrize(("t", "styles"), [(2, [(FUSED, TORCH), (TORCH, FUSED)]), (4, [(FUSED, FUSED)])])
def test_same_as_torch_styles(ranks, t, styles):
    expected = step(Model())
    for found in ranks(t).run(on_rank, t, styles):
        assert len(found) == 2 * len(styles)
        assert_same(found, dict.fromkeys(found, expected))


def applied(style, module):
    return parallelize_module(module, build_mesh("cpu", tensor_parallel=1)["tp"], style())


REFUSED = [
    (FusedColwiseParallel, {"input_layouts": Shard(-1)}, "FusedColwiseParallel has no input_layouts"),
    (FusedColwiseParallel, {"output_layouts": Shard(1)}, "torch's own ColwiseParallel"),
    (FusedRowwiseParallel, {"output_layouts": Partial()}, "FusedRowwiseParallel has no output_layouts"),
    (FusedRowwiseParallel, {"input_layouts": Shard(1)}, "FusedRowwiseParallel has no input_layouts"),
    (FusedVocabParallel, {"input_layouts": Shard(1)}, "FusedVocabParallel has no input_layouts"),
    (applied, {"style": FusedSequenceParallel, "module": nn.Dropout(0.5)}, "torch's own SequenceParallel"),
    (applied, {"style": FusedSequenceParallel, "module": nn.LayerNorm((2, 2))}, "norms over the last dim"),
    (applied, {"style": FusedColwiseParallel, "module": nn.Embedding(4, 4)}, "only an nn.Linear itself can"),
    (applied, {"style": FusedVocabParallel, "module": nn.Linear(4, 4)}, "only an nn.Embedding itself can"),
]


def refused():
    for make, options, words in REFUSED:
        with pytest.raises(TypeError if make is applied else ValueError, match=words):
            make(**options)


def test_other_layouts_and_modules_are_refused(ranks):
    ranks(1).run(refused)
