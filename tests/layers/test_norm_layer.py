"""LayerNorm and RMSNorm have the names and values of torch.nn's, and partial gradients on sequence shards."""

import pytest
import torch
import torch.distributed as dist
from testing import assert_kernel_close, assert_same
from torch import nn

from tpformer.distributed import build_mesh
from tpformer.layers import LayerNorm, RMSNorm, TensorParallel

CONSTRUCTORS = [
    ((7,), {"eps": 1e-3}),
    ((7, 1e-3), {}),
    (((7,),), {"bias": False}),
    (([7], 1e-3, False), {}),
    ((7, 1e-3, True, False), {}),
    ((torch.Size([7]),), {"elementwise_affine": False, "dtype": torch.float64}),
]


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=str)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_equals_torch(kind, arguments, shape):
    positional, options = arguments
    if kind is RMSNorm:
        positional, options = positional[:3], {name: value for name, value in options.items() if name != "bias"}
    reference = getattr(nn, kind.__name__)(*positional, **options)
    ours, theirs = kind(*positional, **options).double(), reference.double()
    for name in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(ours, name) == getattr(theirs, name)
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())
    x = 1e-5 * torch.randn(shape, dtype=torch.float64)
    x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    dy = torch.randn_like(x)
    y, expected = ours(x), theirs(other)
    assert_same(y, expected)
    y.backward(dy), expected.backward(dy)
    assert_same(x.grad, other.grad)
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_what_a_norm_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"normalized_shape=\(4, 7\): norms are over the last dim alone"):
        LayerNorm((4, 7))
    with pytest.raises(ValueError, match="eps=-1e-05 is added under a root"):
        RMSNorm(7, -1e-5)
    with pytest.raises(ValueError, match="x has 6 features, but the norm is over 7"):
        LayerNorm(7, elementwise_affine=False)(torch.ones(2, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_default_eps_of_rmsnorm(dtype):
    x = 1e-4 * torch.arange(1, 8).to(dtype)[None]
    eps = torch.finfo(torch.float32).eps
    oracle, baseline = (z / (z.square().mean(-1, keepdim=True) + eps).sqrt() for z in (x.double(), x.float()))
    for kind in (RMSNorm, nn.RMSNorm):
        assert_kernel_close(kind(7, dtype=dtype)(x), oracle, baseline.to(dtype), kind.__module__)


def test_layernorm_starts_with_ones_and_zeros():
    layer = LayerNorm(5)
    assert torch.equal(layer.weight, torch.ones(5)) and torch.equal(layer.bias, torch.zeros(5))


def on_shard(sequence_parallel: bool):
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    layer = LayerNorm(3, tp=TensorParallel(mesh, sequence_parallel))
    x = torch.arange(12.0).view(4, 3)
    layer(x.chunk(mesh.size())[mesh.get_local_rank()] if sequence_parallel else x).sum().backward()
    grad = layer.bias.grad
    return grad.placements[0].is_partial(), grad.to_local(), grad.full_tensor()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradient_is_partial_on_shards(ranks, sequence_parallel):
    """Each of 2 ranks sees 2 of the 4 rows with sequence parallelism, and all 4 without."""
    for partial, local, full in ranks(2).run(on_shard, sequence_parallel):
        assert partial == sequence_parallel
        assert torch.equal(local, torch.full((3,), 2.0 if sequence_parallel else 4.0))
        assert torch.equal(full, torch.full((3,), 4.0))
