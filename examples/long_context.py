"""A transformer block of this library in a plain model, with the tokens of every sample shared by all ranks.

    python examples/long_context.py
    torchrun --nproc-per-node 2 examples/long_context.py

Each rank has its own tokens of every sample; attention alone gathers the others' keys and values. It learns to name the
last digit that followed the present one, on all ranks and again in one process, and the two must agree.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tpformer.distributed import build_mesh, initialize
from tpformer.layers import Positions, TensorParallel, init_weights, transformer_block

BATCH, SEQ, DIGITS, HIDDEN = 4, 256, 16, 64


class Model(nn.Module):
    """An embedding and a head of torch.nn, and two blocks on the context-parallel ranks."""

    def __init__(self, tp=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(DIGITS, HIDDEN), nn.Linear(HIDDEN, DIGITS)
        self.blocks = nn.ModuleList(transformer_block(HIDDEN, n_heads=4, rope_base=1e4, tp=tp) for _ in range(2))

    def forward(self, digits, positions):  # (batch, seq / n) on n ranks
        x = self.embedding(digits)
        for block in self.blocks:
            x = block(x, positions=positions)
        return self.head(x)


def train(mesh=None, steps=40):
    """Return the loss of the last step, of all ranks' tokens."""
    torch.manual_seed(0)
    tp = TensorParallel(context=mesh)
    model = Model(tp)
    init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    digits = torch.randint(DIGITS, (BATCH, SEQ + 1))
    digits[:, SEQ // 2 :] = digits[:, : SEQ // 2 + 1]  # the second half repeats the first
    inputs, targets = digits[:, :-1], digits[:, 1:]  # shifted before tokens are shared out
    positions = Positions(BATCH, SEQ).shared(tp.shares_tokens)
    own = positions.own_tokens()
    for _ in range(steps):
        logits = model(inputs[:, own], positions)
        # a sum over own tokens, divided by the number of all: summed over ranks it is the mean
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, own].flatten(), reduction="sum") / targets.numel()
        loss.backward()
        for parameter in model.parameters() if mesh is not None else ():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss, group=mesh.get_group())
    return loss.item()


def main():
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=1, context_parallel=dist.get_world_size())["cp"]
    loss, alone = train(mesh), train()
    assert abs(loss - alone) < 1e-3 * alone, (loss, alone)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks: loss {loss:.6f}; one process: {alone:.6f}")
    return loss


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
