"""A model that exists becomes tensor-parallel in one line: one in plain PyTorch, and a Llama of transformers.

    torchrun --nproc-per-node 2 examples/parallelize.py

The plan is printed. Both train on all ranks and, as copies, in one process, and the losses must be the same. Without
transformers (pip install transformers) there is only the first.
"""

import copy
import importlib.util

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tpformer
from tpformer.distributed import build_mesh, initialize


class Somebody(nn.Module):
    """Somebody's model: it knows nothing of tensor parallelism, and its linears are torch's."""

    def __init__(self, width=64, n_heads=8):
        super().__init__()
        self.n_heads, self.norm = n_heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.classes = nn.Linear(width, 10)

    def forward(self, x):  # (batch, seq, width) -> (batch, 10)
        h = self.norm(x)
        linears = self.query, self.key, self.value
        heads = [linear(h).unflatten(2, (self.n_heads, -1)).transpose(1, 2) for linear in linears]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return self.classes((x + self.narrow(F.gelu(self.wide(x)))).mean(1))


def train(model, loss_fn, steps=4):
    """The loss of every step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        losses.append(loss_fn(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


def check(model, loss_fn, tp, example=None):
    alone = copy.deepcopy(model)
    if tp.get_local_rank() == 0:
        print(f"{type(model).__name__}: {tpformer.auto_plan(model, tp.size(), example=example)}")
    tpformer.parallelize(model, tp, example=example)  # the line
    losses, expected = train(model, loss_fn), train(alone, loss_fn)
    torch.testing.assert_close(losses, expected)
    assert list(model.state_dict()) == list(alone.state_dict())
    if tp.get_local_rank() == 0:
        print(f"{tp.size()} ranks: loss {losses[0]:.4f}, then {losses[-1]:.4f}, as in one process\n")


def main():
    initialize("cpu")
    tp = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    torch.manual_seed(0)  # the same weights and data on all ranks
    x, classes = torch.randn(16, 12, 64, dtype=torch.float64), torch.randint(10, (16,))
    check(Somebody().double(), lambda model: F.cross_entropy(model(x), classes), tp, example=(x,))
    if importlib.util.find_spec("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_hidden_layers=2, **sizes)).double()
        ids = torch.randint(300, (4, 24))
        check(llama, lambda model: model(input_ids=ids, labels=ids).loss, tp)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
