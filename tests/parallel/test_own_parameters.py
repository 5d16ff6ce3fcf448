"""A user's own parameters between sequence-parallel blocks: their gradients are summed if they are named, and refused
otherwise."""

import pytest
import torch
from steps import Results, gradients
from testing import assert_same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import Positions, TensorParallel, init_weights, transformer_block
from tpformer.parallel import reduce_partial_gradients

HIDDEN, SEQ, SAMPLES = 12, 6, 2
PARTIAL = ["gain", "adapter.*"]


class Between(nn.Module):
    """Two blocks with a gain and an adapter between them; the second block has a norm of torch.nn."""

    def __init__(self, tp: TensorParallel | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.randn(HIDDEN, dtype=torch.float64))
        self.adapter = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.first, self.second = (transformer_block(HIDDEN, 6, tp=tp, dtype=torch.float64) for _ in range(2))
        init_weights(self, 3)
        self.second.input_layernorm = nn.LayerNorm(HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        x = self.first(x, positions=positions)
        return self.second(x * self.gain + self.adapter(x), positions=positions)


def backward(model: nn.Module, first: int, rows: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(SAMPLES * SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    model(x[first : first + rows], positions=Positions(samples, SEQ)).backward(dy[first : first + rows])


def on_rank(t: int, sequence_parallel: bool, data_parallel: int) -> Results:
    mesh = build_mesh("cpu", tensor_parallel=t, data_parallel_shard=data_parallel)
    model = Between(TensorParallel(mesh["tp"], sequence_parallel))
    tokens = SAMPLES * SEQ // data_parallel
    rows = tokens // t if sequence_parallel else tokens
    first = tokens * mesh["dp_shard"].get_local_rank() + rows * mesh["tp"].get_local_rank() * sequence_parallel
    if data_parallel > 1:
        for part in (model.adapter, model.second, model):
            fully_shard(part, mesh=mesh["dp_shard"]).set_gradient_divide_factor(1.0)
    backward(model, first, rows, SAMPLES // data_parallel)
    if sequence_parallel and t > 1:
        refused = r"parameters are not laid out .* \((gain, )?adapter.weight, adapter.bias"
        for names in ({}, {"partial": "gain"}, {"partial": [*PARTIAL, "second.*"], "whole": ["adapter.*"]}):
            with pytest.raises(ValueError, match=refused):
                reduce_partial_gradients(model, **names)
    reduce_partial_gradients(model, partial=PARTIAL)
    found = {name: g.clone() for name, g in gradients(model, PARTIAL).items()}
    if sequence_parallel and t > 1:
        for p in model.parameters():
            p.grad *= 0.5
        with pytest.raises(RuntimeError, match="the gradient of gain has been summed .* and changed since"):
            reduce_partial_gradients(model, partial=PARTIAL)
        reduce_partial_gradients(model, whole=PARTIAL)
        assert torch.equal(full_tensor(model.gain.grad), 0.5 * found["gain"])
    return found


@pytest.mark.parametrize(("t", "sequence_parallel", "data_parallel"), [
    (3, True, 1), (2, False, 2), *in_turns([(1, True, 1), (2, False, 1), (2, True, 2)], first=0)
])  # fmt: skip
def test_gradients_equal_one_process(ranks, t, sequence_parallel, data_parallel):
    model = Between()
    backward(model, 0, SAMPLES * SEQ, SAMPLES)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in ranks(t * data_parallel).run(on_rank, t, sequence_parallel, data_parallel):
        assert_same(found, expected)
