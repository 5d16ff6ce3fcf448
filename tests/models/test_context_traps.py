"""Mistakes that context parallelism invites, each made on purpose: the comparison that is named beside it sees it.

A mistake would train to a wrong loss, or send and keep too much, without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from context import DOCUMENTS, GPT2, MIXTURE, NEWER, SEQ, WIDTH, context, documents, loss_of, shared, tensors, whole
from planted import Mistake, Patch, changed, instead, wrapped
from pool import WorkerPool
from small_runs import build, run_config
from testing import differ_on_a_rank
from torch import Tensor
from turns import in_turns

from tpformer import ops
from tpformer.config import RunConfig
from tpformer.distributed import record_collectives
from tpformer.layers import PositionEmbedding, Positions, dropout
from tpformer.models import GPT, gpt
from tpformer.ops import context as of_ranks
from tpformer.ops import flash
from tpformer.ops.context import Part
from tpformer.training import experts
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.step import train_step

# the modules of these functions
context_attention, route = (import_module(f"tpformer.ops.{name}") for name in ("context_attention", "route"))


class Check(NamedTuple):
    """What context-parallel ranks give, and what it should be."""

    found: Callable[[], Any]
    expected: Callable[[], Any]


def attention(window: int | None = None) -> Check:
    """Of this rank's tokens, and of whole samples. There are as many rows as heads."""
    heads = SEQ // 2

    def expected() -> list[Tensor]:
        own = ops.own_tokens(SEQ, dist.get_world_size(), dist.get_rank())
        return [x[:, own] for x in whole(*tensors(heads, 4, torch.float64), DOCUMENTS, window)]

    return Check(lambda: shared(*tensors(heads, 4, torch.float64), DOCUMENTS, window), expected)


def attention_in_halves() -> Check:
    """Keys of the first half of each sample, then those of the second one."""
    made = attention(20)

    def halves(heads: int, shared: int, _: Any) -> list[Part]:
        return [Part(slice(heads), slice(shared), (place,)) for place in (0, 1)]

    def found() -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context_attention, "parts", halves)
            return made.found()

    return made._replace(found=found)


def sent_and_kept() -> tuple[list, int]:
    """(collectives of a forward, bytes that it keeps)."""
    group, kept = dist.group.WORLD, {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v, _ = (x[:, : SEQ // group.size()].clone().requires_grad_() for x in tensors(4, 2, torch.float32))
    with record_collectives() as calls, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ops.context_attention(q, k, v, group=group)
    return calls, sum(kept.values())


def promised() -> tuple[list, int]:
    """The same for 4 heads and 2 of keys."""
    tokens = len(DOCUMENTS) * SEQ
    kept = 4 * tokens // dist.get_world_size() * ((2 * 4 + 2 * 2) * WIDTH + 4)
    return [("all_gather", 2 * tokens * 2 * WIDTH * 4)], kept


def loss(config: dict, ids: Tensor | None = None) -> Check:
    """Loss and gradients of a GPT."""
    return Check(lambda: loss_of(config, context(), ids), lambda: loss_of(config, None, ids))


def step_of(parts: ModelParts, config: RunConfig) -> list:
    """Loss, norm and experts' loads of a step of training."""
    batch = torch.randint(50, (2, SEQ + 1), generator=torch.Generator().manual_seed(0))
    optimizers = build_optimizers(parts, config.optimizer)
    result = train_step(parts, optimizers, batch, first_sample=0, lr=1e-3, clip_norm=0.5)
    return [result.loss, result.norm, result.loads]


def training() -> Check:
    """A step of a run, with experts that are balanced in both ways."""
    size, made = dist.get_world_size(), {**MIXTURE, "router_bias": True, "first_dense_layers": 1}
    config = run_config({"context_parallel": size}, made, global_batch_size=2, dtype="float64", balance_loss=0.1)

    def expected() -> list:
        alone = GPT(config.model.architecture, seed=config.train.seed, dtype=torch.float64, balance_loss=0.1)
        return step_of(ModelParts([alone], microbatch_size=1, n_microbatches=2, dtype=torch.float64), config)

    return Check(lambda: step_of(build(config)[0], config), expected)


CHECKS: dict[str, Callable[[], Check]] = {
    "attention": attention,
    "attention in a window": lambda: attention(7),
    "attention in halves": attention_in_halves,
    "what is sent and kept": lambda: Check(sent_and_kept, promised),
    "GPT-2 with documents": lambda: loss(GPT2, documents()),
    "newer GPT": lambda: loss(NEWER),
    "mixture": lambda: loss(MIXTURE),
    "training": training,
}


def targets_shifted_after_the_cut(patch: Patch) -> None:
    embed, head, inputs = GPT._embed, GPT._head, list[Tensor]()

    def embedded(self: GPT, ids: Tensor, *more: Any) -> Tensor:
        inputs.append(ids)
        return embed(self, ids, *more)

    def shifted(self: GPT, x: Tensor, targets: Tensor, positions: Positions, *more: Any) -> Tensor:
        of_own = targets.clone()
        of_own[:, positions.own_tokens()] = inputs[-1].roll(-1, 1)
        return head(self, x, of_own, positions, *more)

    patch.setattr(GPT, "_embed", embedded)
    patch.setattr(GPT, "_head", shifted)


def starts_of_local_rows(samples: Tensor, length: int, hidden: int, rows: slice) -> Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    places = torch.zeros(len(samples), length, dtype=torch.int64)
    places[:, ops.own_tokens(length, size, rank)] = torch.arange(length // size)
    return ((samples[:, None] * length + places) * hidden).reshape(-1)


def first_positions(self: PositionEmbedding, x: Tensor, positions: Positions) -> Tensor:
    return x + self.weight[: positions.seq_length].repeat(positions.batch, 1)


def aligned_with_the_first_key(segment: Any, window: Any, device: Any) -> list:
    return [flash.Call(segment.rows, slice(segment.first, segment.end), True)]


def log_sum_exp_by_rows(right: Callable) -> Callable:
    def backward(dout: Tensor, q: Tensor, *more: Any) -> None:
        *forward, lse, dq, dk, dv = more
        right(dout, q, *forward, lse.t().contiguous(), dq, dk, dv)

    return backward


def within_own_chunk(right: Callable) -> Callable:
    def own(starts: list, seq: int, size: int, rank: int) -> list:
        chunk = seq // (2 * size)
        return [s._replace(first=max(s.first, s.position // chunk * chunk)) for s in right(starts, seq, size, rank)]

    return own


def owners_in_the_order_of_ranks(size: int) -> list[tuple[int, int]]:
    return [*product(range(size), (0,)), *product(range(size), (1,))]


def gathered_keys_are_kept(patch: Patch) -> None:
    before, gathered = context_attention.ContextAttention.forward, []
    changed(context_attention, "_in_order", lambda found: gathered.append(found) or found)(patch)

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out = before(ctx, *inputs)
        ctx.save_for_backward(*ctx.to_save, *gathered)
        return out

    patch.setattr(context_attention.ContextAttention, "forward", staticmethod(forward))


def with_repeated_heads(right: Callable) -> Callable:
    def repeated(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return right(q, k, v, *more, **options)

    return repeated


TRAPS: dict[str, dict[str, Mistake]] = {
    "GPT-2 with documents": {
        "targets are shifted after the cut": targets_shifted_after_the_cut,
        "dropout by local row": instead(dropout.ops, "dropout_starts", starts_of_local_rows),
        "loss of own tokens": instead(gpt, "over_context", lambda total, tp: total),
        "loss times ranks": changed(gpt, "over_context", lambda total: total * dist.get_world_size()),
        "the first learned positions": instead(PositionEmbedding, "forward", first_positions),
    },
    "newer GPT": {
        "positions are counted locally": instead(
            Positions, "flat_ids", lambda self, device: torch.arange(self.seq_length).repeat(self.batch)
        ),
    },
    "attention": {
        "gradients of keys twice": changed(context_attention, "start_scatter_sum", lambda wait: lambda: 2 * wait()),
        "the last piece without a merge": instead(flash, "_merged", lambda found: found[-1]),
        "the mask is aligned with the first key": instead(flash, "_calls", aligned_with_the_first_key),
        "log-sum-exp of one": wrapped(flash, "_merged", lambda right: lambda found: (right(found)[0], found[-1][1])),
        "log-sum-exp by rows": wrapped(context_attention, "attend_backward", log_sum_exp_by_rows),
        "documents are cut at chunks": changed(
            of_ranks, "segments", lambda found: [s._replace(first=s.position) for s in found]
        ),
    },
    "attention in a window": {"the window of the own chunk": wrapped(of_ranks, "segments", within_own_chunk)},
    "attention in halves": {
        "the second half alone": changed(of_ranks, "within", lambda found: [s._replace(earlier=0) for s in found]),
        "second half in the order of ranks": instead(context_attention, "chunk_owners", owners_in_the_order_of_ranks),
    },
    "what is sent and kept": {
        "gathered keys are kept": gathered_keys_are_kept,
        "heads are repeated before the gather": wrapped(ops, "context_attention", with_repeated_heads),
    },
    "training": {
        "targets are counted over the context": wrapped(
            ModelParts, "_total", lambda right: lambda self, number, *axes: right(self, number, "cp", *axes)
        ),
        "loads of own tokens": instead(experts, "all_reduce", lambda x, group: x),
        "loads are counted twice": changed(experts, "all_reduce", lambda loads: 2 * loads),
    },
    "mixture": {"balance of own tokens": instead(route, "all_reduce", lambda x, group: x)},
}


def seen(check: str, mistake: str | None) -> bool:
    """Whether a rank's results, with the mistake, differ from one process's, without it."""
    made = CHECKS[check]()
    expected = made.expected()
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            TRAPS[check][mistake](patch)
        found = made.found()
    return differ_on_a_rank(found, expected)


@pytest.mark.parametrize(("check", "mistake"), [
    *((check, None) for check in CHECKS),
    *in_turns((check, mistake) for check, mistakes in TRAPS.items() for mistake in mistakes),
])  # fmt: skip
def test_a_mistake_is_seen_and_nothing_else(ranks: WorkerPool, check: str, mistake: str | None) -> None:
    assert ranks(2).run(seen, check, mistake) == [mistake is not None] * 2
