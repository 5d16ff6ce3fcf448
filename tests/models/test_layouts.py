"""Any tensor-parallel layout trains as one process does: losses, norms, gradients and parameters in float64."""

import pytest
import torch
from testing import assert_identical, assert_same
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

STEPS, BATCH, SEQ = 2, 4, 12
# 2, 3 and 4 ranks divide the 2 * 12 = 24 tokens of a microbatch
GELU = {"vocab_size": 250, "seq_length": SEQ, "n_layers": 2, "hidden_size": 48, "n_heads": 4}
LLAMA = {
    **{**GELU, "n_kv_heads": 2, "ffn_hidden_size": 72, "norm": "rmsnorm", "activation": "swiglu"},
    **{"position": "rope", "bias": False},
}
# all that Llama 3.1, Qwen and Mistral add, in one model
NEWER = {
    **{**LLAMA, "head_dim": 8, "qk_norm": True, "qkv_bias": True, "sliding_window": 5},
    **{"rope_base": 100.0, "rope_scaling_factor": 8.0, "rope_original_length": 16},
}
UNTIED, DROPOUT = {"tie_embeddings": False}, {"dropout": 0.1}
# name -> (config, tensor_parallel, sequence_parallel, further options of GPT); any two choices meet in one
LAYOUTS: dict[str, tuple[dict, int, bool, dict]] = {
    "tp2-dropout-mlp-recomputed": ({**GELU, **DROPOUT}, 2, True, {"recompute": "mlp"}),
    "tp2-untied-dropout-no-sp": ({**GELU, **UNTIED, **DROPOUT}, 2, False, {}),
    "tp4-untied-dropout": ({**GELU, **UNTIED, **DROPOUT}, 4, True, {}),
    "tp4-llama-2-kv-heads-no-sp": (LLAMA, 4, False, {}),
    "tp4-llama-bias-one-layer-recomputed-dropout": (
        {**LLAMA, **DROPOUT, "bias": True}, 4, True, {"recompute": "full", "recompute_layers": "1"}
    ),
    "tp2-newer-no-sp-recomputed": (NEWER, 2, False, {"recompute": "full", "recompute_interval": 2}),
    "tp4-newer-2-kv-heads": (NEWER, 4, True, {}),
    "tp3-newer-12-heads-4-kv": ({**NEWER, "n_heads": 12, "n_kv_heads": 4}, 3, True, {}),
    "tp2-vocab-50257": ({**GELU, "n_layers": 1, "hidden_size": 16, "vocab_size": 50257}, 2, True, {}),
    "tp3-uneven-vocab": (
        {**GELU, "n_heads": 6, "vocab_size": 300, "vocab_multiple": 100, "position": "rope"}, 3, True, {}
    ),
}  # fmt: skip


def full(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor).detach().clone()


def run_training(config: dict, tp: int, sequence_parallel: bool, options: dict) -> dict:
    """Train on random tokens. Return each step's loss and norm, the gradients of the last step, and the parameters."""
    mesh = build_mesh("cpu", tensor_parallel=tp) if tp > 1 else None
    place = TensorParallel(None if mesh is None else mesh["tp"], sequence_parallel)
    model = GPT(GPTConfig(**config), seed=7, dtype=torch.float64, tp=place, **options)
    whole = ModelParts([model], mesh=mesh, microbatch_size=BATCH // 2, dtype=torch.float64)
    optimization = OptimizerSection(lr=1e-3, warmup_steps=2)
    optimizer = build_optimizer(model, optimization)
    generator = torch.Generator().manual_seed(0)
    record: dict = {"loss": [], "norm": []}
    for step in range(1, STEPS + 1):
        batch = torch.randint(config["vocab_size"], (BATCH, SEQ + 1), generator=generator)
        first = step * BATCH
        if step == STEPS:
            whole.gradients(batch, first_sample=first, step=step)
            record["gradients"] = {name: full(p.grad) for name, p in model.named_parameters()}
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_float64_equals_one_process(ranks, name):
    config, tp, sequence_parallel, options = LAYOUTS[name]
    expected = run_training(config, 1, True, {})
    records = ranks(tp).run(run_training, config, tp, sequence_parallel, options)
    for record in records:
        for key in ("loss", "norm", "gradients", "parameters"):
            assert_same(record[key], expected[key], key)
        assert record["partial"]
        assert_identical(record["partial"], records[0]["partial"], "gradients of parameters that all ranks share")
