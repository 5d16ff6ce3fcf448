"""Accelerate's loop around a tensor-parallel model of transformers, saved as one process saves it.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import tpformer
from tpformer.distributed import build_mesh, initialize

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_accelerator(mesh):
    """An Accelerator that gives all tensor-parallel ranks the same batches."""
    if mesh.device_type == "cuda":
        return Accelerator(parallelism_config=ParallelismConfig(tp_size=mesh.size()))
    accelerator = Accelerator(cpu=True)
    accelerator.state.device_mesh = mesh  # on CPUs Accelerate takes no ParallelismConfig, but its loaders ask this mesh
    return accelerator


def main(folder):
    """Train on made-up text; everything is written to the folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    initialize(device)
    mesh = build_mesh(device, tensor_parallel=dist.get_world_size())["tp"]
    torch.manual_seed(0)  # the same weights on all ranks
    model = LlamaForCausalLM(TINY).to(device)
    tpformer.parallelize(model, mesh)
    ids = torch.randint(TINY.vocab_size, (32, 17), generator=torch.Generator().manual_seed(0)).cumsum(1) % 64
    accelerator = make_accelerator(mesh)
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer, loader = accelerator.prepare(optimizer, loader)  # the model is prepared already
    losses = []
    for _ in range(10):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.save_pretrained(folder, is_main_process=accelerator.is_main_process)  # called by all ranks, written by one
    if accelerator.is_main_process:
        loaded = LlamaForCausalLM.from_pretrained(folder)
        first = {key: value[:8] for key, value in {"input_ids": ids, "labels": ids}.items()}
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; loaded in one process: {loaded(**first).loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
