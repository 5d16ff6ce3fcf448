"""The optimizers' updates: AdamW and SGD of all of a model's tensors, each in one pass.

A launch takes all tensors whose gradients and copies have the same dtypes. Where they are, a table in device memory
says. A tensor may be replaced in any step, and its address be used again, so nothing about tensors is kept: every call
makes the table again and sends it by one copy, for which the host does not wait. A CUDA graph's replays update the
tensors of its capture.

Belongs here: both kernels, and the table. Letters: N tensors of a call, n of a launch.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ALIGNMENT, DTYPES, is_interpreted, launch_options
from .reference import check_momentum, check_numbers

BLOCK = 2048  # elements of a program: each thread of WARPS takes two times four neighbours
WARPS = 8

# columns of the table, which has a row of int64 for each tensor: its elements, the number of its first block, addresses
SIZE, FIRST = tl.constexpr(0), tl.constexpr(1)
GRADIENT, COPY, MASTER = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
STATE = tl.constexpr(5)  # the first of the optimizer's own, of which there are at most three
COLUMNS = tl.constexpr(8)
# what is one number for a whole call, in float32
SCALE, SKIPPED, RATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# what AdamW has one number of for each tensor, in float32
COUNT, STEP_SIZE, ROOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CORRECTIONS = tl.constexpr(3)


class Form(NamedTuple):
    """What all tensors of a launch have in common."""

    gradient: Any
    """Triton's dtype of gradients."""
    copy: Any
    """Triton's dtype of copies; None if there are none."""
    aligned: bool
    """Whether everything begins at multiples of 16 bytes."""


class Moments(NamedTuple):
    """AdamW's constants."""

    first: float
    """1 - beta1."""
    beta2: float
    second: float
    """1 - beta2."""
    eps: float


@triton.jit
def places(BLOCK: tl.constexpr):
    """The places in a block. Triton is told of four neighbours, which are 16 bytes of float32. For eight, 16 bytes of
    16 bits, loads and stores would have two layouts, and need registers and barriers between them."""
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def column(row, number, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that stands in a column of the table's row."""
    pointer = tl.load(row + number).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def tensors_of(row, first, FORM: tl.constexpr):
    """Pointers to element `first` of gradient, master and copy. Without copies the third is the master's, unused."""
    gradient = column(row, GRADIENT, FORM.gradient, FORM.aligned) + first
    master = column(row, MASTER, tl.float32, FORM.aligned) + first
    if FORM.copy is None:
        return gradient, master, master
    else:
        return gradient, master, column(row, COPY, FORM.copy, FORM.aligned) + first


@triton.jit
def store_update(master, copy, p, at, mask, FORM: tl.constexpr):
    """Store a block of masters, and of copies."""
    tl.store(master + at, p, mask=mask)
    if FORM.copy is not None:
        tl.store(copy + at, p.to(FORM.copy), mask=mask)


@triton.jit
def adamw_block(
    tensors, exp_avg, exp_avg_sq, mask, numbers, corrections, moments, FORM: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block. Pointers are to its first element; mask is None if it is whole."""
    gradient, master, copy = tensors
    at = places(BLOCK)
    g = tl.load(gradient + at, mask=mask).to(tl.float32) * tl.load(numbers + SCALE)
    p = tl.load(master + at, mask=mask)
    m = tl.load(exp_avg + at, mask=mask)
    v = tl.load(exp_avg_sq + at, mask=mask)
    if DECAYS:
        p -= tl.load(numbers + RATE) * p
    m += moments.first * (g - m)
    v = moments.beta2 * v + moments.second * g * g
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(corrections + ROOT)) + moments.eps
    p -= tl.div_rn(tl.load(corrections + STEP_SIZE) * m, root)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    store_update(master, copy, p, at, mask, FORM)


@triton.jit
def sgd_block(
    tensors, buffer, mask, numbers, weight_decay, momentum, FORM: tl.constexpr, DECAYS: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block, as adamw_block does."""
    gradient, master, copy = tensors
    at = places(BLOCK)
    g = tl.load(gradient + at, mask=mask).to(tl.float32) * tl.load(numbers + SCALE)
    p = tl.load(master + at, mask=mask)
    if DECAYS:
        g += weight_decay * p
    if MOMENTUM:
        b = momentum * tl.load(buffer + at, mask=mask) + g
        tl.store(buffer + at, b, mask=mask)
        if NESTEROV:
            g += momentum * b
        else:
            g = b
    p -= tl.load(numbers + RATE) * g
    store_update(master, copy, p, at, mask, FORM)


@triton.jit
def adamw_kernel(
    table, blocks, numbers, corrections, moments, FORM: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of one tensor. The program of a tensor's first block also counts the step. Whole blocks take no mask,
    so that their accesses are wide for any size."""
    tensor = tl.load(blocks + tl.program_id(0)) - 1  # before it is known whether the step is skipped: both in one wait
    row = table + tensor * COLUMNS
    corrections += tensor * CORRECTIONS
    if tl.load(numbers + SKIPPED) != 1:
        first = (tl.program_id(0) - tl.load(row + FIRST)) * BLOCK
        rest = tl.load(row + SIZE) - first
        tensors = tensors_of(row, first, FORM)
        exp_avg = column(row, STATE, tl.float32, FORM.aligned) + first
        exp_avg_sq = column(row, STATE + 1, tl.float32, FORM.aligned) + first
        if first == 0:
            tl.store(column(row, STATE + 2, tl.float32, False), tl.load(corrections + COUNT))
        if rest >= BLOCK:
            adamw_block(tensors, exp_avg, exp_avg_sq, None, numbers, corrections, moments, FORM, DECAYS, BLOCK)
        else:
            mask = tl.arange(0, BLOCK) < rest
            adamw_block(tensors, exp_avg, exp_avg_sq, mask, numbers, corrections, moments, FORM, DECAYS, BLOCK)


@triton.jit
def sgd_kernel(
    table, blocks, numbers, weight_decay, momentum, FORM: tl.constexpr, DECAYS: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor, as in adamw_kernel. Without momentum the buffer's address is the master's, unused."""
    row = table + (tl.load(blocks + tl.program_id(0)) - 1) * COLUMNS
    if tl.load(numbers + SKIPPED) != 1:
        first = (tl.program_id(0) - tl.load(row + FIRST)) * BLOCK
        rest = tl.load(row + SIZE) - first
        tensors = tensors_of(row, first, FORM)
        buffer = column(row, STATE if MOMENTUM else MASTER, tl.float32, FORM.aligned) + first
        if rest >= BLOCK:
            sgd_block(tensors, buffer, None, numbers, weight_decay, momentum, FORM, DECAYS, MOMENTUM, NESTEROV, BLOCK)
        else:
            mask = tl.arange(0, BLOCK) < rest
            sgd_block(tensors, buffer, mask, numbers, weight_decay, momentum, FORM, DECAYS, MOMENTUM, NESTEROV, BLOCK)


def adamw_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] | None,
    *,
    lr: float | Tensor,
    scale: float | Tensor,
    skipped: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """A step of AdamW in place, and each master rounded to its copy.

    Math:     adamw_ of reference.py
    Shapes:   as in reference.py; masters, exp_avgs and exp_avg_sqs float32, gradients bf16|fp16|fp32, copies bf16|fp16;
              all contiguous, but for gradients, which are copied if they are not. Gradients stay as they are
    Numerics: float32, each operation rounded once, with nothing fused: g = scale * gradient; p -= (lr weight_decay) p,
              unless weight_decay is 0; m += (1 - beta1) (g - m); v = beta2 v + ((1 - beta2) g) g;
              p -= (s m) / (sqrt(v) / r + eps), with s = lr / (1 - beta1**t) and r = sqrt(1 - beta2**t), which like
              lr weight_decay are computed in float64 and rounded to float32
    Traffic:  update_cost, and the tables, less than a thousandth of it; accesses of 16 bytes of float32, and 8 of 16
              bits, where a tensor's memory all begins at multiples of 16 bytes
    Order:    each element by itself; no communication, deterministic. The host waits for nothing
    Source:   as in reference.py
    Errors:   ValueError for tensors of other shapes, dtypes, devices or layouts
    """
    if not masters:
        return
    device = masters[0].device
    check_numbers(masters, lr, scale, skipped)
    call = UpdateCall(masters, gradients, copies, {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}, steps)
    lr = on_device(lr, device)
    numbers = numbers_of(scale, skipped, lr * weight_decay)
    counts = (torch.stack([steps[i] for i in call.order]) + 1).to(torch.float64)
    sizes, roots = lr / (1 - beta1**counts), (1 - beta2**counts).sqrt()
    corrections = torch.stack([counts, sizes, roots], 1).to(torch.float32)
    moments = Moments(float(1 - beta1), float(beta2), float(1 - beta2), float(eps))
    for tensors, table, blocks, form in call.launches():
        adamw_kernel[len(blocks),](
            table, blocks, numbers, corrections[tensors], moments, FORM=form, DECAYS=weight_decay != 0, **options()
        )


def sgd_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    copies: Sequence[Tensor] | None,
    *,
    lr: float | Tensor,
    scale: float | Tensor,
    skipped: Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """A step of SGD in place, and each master rounded to its copy.

    Math:     sgd_ of reference.py
    Shapes:   as for adamw_; momentum_buffers float32, contiguous, or none
    Numerics: float32, each operation rounded once, with nothing fused: g = scale * gradient;
              g += weight_decay p, unless weight_decay is 0; b = momentum b + g; p -= lr b, with nesterov
              lr (g + momentum b), without buffers lr g
    Traffic:  update_cost; accesses as in adamw_
    Order:    as for adamw_
    Source:   as in reference.py
    Errors:   as for adamw_
    """
    if not masters:
        return
    check_numbers(masters, lr, scale, skipped)
    check_momentum(masters, momentum_buffers, momentum)
    call = UpdateCall(masters, gradients, copies, {"momentum_buffer": momentum_buffers} if momentum_buffers else {})
    numbers = numbers_of(scale, skipped, on_device(lr, masters[0].device))
    for _, table, blocks, form in call.launches():
        sgd_kernel[len(blocks),](
            table, blocks, numbers, float(weight_decay), float(momentum), FORM=form, DECAYS=weight_decay != 0,
            MOMENTUM=len(momentum_buffers) > 0, NESTEROV=nesterov, **options(),
        )  # fmt: skip


def options() -> dict[str, Any]:
    """Those of both launches. Triton may not fuse a product and a sum, which would round once in place of twice."""
    fusion = {} if is_interpreted() else {"enable_fp_fusion": False}
    return {"BLOCK": BLOCK, **launch_options(WARPS, 1), **fusion}


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """A number as a 0-dim float64 tensor. It is an argument of the kernel that fills it: the host waits for nothing."""
    if isinstance(number, Tensor):
        return number.to(torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


def numbers_of(scale: float | Tensor, skipped: Tensor, rate: Tensor) -> Tensor:
    """What the kernels take as `numbers`."""
    return torch.stack([on_device(number, rate.device) for number in (scale, skipped, rate)]).to(torch.float32)


@dataclass
class Group:
    """The tensors of a launch."""

    members: list[int]
    """Their indices among the tensors of the call."""
    rows: list[list[int]]
    """Their rows of the table."""
    blocks: int = 0


class UpdateCall:
    """The tensors of a call, put together by launches.

    order: the tensors' indices, those of a launch side by side. ValueError if a kernel cannot take them.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        copies: Sequence[Tensor] | None,
        states: dict[str, Sequence[Tensor]],
        steps: Sequence[Tensor] | None = None,
    ) -> None:
        """states: by name, of a master's shape each. steps: 0-dim. copies: none are None, or an empty list."""
        copies = copies or None
        self.device, sizes = masters[0].device, [master.numel() for master in masters]
        shapes = [master.shape for master in masters]
        # kept until all is launched: a copy of one that is not contiguous has no other owner
        self.gradients = [gradient.contiguous() for gradient in gradients]
        for name, tensors in {"master": masters, **states}.items():
            check(name, tensors, shapes, self.device, torch.float32)
        check("gradient", self.gradients, shapes, self.device, *DTYPES)
        if copies is not None:
            check("copy", copies, shapes, self.device, torch.bfloat16, torch.float16)
        if steps is not None:
            check("step", steps, [torch.Size()] * len(sizes), self.device, torch.float32)
        lists = [self.gradients, masters if copies is None else copies, masters, *states.values()]
        lists += [] if steps is None else [steps]
        unused = [0] * (COLUMNS.value - GRADIENT.value - len(lists))
        self.groups: dict[tuple, Group] = defaultdict(lambda: Group([], []))
        for i, (size, *tensors) in enumerate(zip(sizes, *lists, strict=True)):
            addresses = [x.data_ptr() for x in tensors]
            aligned = functools.reduce(operator.or_, addresses[: 3 + len(states)]) % ALIGNMENT == 0  # not of the step
            # by torch's dtypes: to look up Triton's takes ten times as long
            group = self.groups[tensors[0].dtype, None if copies is None else tensors[1].dtype, aligned]
            group.members.append(i)
            group.rows.append([size, group.blocks, *addresses, *unused])
            group.blocks += max(1, -(-size // BLOCK))
        self.order = [i for group in self.groups.values() for i in group.members]

    def launches(self) -> Iterator[tuple[slice, Tensor, Tensor, Form]]:
        """(its tensors in `order`, their rows of the table, blocks, form) of each launch. blocks: int32, for each
        program how many tensors have begun with its block."""
        table, begin = sent([row for group in self.groups.values() for row in group.rows], self.device), 0
        for (gradient, copy, aligned), group in self.groups.items():
            tensors = slice(begin, begin + len(group.rows))
            begins = table[tensors, FIRST.value].contiguous()
            programs = torch.arange(group.blocks, device=self.device)
            blocks = torch.searchsorted(begins, programs, right=True, out_int32=True)
            yield tensors, table[tensors], blocks, Form(DTYPES[gradient], copy and DTYPES[copy], aligned)
            begin = tensors.stop


def check(
    name: str, tensors: Sequence[Tensor], shapes: Sequence[torch.Size], device: torch.device, *dtypes: torch.dtype
) -> None:
    """ValueError if these are not contiguous tensors of these shapes, on this device, of one of the dtypes."""
    if len(tensors) != len(shapes):
        raise ValueError(f"{name}: there are {len(tensors)} tensors, but {len(shapes)} masters: give one for each")
    for x, shape in zip(tensors, shapes, strict=True):
        if x.shape != shape or x.dtype not in dtypes or x.device != device or not x.is_contiguous():
            raise ValueError(
                f"{name} of {tuple(x.shape)} {x.dtype} with strides {x.stride()} on {x.device}: the update takes "
                f"contiguous tensors of {tuple(shape)}, {' or '.join(map(str, dtypes))}, on {device}"
            )


def sent(rows: list[list[int]], device: torch.device) -> Tensor:
    """The rows as an int64 tensor on a device. The host does not wait for the copy.

    The pinned memory is new in each call: torch gives it to nobody before the copy has ended, and never again after the
    capture of a CUDA graph, whose replays copy it (pytorch#161583).
    """
    return torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
