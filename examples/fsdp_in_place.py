"""A model of one's own: tensor-parallel in place over 2 ranks, and FSDP2 over the others, checked against one process.

torchrun --nproc-per-node 2 examples/fsdp_in_place.py      2 tensor-parallel ranks
torchrun --nproc-per-node 4 examples/fsdp_in_place.py      the same on 2 halves of each batch, shared out by FSDP2
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tpformer
from tpformer.distributed import build_mesh, initialize

BATCH, WIDTH, STEPS = 8, 16, 3


class Block(nn.Module):
    """A gated MLP behind a norm, written without a thought of several ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def train(model, rows, clip):
    """Fit the model to a function of rows; returns the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for _ in range(STEPS):
        (model(rows) - rows.sin()).square().mean().backward()
        norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


if __name__ == "__main__":
    initialize("cpu")
    copies = dist.get_world_size() // 2
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=copies)
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(2))).double()
    rows = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    model = copy.deepcopy(alone)
    tpformer.parallelize(model, mesh["tp"], example=rows[:2])
    if copies > 1:
        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp_shard"])
    norms = train(
        model, rows.chunk(copies)[mesh["dp_shard"].get_local_rank()], lambda m: tpformer.clip_grad_norm_(m, 0.1)
    )
    expected = train(alone, rows, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)
    whole = tpformer.full_state_dict(model)  # on rank 0, as one process has it
    if dist.get_rank() == 0:
        torch.testing.assert_close(whole, dict(alone.state_dict()), rtol=1e-9, atol=1e-12)
        print(
            f"2 x {copies} ranks: {STEPS} clipped steps as in one process, norms {[round(norm, 4) for norm in norms]}"
        )
    dist.destroy_process_group()
