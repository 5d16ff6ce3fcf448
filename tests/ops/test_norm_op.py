"""The stand-alone norm operation: any leading dims, strided input and gradients, checked numerically."""

import pytest
import torch
from shards import make

from tpformer import ops


@pytest.mark.parametrize("kind, bias", [("layernorm", True), ("layernorm", False), ("rmsnorm", False)])
def test_norm_gradients(kind, bias):
    values = make(0, torch.float64, x=(2, 3, 5), weight=(5,), bias=(5,))
    inputs = [values["x"].requires_grad_(), values["weight"].requires_grad_()]
    inputs += [values["bias"].requires_grad_()] if bias else []

    def norm(x, weight, bias=None):
        return ops.norm(x, ops.Norm(kind, weight, bias, 1e-5))

    assert torch.autograd.gradcheck(norm, inputs)
    y = norm(*inputs)
    assert y.shape == (2, 3, 5)
    # a transposed input and an expanded gradient are not contiguous
    strided = values["x"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    (one,) = torch.autograd.grad(norm(strided, *inputs[1:]).sum(), strided)
    (other,) = torch.autograd.grad(norm(*inputs), inputs[0], torch.ones(2, 3, 5, dtype=torch.float64))
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
