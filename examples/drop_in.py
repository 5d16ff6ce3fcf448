"""Two of this library's linears in a plain model, with sequence parallelism: each rank has a slice of every sequence.

    python examples/drop_in.py
    torchrun --nproc-per-node 2 examples/drop_in.py

It trains a small regression on all ranks, and again in one process, and the two must agree.
"""

import torch
import torch.distributed as dist
from torch import nn

from tpformer.distributed import build_mesh, initialize
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel, init_weights
from tpformer.parallel import reduce_partial_gradients


class Model(nn.Module):
    """Every rank has a copy of the torch.nn layers, which sees this rank's tokens only. The two linears are sharded."""

    def __init__(self, tp=None):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 1)
        self.wide = ColumnParallelLinear(64, 256, sequence_dim=1, tp=tp)
        self.narrow = RowParallelLinear(256, 64, activation="gelu", sequence_dim=1, tp=tp)

    def forward(self, x):  # (batch, seq / t, 16)
        x = self.stem(x)
        hidden = self.wide(self.norm(x))  # gathers the sequence: (batch, seq, 256 / t)
        return self.head(x + self.narrow(hidden))  # adds up, and scatters the sequence again: (batch, seq / t, 1)


def train(tp=None, steps=60):
    """Return the loss of the last step, summed over all ranks' tokens."""
    torch.manual_seed(0)
    tp = TensorParallel(tp, sequence_parallel=True)
    model = Model(tp)
    init_weights(model, seed=0)  # the sharded weights, too, are the same on any number of ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(8, 64, 16)
    y = (x[..., :1] * x[..., 1:2]).sin()
    own_x, own_y = (each.chunk(tp.size, dim=1)[tp.rank] for each in (x, y))
    for _ in range(steps):
        loss = (model(own_x) - own_y).square().sum() / y.numel()
        loss.backward()
        # the copies have seen different tokens: only the sum of their gradients is the whole gradient
        reduce_partial_gradients(model, partial=["stem.*", "norm.*", "head.*"])
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    if tp.size > 1:
        dist.all_reduce(loss, group=tp.group)
    return loss.item()


def main():
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    loss, alone = train(mesh["tp"]), train()
    assert abs(loss - alone) < 1e-3 * alone, (loss, alone)
    if dist.get_rank() == 0:
        print(f"{mesh['tp'].size()} ranks: loss {loss:.6f}; one process: {alone:.6f}")
    return loss


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
