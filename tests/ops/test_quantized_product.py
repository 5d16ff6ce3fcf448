"""Who multiplies blocks: torch where cuBLASLt does, and it gets them as it takes them; else our kernel or reference."""

from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from testing import assert_identical, assert_kernel_close, assert_same
from torch import Tensor

from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, HIGHEST, LOWEST, VALUES
from tpformer.kernels.quantize.reference import (
    dequantize,
    dequantize_weight,
    powers,
    quantize_rows,
    quantize_weight,
)
from tpformer.kernels.quantized_matmul import reference
from tpformer.ops.quantized_product import float_scales, library_product, quantized_product, served_by_library


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, recipe_a, scale_b: Tensor, recipe_b, *, bias, output_dtype):
    """torch's product of blocks of 1 x 128 and 128 x 128, with what it demands of its operands on a GPU."""
    (m, k), n = a.shape, b.shape[1]
    padded = -(-k // BLOCK // 4) * 4
    assert (a.dtype, b.dtype, scale_a.dtype, scale_b.dtype) == (VALUES, VALUES, torch.float32, torch.float32)
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert a.stride() == (k, 1) and b.stride() == (1, k), "rows by columns"
    assert scale_a.shape == (m, k // BLOCK) and scale_a.stride() == (1, m)
    assert scale_b.shape == (padded, n // BLOCK) and scale_b.stride() == (1, padded)
    left = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)
    scale_b = scale_b[: k // BLOCK].double()
    right = b.double() * scale_b.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (left @ right + (0 if bias is None else bias.double())).to(output_dtype)


@pytest.mark.parametrize("blocks", [1, 3, 4, 5])
def test_torch_gets_blocks_as_it_takes_them(blocks: int) -> None:
    torch.manual_seed(blocks)
    scales = torch.exp2(torch.arange(blocks) * 3.0).repeat_interleave(BLOCK)
    x, w = torch.randn(8, blocks * BLOCK).double() * scales, torch.randn(2 * BLOCK, blocks * BLOCK).double() / scales
    a, b, bias = quantize_rows(x), quantize_weight(w), torch.randn(2 * BLOCK).double()
    for added in (None, bias):
        with mock.patch.object(F, "scaled_mm", scaled_mm):
            found = library_product(a, b, added, torch.float64)
        assert_same(found, reference.quantized_matmul(a, b, added, dtype=torch.float64))


def test_scales_of_the_library_are_the_powers() -> None:
    """Of every exponent. A block that is not a number has values that are none: its product is NaN with any scale."""
    exponents = torch.arange(LOWEST, HIGHEST + 1).to(EXPONENTS)
    assert_identical(float_scales(exponents), powers(exponents, torch.float32))
    x = torch.ones(4, 2 * BLOCK)
    x[1, 3] = torch.inf
    a, b = quantize_rows(x), quantize_weight(torch.ones(BLOCK, 2 * BLOCK))
    with mock.patch.object(F, "scaled_mm", scaled_mm):
        found = library_product(a, b, None, torch.float64)
    assert found.isnan().all(1).tolist() == [False, True, False, False] and found[0, 0] == 2 * BLOCK


def test_who_multiplies() -> None:
    """cuBLASLt knows blocks on sm_90 alone, and groups of four rows."""
    x = quantize_rows(torch.ones(8, BLOCK))
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda:0")
    for capability, rows, dtype, serves in [
        ((9, 0), 8, torch.bfloat16, True),
        ((9, 0), 7, torch.bfloat16, False),
        ((10, 0), 8, torch.bfloat16, False),
        ((8, 9), 8, torch.bfloat16, False),
        ((9, 0), 8, torch.float32, False),
    ]:
        given = SimpleNamespace(**{**vars(like), "dtype": dtype})
        with mock.patch.object(torch.cuda, "get_device_capability", lambda device, found=capability: found):
            assert served_by_library(x._replace(values=x.values[:rows]), given) == serves, (capability, rows, dtype)
    assert not served_by_library(x, torch.ones(1, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_torch_and_kernel_agree_on_a_gpu() -> None:
    """Both sum the same exact products, of which tensor cores keep about 14 bits: more than bfloat16 has."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 512), torch.randn(256, 512)
    a, b = (type(each)(*(part.cuda() for part in each)) for each in (quantize_rows(x), quantize_weight(w)))
    like = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    left, right = dequantize(quantize_rows(x), torch.bfloat16), dequantize_weight(quantize_weight(w), torch.bfloat16)
    oracle, plain = left.double() @ right.double().t(), left @ right.t()
    assert_kernel_close(quantized_product(a, b, None, like).cpu(), oracle, plain, "by torch")
    found = import_module("tpformer.kernels.quantized_matmul.kernel").quantized_matmul(a, b, dtype=torch.bfloat16)
    assert_kernel_close(found.cpu(), oracle, plain, "by our kernel")
