"""Each fused style gives what torch's gives with its arguments, and the plain module: results and all gradients."""

import pytest
import torch
from steps import tp_mesh
from testing import assert_same, on_every_rank
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from turns import in_turns

from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place import styles as fused

BATCH, SEQ, HIDDEN, VOCAB = 2, 6, 15, 12
WHOLE, ROWS, FEATURES = Replicate(), Shard(1), Shard(-1)
COLUMN, ROW = (fused.FusedColwiseParallel, ColwiseParallel), (fused.FusedRowwiseParallel, RowwiseParallel)
NORM, TABLE = (fused.FusedSequenceParallel, SequenceParallel), (fused.FusedVocabParallel, RowwiseParallel)
# the style and torch's, the module, the layouts of its input and of its output, arguments
CASES = [
    (COLUMN, nn.Linear, WHOLE, FEATURES, {}),
    (COLUMN, nn.Linear, ROWS, FEATURES, {"input_layouts": ROWS}),
    (COLUMN, nn.Linear, ROWS, FEATURES, {"input_layouts": ROWS, "use_local_output": False}),
    (COLUMN, nn.Linear, WHOLE, WHOLE, {"output_layouts": WHOLE, "use_local_output": False}),
    (COLUMN, nn.Linear, ROWS, WHOLE, {"input_layouts": ROWS, "output_layouts": WHOLE}),
    (ROW, nn.Linear, FEATURES, WHOLE, {}),
    (ROW, nn.Linear, FEATURES, ROWS, {"output_layouts": ROWS}),
    (ROW, nn.Linear, WHOLE, WHOLE, {"input_layouts": WHOLE}),
    (ROW, nn.Linear, FEATURES, ROWS, {"output_layouts": ROWS, "use_local_output": False}),
    (NORM, nn.LayerNorm, ROWS, ROWS, {}),
    (NORM, nn.RMSNorm, ROWS, ROWS, {"use_local_output": True}),
    (TABLE, nn.Embedding, WHOLE, WHOLE, {"input_layouts": WHOLE}),
    (TABLE, nn.Embedding, WHOLE, ROWS, {"input_layouts": WHOLE, "output_layouts": ROWS}),
    (TABLE, nn.Embedding, WHOLE, Shard(-2), {"input_layouts": WHOLE, "output_layouts": Shard(-2)}),
]
SIZES = {nn.Linear: (HIDDEN, HIDDEN), nn.Embedding: (VOCAB, HIDDEN)}


def made(kind):
    """A module with values that are the same wherever it is made."""
    module = kind(*SIZES.get(kind, (HIDDEN,))).double()
    for number, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return module


def drawn(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind is nn.Embedding and seed == 0:
        return torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    return torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64)


def plain(kind):
    module, x = made(kind), drawn(kind, 0)
    y = module(x.requires_grad_(x.is_floating_point()))
    y.backward(drawn(kind, 1))
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def sharded(mesh, style, kind, before, after, options, given_dtensor):
    """What the parallel module gives, put together from ranks. Its input is a DTensor or this rank's part of it."""
    module = made(kind)
    if mesh.get_local_rank() and style is not SequenceParallel:
        with torch.no_grad():  # parallelize_module gives all ranks rank 0's values, but torch not those of norms
            module.weight.zero_()
    module = parallelize_module(module, mesh, style(**options))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    x, dy = (distribute_tensor(drawn(kind, seed), mesh, [place]) for seed, place in ((0, before), (1, after)))
    leaf = (x if given_dtensor else x.to_local()).detach().requires_grad_(x.is_floating_point())
    y = module(leaf)
    local = options.get("use_local_output", style not in NORM)
    assert local != isinstance(y, DTensor) and (local or y.placements[0].is_replicate() == after.is_replicate())
    y.backward(dy.to_local() if local else dy)
    found = {name: p.grad for name, p in module.named_parameters()}
    for name, part, place in (("y", y.detach(), after), ("x", leaf.grad, before)):
        whole = part is None or isinstance(part, DTensor)
        found[name] = part if whole else DTensor.from_local(part, mesh, [place])
    return {name: full_tensor(part) for name, part in found.items()}


@pytest.mark.parametrize("cases", [CASES[::3], *in_turns([CASES[1::3], CASES[2::3]], first=1)])
@on_every_rank(3)
def test_same_as_torch_styles(cases):
    expected = {kind: plain(kind) for _, kind, *_ in cases}
    for (ours, torchs), kind, *layouts, options in cases:
        for style, given_dtensor in ((ours, False), (ours, True), (torchs, False)):
            found = sharded(tp_mesh(), style, kind, *layouts, options, given_dtensor)
            assert_same(found, expected[kind], f"{style.__name__} {kind.__name__} {options} {given_dtensor}")


LAYOUTS = [
    (fused.FusedColwiseParallel, {"input_layouts": Shard(-1)}, "FusedColwiseParallel has no input_layouts"),
    (fused.FusedColwiseParallel, {"output_layouts": Shard(1)}, "torch's own ColwiseParallel"),
    (fused.FusedRowwiseParallel, {"output_layouts": Partial()}, "FusedRowwiseParallel has no output_layouts"),
    (fused.FusedRowwiseParallel, {"input_layouts": Shard(1)}, "FusedRowwiseParallel has no input_layouts"),
    (fused.FusedVocabParallel, {"input_layouts": Shard(1)}, "FusedVocabParallel has no input_layouts"),
]
MODULES = [
    (fused.FusedSequenceParallel, nn.Dropout(0.5), "torch's own SequenceParallel"),
    (fused.FusedSequenceParallel, nn.LayerNorm((2, 2)), "norms over the last dim"),
    (fused.FusedColwiseParallel, nn.Embedding(4, 4), "only an nn.Linear itself can"),
    (fused.FusedVocabParallel, nn.Linear(4, 4), "only an nn.Embedding itself can"),
]


@on_every_rank(1)
def test_other_layouts_and_modules_are_refused():
    for style, options, words in LAYOUTS:
        with pytest.raises(ValueError, match=words):
            style(**options)
    for style, module, words in MODULES:
        with pytest.raises(TypeError, match=words):
            parallelize_module(module, tp_mesh(), style())
