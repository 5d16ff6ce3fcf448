"""Which models, layouts and devices can train in FP8, and the sentence for those that cannot.

Belongs here: rules of `train.precision` and of layers in FP8. A layer that does not fit is refused, never left in 16
bits: another layout of the model would quantise it, and train to other losses.
"""

from collections.abc import Mapping

from .architecture import GPTConfig
from .layout import Layout

CAPABILITIES = (9, 0), (12, 0)  # of GPUs with GEMMs of blocks: from the first to below the second
PRECISIONS = ("16", "fp8")
FP8 = "fp8"
BLOCK = 128  # numbers along features that share a scale (kernels/quantize/format.py)


def check_fp8_sizes(sizes: Mapping[str, tuple[int, int]]) -> None:
    """ValueError for the first size whose share of one rank is not whole blocks. sizes: (features, ranks), by name."""
    for name, (size, ranks) in sizes.items():
        if size % (ranks * BLOCK):
            shared = f" / {ranks} tensor-parallel ranks = {size / ranks:g}" if ranks > 1 else ""
            fitting = [t for t in range(1, ranks) if size % (t * BLOCK) == 0]
            fewer = f", or tensor_parallel from {fitting}" if fitting else ""
            raise ValueError(
                f"FP8 with {name}={size}{shared}: {BLOCK} features share a scale, so a rank's must be a multiple of "
                f"{BLOCK}; choose a multiple of {ranks * BLOCK}{fewer}, or leave FP8 out"
            )


def check_fp8_run(device: str, dtype: str, capability: tuple[int, int] | None = None) -> None:
    """ValueError for a device or a dtype of activations that no linear in FP8 has.

    capability: of the GPU, where it is known.
    """
    if capability is not None and not CAPABILITIES[0] <= capability < CAPABILITIES[1]:
        raise ValueError(
            f"FP8 on a GPU of sm_{capability[0]}{capability[1]}: its GEMMs are written for sm_90 and sm_100, such as "
            f"H100 and B200; leave FP8 out"
        )
    if device == "cuda" and dtype != "bfloat16":
        raise ValueError(
            f"FP8 with {dtype} on a GPU: its GEMMs give bfloat16 there; use bfloat16, or leave FP8 out, or set "
            f'train.device = "cpu"'
        )
    if dtype == "float16":
        raise ValueError(
            "FP8 with float16: a block's scale may be beyond its range; use bfloat16, float32 or float64, or leave FP8 "
            "out"
        )


def check_precision(model: GPTConfig, layout: Layout, device: str | None, dtype: str | None) -> None:
    """ValueError for a run in FP8 that cannot be. device, dtype: None where the configuration names none yet."""
    check_fp8_run(device or "cpu", dtype or ("bfloat16" if device == "cuda" else "float32"))
    tp = layout.tensor_parallel
    sizes = {"model.hidden_size": (model.hidden_size, 1), "model.n_heads * head_dim": (model.query_size, tp)}
    if model.kv_heads % tp:  # ranks share key-value heads, each of which is whole blocks
        sizes["model.head_dim"] = model.head_size, 1
    else:
        sizes["model.n_kv_heads * head_dim"] = model.kv_size, tp
    if model.n_expert_layers:
        sizes["model.expert_ffn_size"] = model.expert_size, 1  # experts are whole on their ranks
        sizes["model.shared_expert_size"] = model.shared_expert_size, tp
    if model.n_expert_layers < model.n_layers:
        sizes["model.ffn_hidden_size"] = model.ffn_size, tp
    check_fp8_sizes(sizes)
