"""ops.rope has the right gradients, and turns tokens by their positions after an offset and in packed documents."""

import pytest
import torch
from shards import make

from tpformer import ops
from tpformer.kernels.rope.reference import rope_table
from tpformer.layers import Positions

CPU = torch.device("cpu")


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    values = make(0, torch.float64, q=(4, 2, 6), k=(4, 1, 6))
    q, k = (values[name].requires_grad_() for name in "qk")
    table, positions = rope_table(71, 6, 10000.0, torch.float64, CPU), torch.tensor([0, 3, 1, 70])
    assert torch.autograd.gradcheck(lambda q, k: ops.rope(q, k, table, positions, interleaved), (q, k))

    def strided(q, k):
        headwise = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
        return ops.rope(*headwise, table, positions, interleaved)

    assert torch.autograd.gradcheck(strided, (q, k))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_offset_continues_a_longer_sample(dtype, interleaved):
    """The last four of seven tokens, at an offset of 3, get the bits that they get in the whole sample."""
    values = make(1, dtype, q=(2, 7, 3, 8), k=(2, 7, 1, 8))

    def turned(part: slice, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (values[name][:, part].flatten(0, 1) for name in "qk")
        table, ids = positions.rope(8, 100.0, CPU, dtype)
        return ops.rope(q, k, table, ids, interleaved)

    whole = turned(slice(None), Positions(2, 7))
    tail = turned(slice(3, None), Positions(2, 4, offset=3))
    for y, z in zip(whole, tail, strict=True):
        assert torch.equal(y.unflatten(0, (2, 7))[:, 3:].flatten(0, 1), z)


def test_documents_restart():
    values = make(2, torch.float64, q=(6, 2, 4), k=(6, 2, 4))
    table, ids = Positions(2, 3, torch.tensor([[0, 1, 0], [0, 1, 2]])).rope(4, 100.0, CPU, torch.float64)
    packed = ops.rope(values["q"], values["k"], table, ids)
    for first, last in ((0, 2), (2, 3), (3, 6)):
        table, ids = Positions(1, last - first).rope(4, 100.0, CPU, torch.float64)
        apart = ops.rope(values["q"][first:last], values["k"][first:last], table, ids)
        assert all(torch.equal(y[first:last], z) for y, z in zip(packed, apart, strict=True))


def test_layers_share_one_table_and_one_list_of_positions():
    positions = Positions(2, 5, offset=4)
    one, other = (positions.rope(8, 1e4, CPU, torch.float32) for _ in range(2))
    assert one[0] is other[0] and one[1] is other[1]
    assert one[0][0].shape == (9, 4) and one[1].tolist() == [4, 5, 6, 7, 8] * 2


def test_an_offset_and_documents_are_refused():
    with pytest.raises(ValueError, match="offset=2 is where whole samples begin: with ids, every document begins at 0"):
        Positions(1, 3, torch.tensor([[0, 1, 2]]), offset=2)
