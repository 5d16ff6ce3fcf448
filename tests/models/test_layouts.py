"""Any tensor-parallel layout trains as one process does: losses, norms, gradients and parameters in float64."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.schedules import learning_rate
from tpformer.training.step import train_step

LR, STEPS, BATCH, SEQ = 1e-3, 4, 4, 12
# 2, 3 and 4 ranks divide the 2 * 12 = 24 tokens of a microbatch
GELU = {"vocab_size": 250, "seq_length": SEQ, "n_layers": 2, "hidden_size": 48, "n_heads": 4}
LLAMA = {
    **GELU,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_hidden_size": 72,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
}
# all that Llama 3.1, Qwen and Mistral add, in one model
NEWER = {
    **LLAMA,
    "head_dim": 8,
    "qk_norm": True,
    "qkv_bias": True,
    "sliding_window": 5,
    "rope_base": 100.0,
    "rope_scaling_factor": 8.0,
    "rope_original_length": 16,
}
# name -> (config, tensor_parallel, sequence_parallel); other options of GPT: OPTIONS
LAYOUTS = {
    "tp2": (GELU, 2, True),
    "tp2-no-sp": (GELU, 2, False),
    "tp4": (GELU, 4, True),
    "tp4-no-sp": (GELU, 4, False),
    "tp2-untied": ({**GELU, "tie_embeddings": False}, 2, True),
    "tp4-untied-dropout": ({**GELU, "tie_embeddings": False, "dropout": 0.1}, 4, True),
    "tp2-dropout": ({**GELU, "dropout": 0.1}, 2, True),
    "tp2-dropout-no-sp": ({**GELU, "dropout": 0.1}, 2, False),
    "tp2-llama": (LLAMA, 2, True),
    "tp4-llama-2-kv-heads": (LLAMA, 4, True),
    "tp4-llama-2-kv-heads-no-sp": (LLAMA, 4, False),
    "tp4-llama-bias-dropout": ({**LLAMA, "bias": True, "dropout": 0.1}, 4, True),
    "tp3-6-heads": ({**GELU, "n_heads": 6}, 3, True),
    "tp3-6-heads-4-kv": ({**LLAMA, "hidden_size": 48, "n_heads": 12, "n_kv_heads": 4}, 3, True),
    "tp2-newer": (NEWER, 2, True),
    "tp2-newer-recomputed": (NEWER, 2, False),
    "tp4-newer-2-kv-heads": (NEWER, 4, True),
    "tp3-newer-12-heads-4-kv-no-sp": ({**NEWER, "n_heads": 12, "n_kv_heads": 4}, 3, False),
    "tp2-vocab-50257": ({**GELU, "n_layers": 1, "hidden_size": 16, "vocab_size": 50257}, 2, True),
    "tp3-uneven-vocab": ({**GELU, "n_heads": 6, "vocab_size": 300, "vocab_multiple": 100, "position": "rope"}, 3, True),
    "tp2-dropout-mlp-recomputed": ({**GELU, "dropout": 0.1}, 2, True),
    "tp4-llama-one-layer-recomputed-dropout": ({**LLAMA, "dropout": 0.1}, 4, True),
}
OPTIONS = {
    "tp2-newer-recomputed": {"recompute": "full", "recompute_interval": 2},
    "tp2-dropout-mlp-recomputed": {"recompute": "mlp"},
    "tp4-llama-one-layer-recomputed-dropout": {"recompute": "full", "recompute_layers": "1"},
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor).detach().clone()


def run_training(config: dict, tp: int, sequence_parallel: bool, options: dict | None = None) -> dict:
    """Train on random tokens. Return each step's loss and norm, the gradients of the first and the last step, and the
    parameters."""
    mesh = build_mesh("cpu", tensor_parallel=tp) if tp > 1 else None
    place = TensorParallel(None if mesh is None else mesh["tp"], sequence_parallel)
    model = GPT(GPTConfig(**config), seed=7, dtype=torch.float64, tp=place, **(options or {}))
    whole = ModelParts([model], mesh=mesh, microbatch_size=BATCH // 2, dtype=torch.float64)
    optimization = OptimizerSection(lr=LR, warmup_steps=2)
    optimizer = build_optimizer(model, optimization)
    generator = torch.Generator().manual_seed(0)
    record: dict = {"loss": [], "norm": [], "gradients": {}}
    for step in range(1, STEPS + 1):
        batch = torch.randint(config["vocab_size"], (BATCH, SEQ + 1), generator=generator)
        first = step * BATCH
        if step in (1, STEPS):
            whole.gradients(batch, first_sample=first, step=step)
            record["gradients"] |= {f"{step} {name}": full(p.grad) for name, p in model.named_parameters()}
            record["partial"] = {
                name: p.grad.to_local().clone()
                for name, p in model.named_parameters()
                if isinstance(p.grad, DTensor) and p.grad.placements[0].is_replicate()
            }
            optimizer.zero_grad()
        lr = learning_rate(step, STEPS, optimization)
        result = train_step(whole, [optimizer], batch, first_sample=first, step=step, lr=lr, clip_norm=1.0)
        record["loss"].append(float(result.loss))
        record["norm"].append(float(result.norm))
    record["parameters"] = {name: full(p) for name, p in model.named_parameters()}
    return record


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest |difference| / max(|expected|, LR) of any element, and the name of its tensor."""
    assert actual.keys() == expected.keys()
    return max((float(((actual[name] - p).abs() / p.abs().clamp(min=LR)).max()), name) for name, p in expected.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_float64_equals_one_process(ranks, name):
    config, tp, sequence_parallel = LAYOUTS[name]
    expected = run_training(config, 1, True)
    records = ranks(tp).run(run_training, config, tp, sequence_parallel, OPTIONS.get(name))
    for record in records:
        torch.testing.assert_close(record["loss"], expected["loss"], rtol=1e-9, atol=0)
        torch.testing.assert_close(record["norm"], expected["norm"], rtol=1e-9, atol=0)
        assert worst(record["gradients"], expected["gradients"]) < (1e-9, "")
        assert worst(record["parameters"], expected["parameters"]) < (1e-9, "")
        # gradients of parameters that all ranks share are equal on them, bit for bit
        assert record["partial"].keys() == records[0]["partial"].keys() and record["partial"]
        for key, value in record["partial"].items():
            assert torch.equal(value, records[0]["partial"][key]), key
