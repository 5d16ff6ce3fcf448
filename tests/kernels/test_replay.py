"""What a launcher's plans are found by. That a replay launches what the launcher would is in tests/driver."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.replay import describe


def description(*values: object) -> tuple:
    found: list = []
    tensors: list[Tensor] = []
    describe(values, found, tensors, [], [])
    return tuple(found)


def test_lists_that_share_out_the_same_tensors_in_another_way_have_plans_of_their_own() -> None:
    x, y, z = torch.zeros(3, 16).unbind()
    assert description([x, y], [z]) == description([y, z], [x])
    assert description([x, y], [z]) != description([x], [y, z])
    assert description([x, y]) != description([x], y)
