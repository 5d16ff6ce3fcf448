"""A bidirectional encoder that learns to fill in masked bytes of Python's own source, as BERT does with words.

    python examples/masked_encoder.py
    torchrun --nproc-per-node 2 examples/masked_encoder.py

It trains on all ranks, and again in one process. The two must agree in every step, and the loss must fall.
"""

import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tpformer import layers
from tpformer.distributed import build_mesh, initialize
from tpformer.parallel import reduce_partial_gradients

MASK, HIDDEN, BATCH, LENGTH, STEPS = 256, 64, 16, 64, 60  # bytes are 0 to 255, and MASK is one entry more


class Encoder(nn.Module):
    """Every byte sees all of its sample: what comes after it, too."""

    def __init__(self, tp=None):
        super().__init__()
        self.embed = layers.VocabParallelEmbedding(MASK + 1, HIDDEN, tp=tp)
        options = {"is_causal": False, "norm": "rmsnorm", "activation": "swiglu", "rope_base": 1e4, "tp": tp}
        self.blocks = nn.ModuleList(layers.transformer_block(HIDDEN, n_heads=4, **options) for _ in range(2))
        self.norm, self.head = layers.RMSNorm(HIDDEN, tp=tp), layers.LMHead(MASK + 1, HIDDEN, tp=tp)

    def forward(self, ids, targets):  # both (batch, seq), equal on all ranks; between them ranks have tokens / t rows
        x, positions = self.embed(ids), layers.Positions(*ids.shape)
        for block in self.blocks:
            x = block(x, positions=positions)
        return self.head(self.norm(x), targets=targets.flatten(), reduction="mean")


def masked(text, step):
    """(ids, targets) of one step: of 15 % of the bytes, 8 in 10 are masked, 1 is another byte and 1 is itself."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    ids = text[first + torch.arange(LENGTH)]
    chance = torch.rand(ids.shape, generator=generator) / 0.15
    targets = ids.masked_fill(chance > 1, -100)  # the loss ignores these
    other = torch.randint(256, ids.shape, generator=generator)
    return torch.where(chance < 0.8, MASK, torch.where(chance < 0.9, other, ids)), targets


def train(tp=None):
    """The loss of every step."""
    text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
    model = Encoder(layers.TensorParallel(tp, sequence_parallel=True))
    layers.init_weights(model, seed=0)  # the same weights on any number of ranks
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(STEPS):
        loss = model(*masked(text, step))
        loss.backward()
        reduce_partial_gradients(model)  # those of the norms, which every rank has whole and uses on its own rows
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def main():
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    losses, alone = train(mesh["tp"]), train()
    torch.testing.assert_close(losses, alone, rtol=1e-3, atol=0)
    assert losses[-10:].mean() < 0.75 * losses[0]
    if dist.get_rank() == 0:
        print(f"{mesh['tp'].size()} ranks: loss {losses[0]:.3f}, at last {losses[-1]:.3f}, as in one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
