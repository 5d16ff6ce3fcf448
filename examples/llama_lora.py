"""A Llama of transformers on several ranks, tuned with PEFT's LoRA; the saved adapter gives the same in one process.

torchrun --nproc-per-node 2 examples/llama_lora.py
"""

import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
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


def base():
    """The model that is tuned, equal on all ranks; a real one comes from LlamaForCausalLM.from_pretrained."""
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY)


def batch(step):
    """Sequences that count up by 3."""
    start = torch.randint(TINY.vocab_size, (8, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(16)) % TINY.vocab_size


def whole(model):
    """A copy of all values, on rank 0."""
    return {name: value.clone() for name, value in tpformer.full_state_dict(model).items()}


def main(folder):
    """Tune the model, and save the adapter to the folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    initialize(device)
    mesh = build_mesh(device, tensor_parallel=dist.get_world_size())["tp"]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    model = tpformer.parallelize(get_peft_model(base().to(device), config), mesh)
    before = whole(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for step in range(60):
        ids = batch(step).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        tpformer.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = whole(model)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert all("lora_" in name for name in changed), "only adapters were trained"
    model.save_pretrained(folder)  # called by all ranks, written by one
    tuned = model(input_ids=batch(0).to(device)).logits.detach().cpu()
    if dist.get_rank() == 0:
        loaded = PeftModel.from_pretrained(base(), folder)
        torch.testing.assert_close(loaded(input_ids=batch(0)).logits, tuned, rtol=1e-3, atol=1e-3)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(changed)} adapter tensors saved and loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:  # a folder for each rank; rank 0's is written to
        main(temporary)
