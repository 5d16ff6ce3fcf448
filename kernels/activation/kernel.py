"""MLP activations, plain and gated, as element-wise kernels: forward, and the backward that rebuilds the activation.

Belongs here: passes over flat arrays. The formulas of one element, which GEMM epilogues share, are in formulas.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import is_interpreted, launch_options
from ..pack.format import Packed
from ..pack.kernel import kept_source, read_block, unpacked
from ..quantize import kernel as quantize
from ..quantize.format import Blocks
from ..replay import launch, replayed
from .formulas import activate, differentiate
from .reference import check_operands

FORWARD_BYTES = 8192  # of each operand in a block, so that each thread of WARPS has two 16-byte vectors in flight
BACKWARD_BYTES = 4096  # one vector each; with two a thread took up to 213 registers, and fewer threads were resident
WARPS = 8


@triton.jit
def forward_value(x, gate, mask, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """One block of y in float32. Pointers are to the block's first element; mask is None if the block is whole."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=mask)
    if GATED:  # both loads are under way before one is used
        other = tl.load(gate + at, mask=mask)
        return value.to(tl.float32) * activate(other.to(tl.float32), KIND)
    else:
        return activate(value.to(tl.float32), KIND)


@triton.jit
def forward_block(x, gate, y, mask, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of y. Pointers and mask as in forward_value."""
    value = forward_value(x, gate, mask, KIND, GATED, BLOCK)
    tl.store(y + tl.arange(0, BLOCK), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def load_kept(source, first, size, mask, BLOCK: tl.constexpr):
    """A block from element `first` on, in float32, of an array or of what is packed in `source`. mask: of the `size`
    elements that there are."""
    if source.dtype.element_ty == tl.uint8:
        value = tl.reshape(read_block(source, first, 0, 0, 1, size, 1, BLOCK), (BLOCK,))
    else:
        value = tl.load(source + first + tl.arange(0, BLOCK), mask=mask).to(tl.float32)
    return value


@triton.jit
def backward_block(
    da, x, gate, first, size, dx, dgate, a, mask, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of dx, a (and dgate). dx may be da, because a thread reads its elements before it writes.

    first: of the block's `size` elements in x and gate. The other pointers are to the block's first element.
    """
    at = tl.arange(0, BLOCK)
    gradient = tl.load(da + at, mask=mask).to(tl.float32)
    source = load_kept(x, first, size, mask, BLOCK)
    if GATED:
        value, slope = differentiate(load_kept(gate, first, size, mask, BLOCK), KIND)
        tl.store(dgate + at, (gradient * source * slope).to(dgate.dtype.element_ty), mask=mask)
        tl.store(dx + at, (gradient * value).to(dx.dtype.element_ty), mask=mask)
        tl.store(a + at, (value * source).to(a.dtype.element_ty), mask=mask)
    else:
        value, slope = differentiate(source, KIND)
        tl.store(dx + at, (gradient * slope).to(dx.dtype.element_ty), mask=mask)
        tl.store(a + at, value.to(a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def activation_forward_kernel(x, gate, y, n, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """y[:n]. Whole blocks take no mask, so that their accesses are 16 bytes wide for any n."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first + BLOCK <= n:
        forward_block(x + first, gate + first, y + first, None, KIND, GATED, BLOCK)
    else:
        mask = tl.arange(0, BLOCK) < n - first
        forward_block(x + first, gate + first, y + first, mask, KIND, GATED, BLOCK)


@triton.jit
def store_in_blocks(values, exponents, stored, mask, m, width, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store this program's BLOCK elements of m rows of `width` blocks of e4m3, as they lie in memory. stored: as they
    would be stored as they are."""
    SCALED: tl.constexpr = quantize.BLOCK
    BLOCKS: tl.constexpr = BLOCK // SCALED
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = places < m.to(tl.int64) * width
    quantized, exponent = quantize.in_blocks(tl.reshape(stored.to(tl.float32), (1, BLOCKS, SCALED)), INTERPRETED)
    tl.store(values + first + tl.arange(0, BLOCK), tl.reshape(quantized, (BLOCK,)), mask=mask)
    target = exponents + places % width * m + places // width
    tl.store(target, tl.reshape(exponent, (BLOCKS,)).to(tl.int8), mask=inside)


@triton.jit
def store_twice(x, blocks, value, mask, m, width, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store this program's elements as they are, and in blocks beside."""
    values, exponents = blocks
    stored = value.to(x.dtype.element_ty)
    tl.store(x + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), stored, mask=mask)
    store_in_blocks(values, exponents, stored, mask, m, width, BLOCK, INTERPRETED)


@triton.jit(do_not_specialize=["m"])
def activation_blocks_kernel(
    x, gate, values, exponents, m, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y of m rows of `width` blocks of e4m3, BLOCK elements of which a program takes, as they lie in memory."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    mask = first + tl.arange(0, BLOCK) < m.to(tl.int64) * width * quantize.BLOCK
    value = forward_value(x + first, gate + first, mask, KIND, GATED, BLOCK)
    store_in_blocks(values, exponents, value.to(x.dtype.element_ty), mask, m, width, BLOCK, INTERPRETED)


@triton.jit(do_not_specialize=["n"])
def activation_backward_kernel(
    da, x, gate, dx, dgate, a, n, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """dx[:n], dgate[:n] and a[:n], block by block as in the forward."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    da, dx, dgate, a = da + first, dx + first, dgate + first, a + first
    if first + BLOCK <= n:
        backward_block(da, x, gate, first, BLOCK, dx, dgate, a, None, KIND, GATED, BLOCK)
    else:
        mask = tl.arange(0, BLOCK) < n - first
        backward_block(da, x, gate, first, n - first, dx, dgate, a, mask, KIND, GATED, BLOCK)


@triton.jit(do_not_specialize=["m"])
def activation_backward_blocks_kernel(
    da, x, gate, dx, dgate, of_dx, of_dgate, of_a, m, width, KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dx and dgate, of each its blocks beside it, and the blocks of a. Rows, and dx in place of da, as above."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    size = m.to(tl.int64) * width * quantize.BLOCK - first
    mask = tl.arange(0, BLOCK) < size
    gradient = tl.load(da + first + tl.arange(0, BLOCK), mask=mask).to(tl.float32)
    source = load_kept(x, first, size, mask, BLOCK)
    if GATED:
        value, slope = differentiate(load_kept(gate, first, size, mask, BLOCK), KIND)
        store_twice(dgate, of_dgate, gradient * source * slope, mask, m, width, BLOCK, INTERPRETED)
        store_twice(dx, of_dx, gradient * value, mask, m, width, BLOCK, INTERPRETED)
        value *= source
    else:
        value, slope = differentiate(source, KIND)
        store_twice(dx, of_dx, gradient * slope, mask, m, width, BLOCK, INTERPRETED)
    values, exponents = of_a
    store_in_blocks(values, exponents, value.to(dx.dtype.element_ty), mask, m, width, BLOCK, INTERPRETED)


@replayed
def activation_forward(x: Tensor, name: str | None, gate: Tensor | None = None, *, blocks: bool = False) -> Any:
    """act(x), or act(gate) * x when a gate is given; x itself for name None. blocks: the result in blocks of e4m3.

    Math:     activation_forward of reference.py
    Shapes:   x, gate and the result of one shape and dtype (bf16, fp16, fp32), any number of elements; inputs that are
              not contiguous are copied first. Blocks are made of (M, F), as by quantize_rows
    Numerics: float32 between load and store, also for act(gate) * x: one rounding. Blocks are those of the result as it
              would be stored, to the byte
    Traffic:  activation_cost; 16-byte accesses if the inputs' memory starts at multiples of 16 bytes, whatever the size
    Order:    each element by itself; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(x, name, gate)
    if name is None:
        return quantize.quantize_rows(x) if blocks else x
    x = x.contiguous()
    if blocks:
        return launch_blocks(x, name, gate)
    y = torch.empty_like(x)
    if x.numel():
        block = FORWARD_BYTES // x.element_size()
        launch(
            activation_forward_kernel, (triton.cdiv(x.numel(), block),),
            x, x if gate is None else gate.contiguous(), y, x.numel(),
            KIND=name, GATED=gate is not None, BLOCK=block, **launch_options(WARPS, 1),
        )  # fmt: skip
    return y


def launch_blocks(x: Tensor, name: str, gate: Tensor | None) -> Blocks:
    """act(x) or act(gate) * x of x (M, F) in blocks."""
    m, n = x.shape
    y = quantize.empty_result(x, m, n, True)
    if x.numel():
        block = FORWARD_BYTES // x.element_size()
        launch(
            activation_blocks_kernel, (triton.cdiv(x.numel(), block),),
            x, x if gate is None else gate.contiguous(), *y, m, n // quantize.BLOCK.value,
            KIND=name, GATED=gate is not None, BLOCK=block, INTERPRETED=is_interpreted(), **launch_options(WARPS, 1),
        )  # fmt: skip
    return y


@replayed
def activation_backward(
    da: Tensor, x: Tensor | Packed, name: str | None, gate: Tensor | Packed | None = None, *, blocks: bool = False
) -> Any:
    """Gradients (dx, dgate) of activation_forward and its result, rebuilt, from its inputs alone. blocks: the result in
    blocks of e4m3, and behind it (dx, dgate) in blocks, too; None of what is no activation's.

    Math:     activation_backward of reference.py
    Shapes:   da, x, gate and the results of one shape and dtype (bf16, fp16, fp32); x and gate may be packed, and are
              unpacked in registers. dx takes the place of a contiguous da; what is not contiguous is copied first
    Numerics: float32 between loads and stores, each result rounded once. Blocks as in activation_forward
    Traffic:  activation_cost with backward=True, in one pass; accesses as in activation_forward
    Order:    each element by itself; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(x, name, gate, da)
    if name is None:
        kept = unpacked(x)
        return (da, None, quantize.quantize_rows(kept), (None, None)) if blocks else (da, None, kept)
    da, x, gate = da.contiguous(), kept_source(x), None if gate is None else kept_source(gate)
    dgate = None if gate is None else torch.empty_like(da)
    if blocks:
        return launch_backward_blocks(da, x, name, gate, dgate)
    a = torch.empty_like(da)
    if da.numel():
        block = BACKWARD_BYTES // da.element_size()
        launch(
            activation_backward_kernel, (triton.cdiv(da.numel(), block),),
            da, x, x if gate is None else gate, da, da if dgate is None else dgate, a, da.numel(),
            KIND=name, GATED=gate is not None, BLOCK=block, **launch_options(WARPS, 1),
        )  # fmt: skip
    return da, dgate, a


def launch_backward_blocks(da: Tensor, x: Tensor, name: str, gate: Tensor | None, dgate: Tensor | None) -> Any:
    """activation_backward of (M, F) with blocks. x, gate: as kept_source gives them. dgate: to be written."""
    m, n = da.shape
    of_dx, of_a = (quantize.empty_result(da, m, n, True) for _ in range(2))
    of_dgate = None if gate is None else quantize.empty_result(da, m, n, True)
    if da.numel():
        block = BACKWARD_BYTES // da.element_size()
        launch(
            activation_backward_blocks_kernel, (triton.cdiv(da.numel(), block),),
            da, x, x if gate is None else gate, da, dgate, of_dx, of_dgate, of_a, m, n // quantize.BLOCK.value,
            KIND=name, GATED=gate is not None, BLOCK=block, INTERPRETED=is_interpreted(), **launch_options(WARPS, 1),
        )  # fmt: skip
    return da, dgate, of_a, (of_dx, of_dgate)
