"""What carries each linear of a model, and why: the table behind GPT.explain() and the log of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tpformer import ops
from tpformer.config import FP8
from tpformer.kernels.cost import Machine, as_sent, communication_bytes, gemm_seconds, machine_for
from tpformer.kernels.pack.format import GROUP, RECORD
from tpformer.kernels.quantize.format import NUMBER_BYTES
from tpformer.ops.choice import (
    FEWER_CTAS,
    Request,
    break_even,
    column_request,
    device_name,
    machine_of_request,
    predicted_times,
    row_request,
    spare_processors,
    why_not_fused,
)
from tpformer.ops.route import wide
from tpformer.ops.transports.experts import reducing
from tpformer.ops.transports.interface import ALL_REDUCE
from tpformer.words import dtype_name

from .block import OWN, TransformerBlock
from .children import fusable, why_called
from .embedding import LMHead, PositionEmbedding, VocabParallelEmbedding, makes_loss
from .explain_notes import fold, sent_notes
from .linear import ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule
from .moe import Experts, MoE
from .router import Router

HEADER = (
    "linear",
    "operation",
    "M x N x K",
    "of one rank",
    "transport",
    "GEMM us",
    "comm us",
    "max us",
    "break-even",
    "width",
    "reason",
)
LAYERS = (*OWN, MoE, Router, Experts, TransformerBlock, VocabParallelEmbedding, PositionEmbedding, LMHead)
BITS = 8 * RECORD / GROUP  # of a value in packed form
LOSS_REASON = "the chunked loss has collectives of its own: one gather, one reduction"

GATHERED = "; as a module it gathers its output, an all-gather in the forward"
UNSHARDED = "; as a module it takes an unsharded input, an all-reduce in the backward"

REDUCE_REASON = (
    "a token's rows lie in several experts' groups, so no tile holds a token's sum: a pass combines them before the "
    "collective"
)


class LinearPlan(NamedTuple):
    """One linear operation of a model: a layer, or layers that share a gather ("mlp.gate_proj+up_proj").

    Experts are two, whose shapes are those of linears with as much work: "mlp.experts (gather)" and "(reduce)".

    operation: what the forward runs: one of the transports' operations (ops.record_transports), "matmul" if the forward
    does not communicate, or a loss ("linear_cross_entropy", or "vocab_parallel_cross_entropy" of all logits).
    request: the GEMM that communicates. shape: M, N, K of the forward's whole GEMM. local: M, N, K of one rank's GEMM,
    the largest if ranks differ.
    """

    path: str
    operation: str
    request: Request
    shape: tuple[int, int, int]
    local: tuple[int, int, int]
    decision: ops.Decision


def linear_plans(module: nn.Module, tokens: int, dtype: torch.dtype | None = None) -> list[LinearPlan]:
    """Every linear operation in a module tree, for `tokens` tokens in a forward, in the order of registration.

    On context-parallel ranks they are the tokens of whole samples, of which a rank has its part.
    dtype: that of the computation, by default the parameters'.
    Collective over a group at the first question about its transport. Errors: ValueError for a transport that was asked
    for and cannot run.
    """
    parameter = next(module.parameters())
    dtype, device = dtype or parameter.dtype, parameter.device
    plans: list[LinearPlan] = []
    shared: set[nn.Module] = set()
    for path, layer in module.named_modules():
        if not isinstance(layer, ParallelModule) or layer in shared:
            continue
        place = torch.device(layer.tp.mesh.device_type if layer.tp.mesh else "cpu") if device.type == "meta" else device
        context = layer.tp.shares_tokens
        where = _Inputs(tokens if context is None else tokens // context.size, dtype, place)
        if isinstance(layer, MoE) and isinstance(layer.gate, Router) and isinstance(layer.experts, Experts):
            plans += _moe(f"{path}." * bool(path), layer, where)
            if layer.fuses() and layer.shared_experts is not None and not layer.experts.exchanges:
                shared.update(layer.shared_experts.modules())
            continue
        columns = [layer.get_submodule(name) for name in layer.shares_gather]
        if columns and fusable(ColumnParallelLinear, *columns):
            shared.update(columns)
            plans.append(_columns(f"{path}." * bool(path) + "+".join(layer.shares_gather), columns, where))
        elif isinstance(layer, ColumnParallelLinear):
            plans.append(_noted(_columns(path, [layer], where), GATHERED * layer.gather_output))
        elif isinstance(layer, RowParallelLinear):
            plans.append(_noted(_row(path, layer, where), UNSHARDED * (not layer.input_is_parallel)))
        elif isinstance(layer, LMHead):
            plans += _head(path, layer, where, _why_all_logits(module, path, layer))
    return plans


def _noted(plan: LinearPlan, note: str) -> LinearPlan:
    """The plan with a note added to its reason. On one rank it stays as it is, because nothing is communicated."""
    reason = plan.decision.reason + note * (plan.request.ranks > 1)
    return plan._replace(decision=plan.decision._replace(reason=reason))


class _Inputs(NamedTuple):
    tokens: int
    dtype: torch.dtype
    device: torch.device


def _column(
    path: str, layer: ParallelModule, where: _Inputs, n: int, width: int, k: int, grouped: ops.Grouped | None = None
) -> LinearPlan:
    """The plan of column-parallel GEMMs that have n output features in all, `width` of them on one rank."""
    tp = layer.tp.in_16_bits if isinstance(layer, LMHead) else layer.tp
    rows = where.tokens // tp.size if tp.sequence_parallel else where.tokens
    request = tp.request(column_request, rows, k, width, where.dtype, where.device, grouped)
    operation = "matmul" if request.op == ALL_REDUCE or tp.size == 1 else request.op
    shape, local = (where.tokens, n, k), (where.tokens, width, k)
    return LinearPlan(path, operation, request, shape, local, ops.choose_transport(request))


def _columns(path: str, layers: list[ColumnParallelLinear], where: _Inputs) -> LinearPlan:
    n, width = sum(layer.out_features for layer in layers), sum(layer.width for layer in layers)
    return _column(path, layers[0], where, n, width, layers[0].in_features)


def _row(path: str, layer: RowParallelLinear, where: _Inputs) -> LinearPlan:
    n, width = layer.out_features, layer.width
    request = layer.tp.request(row_request, where.tokens, width, n, where.dtype, where.device)
    operation = "matmul" if layer.tp.size == 1 else request.op
    shape, local = (where.tokens, n, layer.in_features), (where.tokens, n, width)
    return LinearPlan(path, operation, request, shape, local, ops.choose_transport(request))


def _moe(prefix: str, layer: MoE, where: _Inputs) -> list[LinearPlan]:
    """The plans of a router and of experts, with which a shared expert's linears share gather and reduction. Experts
    that exchange tokens have no linear that communicates: sent_notes has them."""
    gate, experts, tp = layer.gate, layer.experts, layer.tp
    k, rows = gate.policy.k, where.tokens // tp.size if tp.sequence_parallel else where.tokens
    n, f = gate.n_experts, experts.ffn_hidden_size
    dtype = wide(where.dtype)
    alone = column_request(rows, gate.hidden_size, n, dtype, where.device, None, tp.sequence_parallel, "auto")
    sent = f"; {2 * k * dtype.itemsize} bytes a token are gathered, half as many scattered back"
    sent *= tp.sharded and not experts.exchanges
    reason = f"each token is decided once, by the rank that has its row, in {dtype_name(dtype)}{sent}"
    routed = LinearPlan(
        f"{prefix}gate", "matmul", alone, (where.tokens, n, gate.hidden_size), (rows, n, gate.hidden_size),
        ops.Decision("local", reason),
    )  # fmt: skip
    if experts.exchanges:
        return [routed]
    grouped, path = experts.grouped(k), f"{prefix}experts (gather)"
    gather = _column(path, experts, where, 2 * k * f, grouped.width(tp.size), experts.hidden_size, grouped)
    if layer.fuses() and layer.shared_experts is not None:
        gather = _noted(gather, "; shared_experts are part of it")
    width, name = -(-k * f // tp.size), reducing(gather.decision.transport)
    request = tp.request(row_request, where.tokens, width, experts.hidden_size, where.dtype, where.device)
    request = request._replace(transport=name)
    reduce = LinearPlan(
        f"{prefix}experts (reduce)",
        "matmul" if tp.size == 1 else request.op,
        request,
        (where.tokens, experts.hidden_size, k * f),
        (where.tokens, experts.hidden_size, width),
        gather.decision if tp.size == 1 else ops.Decision(name, REDUCE_REASON),
    )
    return [routed, gather, reduce]


def _head(path: str, layer: LMHead, where: _Inputs, why_all_logits: str | None) -> list[LinearPlan]:
    """The plans of the logits and of the loss. The loss makes all logits only if a module has to be called for them."""
    logits = _column(f"{path} (logits)".lstrip(), layer, where, layer.rows, layer.width, layer.hidden_size)
    operation, decision = "linear_cross_entropy", logits.decision
    if why_all_logits is not None:
        decision = ops.Decision(decision.transport, f"made of all logits: {why_all_logits}")
        operation = "vocab_parallel_cross_entropy"
    elif layer.tp.size > 1:
        decision = ops.Decision("sequential", LOSS_REASON)
    return [logits, logits._replace(path=f"{path} (loss)".lstrip(), operation=operation, decision=decision)]


def _why_all_logits(module: nn.Module, path: str, head: LMHead) -> str | None:
    """Why a GPT calls its head for logits; None if the head makes the loss."""
    if not makes_loss(head):
        return why_called(head, LMHead)
    names = path.split(".")[:-1]
    parent, *others = [module.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
    if not isinstance(parent, ParallelModule) and any(isinstance(each, ParallelModule) for each in others):
        return f"it is in a {type(parent).__name__}"
    return None


def explain(module: nn.Module, tokens: int, dtype: torch.dtype | None = None, *, seq_length: int | None = None) -> str:
    """A table of every tensor-parallel linear in a module: shapes, transport and its reason, predicted times.

    One line for each linear operation; equal lines of numbered layers become one ("layers.0-23.mlp.fc1"). tokens and
    dtype as in `linear_plans`. The times are predictions of the performance model (kernels/cost.py), and "-" if it does
    not know the device. break-even: the width from which the communication hides under the GEMM; width: the layer's.
    Below the table: the parts of layers that are called as modules, and why; what attention gathers on
    context-parallel ranks, in samples of seq_length tokens, by default one of all; and what experts exchange.
    Call it on all ranks: the first question about a group communicates.
    """
    plans = linear_plans(module, tokens, dtype)
    lines = [(plan.path, _cells(plan)) for plan in plans]
    table = [HEADER, *((path, *cells) for path, cells in fold(lines))]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    text = [
        "  ".join(
            cell.rjust(width) if 5 <= column <= 9 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    sent = sent_notes(module, tokens, dtype, seq_length or tokens)
    return "\n".join([*text, *called_modules(module), *_packed_note(module), *sent, *_footnote(plans)])


def called_modules(module: nn.Module) -> list[str]:
    """One line for each part of a layer that is called as a module, though this library would fuse its own."""
    return [
        f"{path}.{name}".removeprefix(".") + f" is called as a module, not fused: {reason}"
        for path, parent in module.named_modules()
        if isinstance(parent, ParallelModule)
        for name, child in parent.named_children()
        if not isinstance(child, nn.ModuleDict) and (reason := why_called(child, *LAYERS) or _why_apart(parent, name))
    ]


def _why_apart(parent: nn.Module, name: str) -> str | None:
    """Why a part that could be fused with others of its layer is not, because of what it computes."""
    return parent.why_shared_is_called() if isinstance(parent, MoE) and name == "shared_experts" else None


def _cells(plan: LinearPlan) -> tuple[str, ...]:
    request, (transport, reason) = plan.request, plan.decision
    operation = plan.operation
    if operation == "matmul" and request.ranks > 1:
        operation = f"matmul, backward {request.op}"
    numbers = ["-"] * 4
    machine = machine_of_request(request)
    is_loss = operation.endswith("cross_entropy")
    if machine is not None and not is_loss:
        sizes, blocks = (request.m, request.n, request.k), request.precision == FP8
        compute = gemm_seconds(*sizes, request.dtype.itemsize, machine, NUMBER_BYTES if blocks else None)
        sent, itemsize = as_sent(request.op, sizes, request.dtype.itemsize, blocks)
        moved = communication_bytes(request.op, *sent, request.ranks, itemsize)
        communication = moved / machine.link
        numbers[:3] = [f"{1e6 * seconds:.0f}" for seconds in (compute, communication, max(compute, communication))]
        if request.ranks > 1:
            numbers[3] = f"{break_even(request):.0f}"
    shapes = (" x ".join(map(str, shape)) for shape in (plan.shape, plan.local))
    width = "-" if is_loss else str(request.width)
    return (operation, *shapes, transport, *numbers, width, reason)


def _footnote(plans: list[LinearPlan]) -> list[str]:
    if not plans:
        return ["no tensor-parallel linear in this module"]
    name = device_name(plans[0].request.device)
    machine = machine_for(name)
    if machine is None:
        return [f"times and break-even: no performance model of {name}"]
    rate = f"{machine.flops / 1e12:.0f} TFLOP/s"
    if any(plan.request.precision == FP8 for plan in plans):
        blocks = machine.fp8_flops
        rate += ", of blocks " + ("unknown" if blocks is None else f"{blocks / 1e12:.0f}")
    return [
        f"times and break-even are predictions for {name} ({rate}, "
        f"{machine.link / 1e9:.0f} GB/s), not measurements; max: GEMM and communication ideally overlapped",
        *_spare_note([plan.request for plan in plans if not plan.operation.endswith("cross_entropy")], machine),
    ]


def _packed_note(module: nn.Module) -> list[str]:
    """Which blocks keep packed activations."""
    blocks = {path: each for path, each in module.named_modules() if isinstance(each, TransformerBlock)}
    nothing: tuple[str, ...] = ()
    packed = [(path or "this block", nothing) for path, block in blocks.items() if block.keep.pack]
    if not packed:
        return []
    names = ", ".join(name for name, _ in fold(packed))
    return [
        f"{names} keep activations packed until the backward: {BITS:.2f} bits for each bfloat16 value, the same bits"
    ]


def _spare_note(requests: list[Request], machine: Machine) -> list[str]:
    """What it costs that the fused kernels leave SMs to other groups, and what to set."""
    able = [
        request
        for request in requests
        if request.device.type == "cuda"
        and request.group is not None
        and spare_processors(request.group) > FEWER_CTAS
        and request.transport in ("auto", "fused")
        and why_not_fused(request) is None
    ]
    if not able:
        return []
    spare = spare_processors(able[0].group)

    def microseconds(processors: int) -> float:
        times = [(request.transport, predicted_times(request, machine, processors)) for request in able]
        return 1e6 * sum(
            each["fused"].seconds if name == "fused" else min(time.seconds for time in each.values())
            for name, each in times
        )

    now, then = (f"{microseconds(processors):.0f}" for processors in (spare, FEWER_CTAS))
    return [
        f"there are other groups, so the fused kernels leave {spare} SMs to NCCL: {now} us for these linears, "
        f"predicted. With NCCL_MAX_CTAS={FEWER_CTAS} both keep to {FEWER_CTAS} SMs: {then} us. That is enough for one "
        "communicator; FSDP's kernels and a pipeline's may hold SMs at the same time"
    ]
