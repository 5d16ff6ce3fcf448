"""The gated activation of an expert, times each row's weight: one pass forward, one backward.

Letters: R rows, F columns of the gate, and as many of up, which stand behind it in a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation.formulas import activate, differentiate
from ..launch import launch_options
from ..replay import launch, replayed
from ..rows import load_tile, row_argument, row_options, row_tile, store_tile, tile_mask, with_contiguous_columns
from .reference import check_operands

FORWARD_COLUMNS, FORWARD_ELEMENTS = 2048, 16  # the widest tile, and its elements for each thread
BACKWARD_COLUMNS, BACKWARD_ELEMENTS = 1024, 8  # half as many, because registers also hold slopes and sums


@triton.jit(do_not_specialize=["m"])
def weighted_activation_forward_kernel(gate_up, weights, y, m, f, KIND: tl.constexpr, TILE: tl.constexpr):
    """One tile of y. Programs of one tile of rows are neighbours, so that they read from the same rows."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    blocks = tl.cdiv(f, COLUMNS)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = tile_mask(rows, columns, m, f)
    gate, up = load_tile(gate_up, rows, columns, mask), load_tile(gate_up, rows, f + columns, mask)
    weight = tl.load(weights + rows, mask=rows < m, other=0.0)
    store_tile(y, activate(gate, KIND) * up * weight[:, None], rows, columns, mask, f)


@triton.jit(do_not_specialize=["m"])
def weighted_activation_backward_kernel(
    da, gate_up, weights, dgate_up, a, dweights, m, f, KIND: tl.constexpr, TILE: tl.constexpr
):
    """All columns of one tile of rows. a may be da, because a thread reads its elements before it writes."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + rows, mask=rows < m, other=0.0)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, f, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, f)
        gradient = load_tile(da, rows, columns, mask)
        gate, up = load_tile(gate_up, rows, columns, mask), load_tile(gate_up, rows, f + columns, mask)
        value, slope = differentiate(gate, KIND)
        product = value * up
        total += gradient * product
        gradient *= weight
        store_tile(dgate_up, gradient * up * slope, rows, columns, mask, 2 * f)
        store_tile(dgate_up, gradient * value, rows, f + columns, mask, 2 * f)
        store_tile(a, product * weight, rows, columns, mask, f)
    tl.store(dweights + rows, tl.sum(total, 1), mask=rows < m)


@replayed
def weighted_activation_forward(gate_up: Tensor, name: str, weights: Tensor) -> Tensor:
    """w * act(gate) * up for the rows of gate_up, whose first half is the gate.

    Math:     weighted_activation_forward of reference.py
    Shapes:   gate_up (R, 2 F) bf16|fp16|fp32, any R and any F >= 1, rows may lie apart; weights (R,) float32; result
              (R, F) like gate_up
    Numerics: float32 between load and store: one rounding
    Traffic:  weighted_activation_cost; 16-byte accesses if F and the row stride are multiples of 16 elements and the
              memory is aligned
    Order:    each element by itself; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(gate_up, name, weights)
    gate_up = with_contiguous_columns(gate_up)
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(m, f)
    if m:
        tile = row_tile(f, FORWARD_COLUMNS, FORWARD_ELEMENTS)
        launch(
            weighted_activation_forward_kernel, (triton.cdiv(m, tile.rows) * triton.cdiv(f, tile.columns),),
            row_argument(gate_up), weights.contiguous(), y, m, f,
            KIND=name, TILE=tile, **launch_options(tile.warps, 1),
        )  # fmt: skip
    return y


@replayed
def weighted_activation_backward(
    da: Tensor, gate_up: Tensor, name: str, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up, w * act(gate) * up computed again, gradient of the weights).

    Math:     weighted_activation_backward of reference.py
    Shapes:   da (R, F) like gate_up; results (R, 2 F), (R, F), (R,) float32. The second one takes the place of a
              contiguous da; otherwise da is copied first
    Numerics: float32 between loads and stores, each result rounded once; the weights' gradient, a sum over F, is not
    Traffic:  weighted_activation_cost with backward=True, in one pass; accesses as in the forward
    Order:    a program takes whole rows, so sums are in an order that F alone decides; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(gate_up, name, weights, da)
    da, gate_up = da.contiguous(), with_contiguous_columns(gate_up)
    m, f = da.shape
    dgate_up, dweights = gate_up.new_empty(m, 2 * f), torch.empty(m, dtype=torch.float32, device=da.device)
    if m:
        tile = row_tile(f, BACKWARD_COLUMNS, BACKWARD_ELEMENTS)
        launch(
            weighted_activation_backward_kernel, (triton.cdiv(m, tile.rows),),
            row_argument(da), row_argument(gate_up), weights.contiguous(), dgate_up, da, dweights, m, f,
            KIND=name, TILE=tile, **row_options(tile.warps),
        )  # fmt: skip
    return dgate_up, da, dweights
