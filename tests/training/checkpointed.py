"""Small models in many layouts, for the tests of checkpoints and exports.

Belongs here: building, updating and comparing them. The only assertion is that copies are equal.
"""

import torch

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import Layout, apply_zero, local_part, split_stages
from tpformer.training.optimizer import LocalAdamW

CONFIG = GPTConfig(vocab_size=100, seq_length=12, n_layers=4, hidden_size=24, n_heads=4, n_kv_heads=2)


def build(layout: Layout, seed: int, config: GPTConfig = CONFIG):
    """Build this rank's parts of a model in a layout, and an AdamW for each. (DTensors of torch's take seconds.)"""
    mesh = build_mesh(
        "cpu",
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel_replicate=layout.data_parallel_replicate,
        data_parallel_shard=layout.data_parallel_shard,
        tensor_parallel=layout.tensor_parallel,
    )
    ranges = split_stages(config.layer_costs("parameters"), layout.n_stages)
    parts = []
    for stage in layout.stages_of(mesh["pp"].get_local_rank()):
        part = GPT(config, tp=mesh["tp"], part=ranges[stage], seed=seed, device="meta")
        if layout.data_parallel > 1 or layout.cpu_offload:
            apply_zero(part, part.layers.values(), mesh, layout, torch.float32)
        part.to_empty(device="cpu")
        part.init_weights()
        parts.append(part)
    return parts, [LocalAdamW(part.parameters(), lr=0.01, fused=True) for part in parts]


def update(parts, optimizers):
    """Step the optimizers with gradients that are a function of the values, so that copies of a parameter stay
    equal."""
    for part, optimizer in zip(parts, optimizers, strict=True):
        for parameter in part.parameters():
            parameter.grad = parameter.detach().clone()
            local_part(parameter.grad).mul_(0.5).add_(0.1)
        optimizer.step()
        optimizer.zero_grad()


def spoil(parts):
    """Fill parameters and buffers with NaN."""
    for tensor in (each for part in parts for each in part.state_dict().values()):
        local_part(tensor).fill_(float("nan"))


def whole(tensor):
    return full_tensor(tensor).clone()


def everything(parts, optimizers):
    """Every whole parameter, buffer and optimizer state of the parts by name; copies of a name must be equal."""
    found: dict[str, torch.Tensor] = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, tensor in part.state_dict(keep_vars=True).items():
            state = {f"{name} {key}": whole(value) for key, value in optimizer.state.get(tensor, {}).items()}
            for key, value in ({name: whole(tensor.detach())} | state).items():
                assert torch.equal(found.setdefault(key, value), value), key
    return found


def merged(results):
    """All ranks' tensors by name; what several ranks have must be equal."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


PLAIN = Layout()
LAYOUTS = {
    "tp2-pp2": Layout(tensor_parallel=2, pipeline_parallel=2),
    "tp2-zero3": Layout(tensor_parallel=2, data_parallel_shard=2, zero_stage=3),
    "v-schedule": Layout(pipeline_parallel=2, pipeline_schedule="ZBVZeroBubble", data_parallel_shard=2),
    "offload": Layout(data_parallel_shard=2, zero_stage=3, cpu_offload=True),
    "tp4": Layout(tensor_parallel=4),
}
