"""Layers made as torch's modules are made, or from these modules, compute what they do."""

import pytest
import torch
from steps import Results, draw, each_case, step
from testing import assert_identical, assert_kernel_close, assert_same
from torch import nn

from tpformer.layers import ColumnParallelLinear, LayerNorm, RMSNorm, RowParallelLinear, VocabParallelEmbedding


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    modules = nn.Sequential(
        nn.Embedding(11, 6, padding_idx=-1), nn.LayerNorm(6, bias=False), nn.Linear(6, 10),
        nn.Linear(10, 6, bias=False), nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False),
    )  # fmt: skip
    for parameter in modules.double().eval().parameters():
        nn.init.normal_(parameter)
    modules[2].bias.requires_grad_(False)
    return modules


def results(modules: nn.Sequential) -> Results:
    assert not any(module.training for module in modules), "as the module that it was made from"
    return step(modules, torch.arange(12).view(3, 4) % 11, *draw((3, 4, 6)))


def on_rank(tp) -> Results:
    table, norm, column, row, rms, unscaled = own = plain()
    kept = {name: p.clone() for name, p in own.named_parameters()}
    tp = None if tp.size() == 1 else tp
    layers = nn.Sequential(
        VocabParallelEmbedding.from_embedding(table, tp=tp), LayerNorm.from_norm(norm, tp=tp),
        ColumnParallelLinear.from_linear(column, tp=tp, gather_output=True),
        RowParallelLinear.from_linear(row, tp=tp, input_is_parallel=False),
        RMSNorm.from_norm(rms, tp=tp), LayerNorm.from_norm(unscaled, tp=tp),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(1).sub_(1)  # copies: what is written to a layer does not reach the plain module
    assert_identical(dict(own.named_parameters()), kept)
    return results(layers)


@pytest.mark.parametrize("t", [1, 2])
def test_layers_made_from_modules_compute_what_these_do(ranks, t):
    ((_, found),) = each_case(ranks, t, on_rank, [()])
    assert_same(found, (results(plain()),) * t)


@pytest.mark.parametrize("positional, options", [
    ((7,), {"eps": 1e-3}), ((7, 1e-3), {}), (((7,),), {"bias": False}), (([7], 1e-3, False), {}),
    ((7, 1e-3, True, False), {}), ((torch.Size([7]),), {"elementwise_affine": False, "dtype": torch.float64}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_have_torchs_constructors_and_values(kind, positional, options):
    if kind is RMSNorm:
        positional, options = positional[:3], {name: value for name, value in options.items() if name != "bias"}
    ours, theirs = (each(*positional, **options) for each in (kind, getattr(nn, kind.__name__)))
    for name in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert_identical(ours.state_dict(), theirs.state_dict())
    ours, theirs = ours.double(), theirs.double()
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())
    for shape in ((7,), (4, 7), (2, 3, 7), (0, 7)):
        x, dy = 1e-5 * torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        ours.zero_grad(), theirs.zero_grad()
        found, wanted = step(ours, x, dy), step(theirs, x, dy)
        for part in wanted:  # dx is a hundred thousand times as large as the rest
            assert_same(found[part], wanted[part], f"{part} {shape}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [RMSNorm, nn.RMSNorm])
def test_default_eps_of_rmsnorm(dtype, kind):
    x = 1e-4 * torch.arange(1, 8).to(dtype)[None]
    eps = torch.finfo(torch.float32).eps
    oracle, baseline = (z / (z.square().mean(-1, keepdim=True) + eps).sqrt() for z in (x.double(), x.float()))
    assert_kernel_close(kind(7, dtype=dtype)(x), oracle, baseline.to(dtype), kind.__module__)
