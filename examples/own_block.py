"""A transformer block of your own, made of this library's layers, with an attention that the library does not have.

    python examples/own_block.py
    torchrun --nproc-per-node 2 examples/own_block.py

Its output and every gradient are compared with those of one process, in float64. All of it runs on sequence shards.
"""

import torch
import torch.distributed as dist
from einops import rearrange
from torch import nn

from tpformer import layers
from tpformer.distributed import build_mesh, initialize
from tpformer.parallel import reduce_partial_gradients


class SinkAttention(layers.ParallelModule):
    """Causal attention whose heads may look away: each has a learned logit, its sink, that joins the softmax."""

    def __init__(self, hidden, n_heads, tp=None):
        super().__init__(tp)
        self.head_dim = hidden // n_heads
        # q, k and v of one head are neighbours among the features, so a rank's slice of them is whole heads
        self.qkv = layers.ColumnParallelLinear(hidden, 3 * hidden, sequence_dim=1, tp=tp)
        self.out = layers.RowParallelLinear(hidden, hidden, sequence_dim=1, tp=tp)
        self.add_parameter("sinks", (n_heads,), layers.Constant(0.5), shard=0)  # laid out like the heads
        self.reset_parameters()

    def forward(self, x):  # (batch, seq / t, hidden), and so is the result; in between all tokens and n_heads / t heads
        q, k, v = rearrange(self.qkv(x), "b s (h three d) -> three b h s d", three=3, d=self.head_dim)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * self.head_dim**-0.5).masked_fill(later, -torch.inf)
        sinks = self.local("sinks")[:, None, None].expand(*scores.shape[:-1], 1)  # those of this rank's heads
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return self.out(rearrange(weights @ v, "b h s d -> b s (h d)"))


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): both branches read the same norm, as in GPT-J."""

    def __init__(self, hidden, n_heads, tp=None):
        super().__init__()
        self.norm = layers.RMSNorm(hidden, tp=tp)
        self.attention = SinkAttention(hidden, n_heads, tp=tp)
        self.mlp = layers.MLP(hidden, activation="swiglu", bias=False, tp=tp)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.attention(normed) + self.mlp(normed)


def main():
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    tp = layers.TensorParallel(mesh["tp"], sequence_parallel=True)
    torch.manual_seed(0)
    x, direction = torch.randn(2, 2, 24, 64, dtype=torch.float64)
    own, whole = Block(64, 8, tp).double(), Block(64, 8).double()
    for block in (own, whole):
        layers.init_weights(block, seed=0)  # the same weights on any number of ranks
    own_x, own_direction = (each.chunk(tp.size, dim=1)[tp.rank] for each in (x, direction))
    y, expected = own(own_x), whole(x)
    (y * own_direction).sum().backward()
    (expected * direction).sum().backward()
    reduce_partial_gradients(own)  # those of the norm and of out's bias, which every rank has whole
    torch.testing.assert_close(y, expected.chunk(tp.size, dim=1)[tp.rank])
    for (name, parameter), reference in zip(own.named_parameters(), whole.parameters(), strict=True):
        found = parameter.grad.full_tensor()
        assert torch.allclose(found, reference.grad, rtol=1e-9, atol=1e-12), name
    if dist.get_rank() == 0:
        print(f"{tp.size} ranks: output and {len(list(own.parameters()))} gradients are those of one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
