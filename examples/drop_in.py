"""Tensor-parallel layers in a model of your own: an MLP on all ranks, checked against one process.

python examples/drop_in.py
torchrun --nproc-per-node 2 examples/drop_in.py
"""

import torch
import torch.distributed as dist
from torch import nn

from tpformer.distributed import build_mesh, initialize
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, init_weights


class Regressor(nn.Module):
    """Input and output are equal on all ranks; the hidden layer is split over them."""

    def __init__(self, tp=None):
        super().__init__()
        self.wide = ColumnParallelLinear(16, 256, tp=tp)
        self.narrow = RowParallelLinear(256, 1, activation="gelu", tp=tp)

    def forward(self, x):
        return self.narrow(self.wide(x))


def train(tp=None, steps=100):
    """Train on a small regression; return the loss of the last step."""
    model = Regressor(tp)
    init_weights(model, seed=0)  # the same weights on any number of ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    y = (x[:, :1] * x[:, 1:2]).sin()
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    loss, alone = train(mesh["tp"]), train()
    assert abs(loss - alone) < 1e-3 * alone, (loss, alone)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {loss:.6f}; one process: {alone:.6f}")
    dist.destroy_process_group()
