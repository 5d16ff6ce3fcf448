"""Layers made from torch's modules compute what these do, and are refused for modules that compute something else."""

import pytest
import torch
from steps import step
from testing import assert_same
from torch import nn

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear, LayerNorm, RMSNorm, RowParallelLinear, VocabParallelEmbedding


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def plain():
    torch.manual_seed(0)
    modules = {
        "column": nn.Linear(6, 10),
        "row": nn.Linear(10, 6, bias=False),
        "layernorm": nn.LayerNorm(6, bias=False),
        "rmsnorm": nn.RMSNorm(6),
        "unscaled": nn.LayerNorm(6, elementwise_affine=False),
        "embedding": nn.Embedding(11, 6, padding_idx=-1),
    }
    for module in modules.values():
        module.double().eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    modules["column"].bias.requires_grad_(False)
    return modules


def results(modules):
    ids = torch.arange(12).view(3, 4) % 11
    found = {"ids": modules["embedding"](ids).detach()}
    modules["embedding"](ids).square().sum().backward()
    found["table"] = full_tensor(modules["embedding"].weight.grad)
    for name in ("column", "row", "layernorm", "rmsnorm", "unscaled"):
        x = torch.randn(
            3, 4, 10 if name == "row" else 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        dy = torch.ones(3, 4, 10 if name == "column" else 6, dtype=torch.float64)
        found |= {f"{name}.{each}": value for each, value in step(modules[name], x, dy * x.sum()).items()}
        assert not modules[name].training
    return found


def on_rank(t):
    tp = None if t == 1 else build_mesh("cpu", tensor_parallel=t)["tp"]
    own = plain()
    kept = {name: [p.clone() for p in module.parameters()] for name, module in own.items()}
    layers = {
        "column": ColumnParallelLinear.from_linear(own["column"], tp=tp, gather_output=True),
        "row": RowParallelLinear.from_linear(own["row"], tp=tp, input_is_parallel=False),
        "layernorm": LayerNorm.from_norm(own["layernorm"], tp=tp),
        "rmsnorm": RMSNorm.from_norm(own["rmsnorm"], tp=tp),
        "unscaled": LayerNorm.from_norm(own["unscaled"], tp=tp),
        "embedding": VocabParallelEmbedding.from_embedding(own["embedding"], tp=tp),
    }
    with torch.no_grad():
        for layer in layers.values():
            for parameter in layer.parameters():
                parameter.add_(1).sub_(1)  # copies: what is written to a layer does not reach the plain module
    assert all(torch.equal(a, b) for name in own for a, b in zip(kept[name], own[name].parameters(), strict=True))
    return results(layers)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_same_as_plain(ranks, t):
    for found in ranks(t).run(on_rank, t):
        assert_same(found, results(plain()))


@pytest.mark.parametrize(
    ("make", "module", "error", "words"),
    [
        (ColumnParallelLinear.from_linear, Scaled(2, 2), TypeError, "a Scaled does not compute"),
        (RowParallelLinear.from_linear, nn.Bilinear(2, 2, 2), TypeError, "an unchanged nn.Linear"),
        (LayerNorm.from_norm, nn.RMSNorm(2), TypeError, "an unchanged nn.LayerNorm"),
        (LayerNorm.from_norm, nn.LayerNorm((2, 2)), ValueError, "over the last dim alone"),
        (VocabParallelEmbedding.from_embedding, nn.Embedding(2, 2, max_norm=1.0), ValueError, "max_norm"),
    ],
)
def test_refused(make, module, error, words):
    with pytest.raises(error, match=words):
        make(module)
