"""Weights of linears in FP8 as DeepSeek-V3's files have them: blocks of e4m3, and a tensor of scales beside each one.

Belongs here: which tensors of theirs are quantised, their names, shapes and values. How a matrix is quantised:
kernels/quantize. The layout is that of DeepSeek-V3 (arXiv:2412.19437), which transformers and vLLM read.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpformer.config.fp8 import BLOCK, check_fp8_sizes
from tpformer.kernels.quantize.format import VALUES
from tpformer.kernels.quantize.reference import powers, quantize_weight
from tpformer.weights.files import Spec
from tpformer.weights.tensors import Place, TensorMap

SCALES = "_scale_inv"  # after the name of a weight: float32 (N / 128, K / 128), by which its values are multiplied
LINEARS = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight")
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def quantised(tensors: TensorMap) -> dict[str, Place]:
    """{our name: its place} of the weights that a run in FP8 quantises.

    ValueError, with the numbers, for a family whose files have other matrices, for experts, and for sizes that are no
    multiple of 128.
    """
    if tensors.family is None:
        raise ValueError("weights in FP8 are of --format hf: an export of this library keeps the run's numbers")
    if tensors.config.n_experts is not None:
        raise ValueError("weights in FP8 of a model with experts are not written yet: leave --weights out")
    found = {name: places[0] for name, places in tensors.places.items() if LINEARS.fullmatch(name)}
    if not found or any(tensors.shapes[place.theirs] != place.shape for place in found.values()):
        raise ValueError(
            f"files of {tensors.family.model_type} have no matrices of single linears: leave --weights out"
        )
    for name, place in found.items():
        check_fp8_sizes(
            {f"{name}'s {dim}": (size, 1) for dim, size in zip(("rows", "columns"), place.shape, strict=True)}
        )
    return found


def block_specs(specs: Mapping[str, Spec], places: Mapping[str, Place]) -> dict[str, Spec]:
    """The specs, with these weights in e4m3, and each followed by its scales."""
    names, found = {place.theirs for place in places.values()}, {}
    for name, spec in specs.items():
        found[name] = spec._replace(dtype=VALUES) if name in names else spec
        if name in names:
            found[name + SCALES] = Spec((spec.shape[0] // BLOCK, spec.shape[1] // BLOCK), torch.float32)
    return found


def write_blocks(weight: Tensor, name: str, made: Mapping[str, Tensor]) -> None:
    """Write a weight (N, K) and its scales into those of the two tensors that `made` has, as theirs is called."""
    values, exponents = quantize_weight(weight)
    for tensor, part in ((name, values), (name + SCALES, powers(exponents, torch.float32))):
        if tensor in made:
            made[tensor].copy_(part)
