"""The lines below explain()'s table: what layers send beside their linears' rows, and how long it takes.

Belongs here: attention on context-parallel ranks, experts that exchange tokens, and how equal lines become one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tpformer.config.fp8 import BLOCK, FP8
from tpformer.kernels.cost import gemm_seconds, machine_for
from tpformer.ops.choice import device_name
from tpformer.ops.row_exchange import share_of_rank

from .attention import SelfAttention
from .moe import Experts, MoE
from .router import Router

Note = tuple[str, tuple[str, ...]]  # the layer's path, and its sentence


def sent_notes(module: nn.Module, tokens: int, dtype: torch.dtype | None, seq_length: int) -> list[str]:
    """A line for each layer, or for equal numbered ones, that sends tokens beside its linears. tokens: as explain's."""
    notes = [*_of_attention(module, tokens, dtype, seq_length), *_of_experts(module, tokens, dtype)]
    notes += [(path, (each.sent_note(tokens, dtype),)) for path, each in module.named_modules() if _tells(each)]
    return [f"{path} {sentence}" for path, (sentence,) in fold(notes)]


def _tells(module: nn.Module) -> bool:
    """Whether a module, such as a mixture that parallelize has divided, says itself what it sends."""
    return hasattr(type(module), "sent_note")


def exchange_note(row_bytes: int, k: int, n_experts: int, ep: int, backwards: int, out_bytes: int | None = None) -> str:
    """What the tokens of a rank, with so many bytes of rows, send to the experts of others. backwards: how many
    exchanges of rows a backward makes; a forward makes two. One of each goes home; in the others rows have out_bytes,
    if these are not the same."""
    copies = (ep - 1) * share_of_rank(k, n_experts, ep)  # of a token's row, on other ranks
    home, out = row_bytes * copies, (row_bytes if out_bytes is None else out_bytes) * copies
    return (
        f"exchange tokens over {ep} expert-parallel ranks, with {n_experts // ep} experts on each: a token goes to "
        f"{copies:.2f} other ranks, if each set of {k} experts is as likely as any other, so "
        f"{(out + home) / 1e6:,.1f} MB are sent in a forward and {((backwards - 1) * out + home) / 1e6:,.1f} MB in a "
        f"backward"
    )


def _of_attention(module: nn.Module, tokens: int, dtype: torch.dtype | None, seq_length: int) -> Iterator[Note]:
    """What each attention on context-parallel ranks receives in a forward, and how long beside its computing."""
    for path, layer in module.named_modules():
        if not isinstance(layer, SelfAttention) or (context := layer.tp.shares_tokens) is None:
            continue
        weight = layer.q_proj.weight
        size = (dtype or weight.dtype).itemsize
        received = 2 * tokens * layer.attended_heads * layer.head_dim * size * (context.size - 1) // context.size
        note = (
            f"gathers keys and values over {context.size} context-parallel ranks: {received / 1e6:,.1f} MB received in "
            "a forward; in a backward as much again, and as much of their gradients"
        )
        device = torch.device(layer.tp.context.device_type) if weight.is_meta and layer.tp.context else weight.device
        if (machine := machine_for(device_name(device))) is not None:
            queries = layer.n_heads // layer.tp.size * layer.head_dim
            keys = min(seq_length, layer.sliding_window or seq_length)
            half = 2 if keys == seq_length else 4  # a triangle of all keys, or nearly all of a window's
            compute, links = half * tokens // context.size * keys * queries / machine.flops, received / machine.link
            note += (
                f". Predicted, in one node: {1e6 * links:.0f} us before {1e6 * compute:.0f} us of attention at the "
                f"GEMMs' rate ({links / compute:.1%}), counted as if nothing hid it"
            )
        yield path or "this attention", (note,)


def _of_experts(module: nn.Module, tokens: int, dtype: torch.dtype | None) -> Iterator[Note]:
    """What a rank's tokens send to experts on other ranks and back, and how long beside the experts' GEMMs."""
    for path, layer in module.named_modules():
        if not (isinstance(layer, MoE) and isinstance(layer.gate, Router) and isinstance(layer.experts, Experts)):
            continue
        experts, ep = layer.experts, layer.experts.tp.size
        if not experts.exchanges:
            continue
        if ep == 1:
            yield f"{path}.experts".removeprefix("."), ("are whole on each rank, which sends no token to others",)
            continue
        context = layer.tp.shares_tokens
        own = tokens // (layer.tp.size * (1 if context is None else context.size))
        weight, k, hidden, ffn = experts.gate_up_proj, layer.gate.policy.k, experts.hidden_size, experts.ffn_hidden_size
        size = (dtype or weight.dtype).itemsize
        home = own * hidden * size
        out = own * (hidden + hidden // BLOCK) if experts.tp.precision == FP8 else home
        sent = (out + home) * (ep - 1) * share_of_rank(k, experts.n_experts, ep)
        note = exchange_note(home, k, experts.n_experts, ep, 3, out)
        if layer.tp.size > 1 and experts.n_experts % layer.tp.size == 0:
            gathered = (out + home) * (layer.tp.size - 1)
            note += (
                f"; without expert_parallel {layer.tp.size} tensor-parallel ranks would send {gathered / 1e6:,.1f} MB "
                "in a forward"
            )
        device = torch.device(layer.tp.of_experts.mesh.device_type) if weight.is_meta else weight.device  # type: ignore[union-attr]
        if (machine := machine_for(device_name(device))) is not None:
            links = sent / machine.link
            compute = sum(gemm_seconds(own * k, n, m, size, machine) for n, m in ((2 * ffn, hidden), (hidden, ffn)))
            note += (
                f". Predicted, in one node: {1e6 * links:.0f} us of a forward beside {1e6 * compute:.0f} us of the "
                f"experts' GEMMs, counted as if nothing hid it"
            )
        yield f"{path}.experts".removeprefix("."), (note,)


def fold(lines: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Join lines that differ only in the first number of their path; the joined line stands where the first was."""
    folded: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for path, cells in lines:
        found = re.search(r"(?<![^.])\d+(?![^.])", path)
        before, after = (path[: found.start()], path[found.end() :]) if found else (path, "")
        folded.setdefault((before, after, cells), []).extend([int(found[0])] if found else [])
    return [(before + _span(numbers) + after, cells) for (before, after, cells), numbers in folded.items()]


def _span(numbers: list[int]) -> str:
    """ "0-23" for consecutive numbers, else "0,3,4"."""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
