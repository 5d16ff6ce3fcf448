"""ops.activation has the right gradients, and does not write to the gradient that it is given."""

import pytest
import torch
from shards import make

from tpformer import ops
from tpformer.kernels.activation.reference import ACTIVATIONS


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients(name, gated):
    values = make(0, torch.float64, x=(5, 6), gate=(5, 6), da=(5, 6))
    inputs = [values[key].requires_grad_() for key in (("x", "gate") if gated else ("x",))]
    assert torch.autograd.gradcheck(lambda *xs: ops.activation(xs[0], name, *xs[1:]), inputs)
    da = values["da"].clone()
    ops.activation(inputs[0], name, *inputs[1:]).backward(da)
    assert torch.equal(da, values["da"])
