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
from context import (
    BATCH,
    DOCUMENTS,
    GPT2,
    MIXTURE,
    NEWER,
    SEQ,
    WIDTH,
    context,
    documents,
    loss_of,
    shared,
    tensors,
    whole,
)
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
Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]


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

    def found() -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                context_attention,
                "parts",
                lambda heads, shared, _: [Part(slice(heads), slice(shared), (place,)) for place in (0, 1)],
            )
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
    tokens = BATCH * SEQ // dist.get_world_size()
    return [("all_gather", 2 * BATCH * SEQ * 2 * WIDTH * 4)], 4 * tokens * ((2 * 4 + 2 * 2) * WIDTH + 4)


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


def wrapped(patch: Patch, where: Any, name: str, change: Callable[[Any], Any]) -> None:
    """The function `name` of a module or class, with its result changed."""
    before = getattr(where, name)
    patch.setattr(where, name, lambda *args, **options: change(before(*args, **options)))


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


def positions_counted_locally(patch: Patch) -> None:
    patch.setattr(Positions, "flat_ids", lambda self, device: torch.arange(self.seq_length).repeat(self.batch))


def dropout_by_local_row(patch: Patch) -> None:
    def starts(samples: Tensor, length: int, hidden: int, rows: slice) -> Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        places = torch.zeros(len(samples), length, dtype=torch.int64)
        places[:, ops.own_tokens(length, size, rank)] = torch.arange(length // size)
        return ((samples[:, None] * length + places) * hidden).reshape(-1)

    patch.setattr(dropout.ops, "dropout_starts", starts)


def loss_of_own_tokens(patch: Patch) -> None:
    patch.setattr(gpt, "over_context", lambda total, tp: total)


def loss_times_ranks(patch: Patch) -> None:
    wrapped(patch, gpt, "over_context", lambda total: total * dist.get_world_size())


def key_gradients_summed_twice(patch: Patch) -> None:
    wrapped(patch, context_attention, "start_scatter_sum", lambda wait: lambda: 2 * wait())


def last_piece_without_a_merge(patch: Patch) -> None:
    patch.setattr(flash, "_merged", lambda found: found[-1])


def mask_aligned_with_the_first_key(patch: Patch) -> None:
    def calls(segment: Any, window: Any, device: Any) -> list:
        return [flash.Call(segment.rows, slice(segment.first, segment.end), True)]

    patch.setattr(flash, "_calls", calls)


def log_sum_exp_of_a_piece(patch: Patch) -> None:
    before = flash._merged
    patch.setattr(flash, "_merged", lambda found: (before(found)[0], found[-1][1]))


def log_sum_exp_by_rows(patch: Patch) -> None:
    before = context_attention.attend_backward

    def backward(dout: Tensor, q: Tensor, *more: Any) -> None:
        *forward, lse, dq, dk, dv = more
        before(dout, q, *forward, lse.t().contiguous(), dq, dk, dv)

    patch.setattr(context_attention, "attend_backward", backward)


def documents_cut_at_chunks(patch: Patch) -> None:
    wrapped(patch, of_ranks, "segments", lambda found: [s._replace(first=s.position) for s in found])


def window_of_own_chunk(patch: Patch) -> None:
    before = of_ranks.segments

    def own(starts: list, seq: int, size: int, rank: int) -> list:
        chunk = seq // (2 * size)
        return [s._replace(first=max(s.first, s.position // chunk * chunk)) for s in before(starts, seq, size, rank)]

    patch.setattr(of_ranks, "segments", own)


def second_half_alone(patch: Patch) -> None:
    wrapped(patch, of_ranks, "within", lambda found: [s._replace(earlier=0) for s in found])


def second_half_in_the_order_of_ranks(patch: Patch) -> None:
    patch.setattr(
        context_attention, "chunk_owners", lambda size: [*product(range(size), (0,)), *product(range(size), (1,))]
    )


def first_learned_positions(patch: Patch) -> None:
    def forward(self: PositionEmbedding, x: Tensor, positions: Positions) -> Tensor:
        return x + self.weight[: positions.seq_length].repeat(positions.batch, 1)

    patch.setattr(PositionEmbedding, "forward", forward)


def gathered_keys_are_kept(patch: Patch) -> None:
    before, gathered = context_attention.ContextAttention.forward, []
    wrapped(patch, context_attention, "_in_order", lambda found: gathered.append(found) or found)

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out = before(ctx, *inputs)
        ctx.save_for_backward(*ctx.to_save, *gathered)
        return out

    patch.setattr(context_attention.ContextAttention, "forward", staticmethod(forward))


def heads_repeated_before_the_gather(patch: Patch) -> None:
    before = ops.context_attention

    def repeated(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return before(q, k, v, *more, **options)

    patch.setattr(ops, "context_attention", repeated)


def targets_counted_over_context(patch: Patch) -> None:
    before = ModelParts._total
    patch.setattr(ModelParts, "_total", lambda self, number, *axes: before(self, number, "cp", *axes))


def balance_of_own_tokens(patch: Patch) -> None:
    patch.setattr(route, "all_reduce", lambda x, group: x)


def loads_of_own_tokens(patch: Patch) -> None:
    patch.setattr(experts, "all_reduce", lambda x, group: x)


def loads_counted_twice(patch: Patch) -> None:
    wrapped(patch, experts, "all_reduce", lambda loads: 2 * loads)


TRAPS: dict[str, tuple[Mistake, ...]] = {
    "GPT-2 with documents": (targets_shifted_after_the_cut, dropout_by_local_row, loss_of_own_tokens,
        loss_times_ranks, first_learned_positions),
    "newer GPT": (positions_counted_locally,),
    "attention": (key_gradients_summed_twice, last_piece_without_a_merge, mask_aligned_with_the_first_key,
        log_sum_exp_of_a_piece, log_sum_exp_by_rows, documents_cut_at_chunks),
    "attention in a window": (window_of_own_chunk,),
    "attention in halves": (second_half_alone, second_half_in_the_order_of_ranks),
    "what is sent and kept": (gathered_keys_are_kept, heads_repeated_before_the_gather),
    "training": (targets_counted_over_context, loads_of_own_tokens, loads_counted_twice),
    "mixture": (balance_of_own_tokens,),
}  # fmt: skip


def seen(check: str, mistake: Mistake | None) -> bool:
    """Whether a rank's results, with the mistake, differ from one process's, without it."""
    made = CHECKS[check]()
    expected = made.expected()
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            mistake(patch)
        found = made.found()
    return differ_on_a_rank(found, expected)


@pytest.mark.parametrize(("check", "mistake"), [
    *((check, None) for check in CHECKS),
    *in_turns((check, mistake) for check, mistakes in TRAPS.items() for mistake in mistakes),
])  # fmt: skip
def test_a_mistake_is_seen_and_nothing_else(ranks: WorkerPool, check: str, mistake: Mistake | None) -> None:
    assert ranks(2).run(seen, check, mistake) == [mistake is not None] * 2
