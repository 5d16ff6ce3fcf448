"""transformers' Trainer on a tensor-parallel model, with gradient clipping and checkpoints.

torchrun --nproc-per-node 2 examples/trainer.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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


def made_up():
    """Sequences that count up by 3."""
    start = torch.randint(TINY.vocab_size, (64, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (start + 3 * torch.arange(16)) % TINY.vocab_size]


def main(folder):
    """Train, and save to the folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    initialize(device)
    mesh = build_mesh(device, tensor_parallel=dist.get_world_size())["tp"]
    torch.manual_seed(0)  # the same weights on all ranks
    model = tpformer.parallelize(LlamaForCausalLM(TINY).to(device), mesh)
    if device == "cpu":
        # On GPUs Trainer sees that the model is tensor-parallel. Its Accelerate knows nothing like that on CPUs: each
        # rank has to look like the only process, which then draws the same batches as the others.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=device == "cpu",
        per_device_train_batch_size=8,
        num_train_epochs=4,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=8,
        save_only_model=True,  # Trainer does not save sharded optimizer states
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=made_up())
    trainer.train()
    trainer.save_model(f"{folder}/final")
    if dist.get_rank() == 0:
        ids = torch.stack([sample["input_ids"] for sample in made_up()])
        loss = LlamaForCausalLM.from_pretrained(f"{folder}/final")(input_ids=ids, labels=ids).loss.item()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; loaded in one process: {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:  # a folder for each rank; rank 0's is written to
        main(temporary)
