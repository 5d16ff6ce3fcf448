"""Fine-tune an imported model with LoRA (arXiv:2106.09685), merge the adapters into its weights, and export the result.

python examples/lora.py [DIR TEXT]   a directory of transformers, and a text; or a tiny Llama, made here
"""

import sys
import tempfile
from pathlib import Path

import torch
from continue_llama import tiny_llama
from torch import nn

from tpformer.models import GPT
from tpformer.training.checkpoint_files import step_path, write_checkpoint
from tpformer.training.data import load_tokenizer
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.source import open_source


class LoRA(nn.Module):
    """base(x) + scale * b(a(x)). b begins as zero, so the first output is the base's."""

    def __init__(self, base, rank=8, scale=2.0):
        super().__init__()
        self.base, self.scale, self.a = base, scale, nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))

    def merged(self):
        """The base, whose weight has taken in the adapter."""
        self.base.weight.data += self.scale * self.b.weight @ self.a.weight
        return self.base


def replace(model, change):
    """Replace the query and value projection of each layer by what `change` makes of it."""
    for layer in model.layers.values():
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, change(getattr(layer.self_attn, name)))


def main(work, directory=None, text=__file__):
    """Everything is written to the folder `work`."""
    if directory is None:
        directory = work / "llama"
        tiny_llama(directory)
    import_weights(Path(directory), work / "run")
    source = open_source(work / "run")
    source.load([model := GPT(source.architecture)])
    tokens = load_tokenizer(source.tokenizer).encode(Path(text).read_text())
    ids = torch.from_numpy(tokens[: 4 * 65]).view(4, 65)
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_parameters()}
    replace(model, LoRA)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(20):
        loss = model(ids[:, :-1], targets=ids[:, 1:], reduction="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    frozen = {name.replace(".base.", "."): x for name, x in model.named_parameters() if not x.requires_grad}
    torch.testing.assert_close(frozen, before, rtol=0, atol=0)  # only the adapters were trained
    with torch.no_grad():
        adapted = model(ids[:, :-1])
        replace(model, LoRA.merged)
        torch.testing.assert_close(model(ids[:, :-1]), adapted)
    write_checkpoint(step_path(work / "run" / "checkpoints", 1), model.state_dict(), 1)
    export(work / "run", work / "exported", file_format="hf")
    print(f"loss {loss.item():.3f} after 20 steps, merged and exported")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), *sys.argv[1:])
