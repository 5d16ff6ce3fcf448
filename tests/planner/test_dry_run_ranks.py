"""Ranks of a real run (gloo) hold and communicate what a dry run counts of them on fake tensors."""

import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from test_dry_run import GPIPE, ILV, LLAMA, MODEL, MOE, PP2, TP2, ZBV, ZERO1, ZERO2, ZERO3, configuration, order_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from turns import in_turns

from bench.layer_memory import balanced_route
from tpformer.config import RunConfig
from tpformer.distributed import record_collectives
from tpformer.kernels.route import reference as route
from tpformer.ops.recompute import _RegionRun
from tpformer.planner.counting import Collective, CollectiveCounter
from tpformer.planner.dry_run import count_rank, plan_config
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.report import rank_plan
from tpformer.planner.storages import nbytes, storages
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, run_mesh


class Alive:
    """The most bytes that autograd keeps at a time. A storage counts until its last handle is gone."""

    def __init__(self, left_out: set[torch.UntypedStorage], ids: torch.Tensor) -> None:
        self.left_out, self.ids, self.uses = left_out, ids.flatten(), Counter()
        self.now = self.most = 0

    def pack(self, x: torch.Tensor):
        storage = x.untyped_storage()
        if x.dtype == torch.int64 and storage.nbytes() == self.ids.nbytes:
            if torch.equal(torch.empty(0, dtype=x.dtype).set_(storage), self.ids):
                return x  # the batch itself
        return x if storage in self.left_out or x.dim() == 0 else Handle(x, self)  # 0: the factor of the loss

    def keeping(self, once):
        """A recomputed region's `once` that also counts what is kept, which no hook sees, as long as it is alive."""

        def counted(run, make):
            kept = once(run, make)
            for x in tree_leaves(kept) if not run.again else ():
                if isinstance(x, torch.Tensor):
                    weakref.finalize(x, bool, Handle(x, self))  # bool only holds the handle until x is gone
            return kept

        return counted


class Handle:
    def __init__(self, x: torch.Tensor, alive: Alive) -> None:
        self.x, self.alive, self.storage = x.detach(), alive, x.untyped_storage()
        alive.uses[self.storage] += 1
        if alive.uses[self.storage] == 1:
            alive.now += self.storage.nbytes()
            alive.most = max(alive.most, alive.now)

    def __del__(self) -> None:
        self.alive.uses[self.storage] -= 1
        if self.alive.uses[self.storage] == 0:
            self.alive.now -= self.storage.nbytes()


def real(config: RunConfig, saved: bool) -> dict:
    """A step of one rank of a real run: bytes held, most bytes saved, the collectives of tpformer and of FSDP2."""
    mesh = run_mesh(config, "cpu")
    model = build_model(config, mesh)
    rows = config.train.global_batch_size // config.parallel.data_parallel
    batch = torch.randint(config.model.vocab_size, (rows, config.model.seq_length + 1))
    found = {"parameters": nbytes(model.parameters())}
    alive = Alive(storages([*model.parameters(), batch]), batch[:, :-1])
    with record_collectives() as calls, CollectiveCounter(mesh, config.parallel) as fsdp:
        once = alive.keeping(_RegionRun.once) if saved else _RegionRun.once
        hooks = (alive.pack, lambda x: x.x if isinstance(x, Handle) else x)
        # the counts are of experts with equal numbers of tokens
        balanced = mock.patch.object(route, "route_forward", balanced_route)
        with balanced, mock.patch.object(_RegionRun, "once", once):
            with saved_tensors_hooks(*hooks) if saved else nullcontext():
                model.gradients(batch, first_sample=0)
        model.gradient_norm()
    found |= {"collectives": Counter(calls), "fsdp": fsdp.take(), "saved": alive.most}
    found["gradients"] = nbytes(parameter.grad for parameter in model.parameters())
    moments = 0
    for part in model.parts:
        optimizer = build_optimizer(part, config.optimizer)
        optimizer.step()
        moments += sum(nbytes(v for v in state.values() if v.ndim) for state in optimizer.state.values())
    return found | {"optimizer": moments}


def on_any_axis(calls: Mapping[Collective, int]) -> Counter[tuple[str, int]]:
    """How often there are collectives of each operation and size."""
    found = Counter[tuple[str, int]]()
    for call, times in calls.items():
        found[call.operation, call.nbytes] += times
    return found


def check_rank(config: RunConfig, rank: int, found: dict, *, fsdp: bool) -> None:
    count = count_rank(config, rank)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(count, name) == found[name], (rank, name)
    plan = rank_plan(config, count, order_of(config))
    place = rank * config.parallel.pipeline_parallel // config.parallel.world_size
    assert predicted_memory(config, place).total == pytest.approx(plan.total, rel=0.02)
    layout = config.parallel
    if layout.context_parallel > 1 or layout.expert_parallel:  # FSDP2's, and tpformer's, some over the same ranks
        fsdp_alone = {c: n for c, n in found["fsdp"].items() if c.axis != "ep"}  # torch carries exchanges of both
        assert on_any_axis(count.collectives) == found["collectives"] + on_any_axis(fsdp_alone)
        return
    if fsdp:
        moved = {call: n for call, n in count.collectives.items() if call.axis.startswith("dp") and call.nbytes > 8}
        assert moved and moved == {call: n for call, n in found["fsdp"].items() if call.axis.startswith("dp")}
        return
    assert plan.peak.saved == found["saved"] > 0
    calls = {call: n for call, n in count.collectives.items() if call.operation not in ("send", "receive")}
    assert on_any_axis(calls) == found["collectives"]


TP4_NO_SP = {"tensor_parallel": 4, "sequence_parallel": False}
MLP, FULL = {"recompute": "mlp"}, {"recompute": "full"}
ONE, TWO = {"microbatch_size": 1}, {"microbatch_size": 2}
# so many of 8 experts that every token has some on each of two ranks: with few, evenly chosen ones leave fewer rows
EXCHANGED = {**MOE, "experts_per_token": 5}
CASES = {
    "tp2": (TP2, TWO, MODEL),
    "tp2-llama-mlp-recomputed": ({**TP2, **MLP}, {"microbatch_size": 4}, LLAMA),
    "pp2-tp2-regions": ({**PP2, **TP2, **FULL, "recompute_interval": 3}, {}, {**LLAMA, "n_layers": 6}),
    "tp4-no-sp": (TP4_NO_SP, {"dtype": "float64"}, LLAMA),
    "pp2": (PP2, {}, MODEL),
    "pp2-gpipe-tp2": ({**GPIPE, **TP2}, {}, LLAMA),
    "pp2-interleaved": (ILV, {}, MODEL),
    "pp4-naive": ({"pipeline_parallel": 4, "pipeline_schedule": "naive"}, {}, MODEL),
    "tp2-experts": (TP2, {**TWO, "balance_loss": 0.01}, MOE),
    "tp4-no-sp-experts-mlp-recomputed": ({**TP4_NO_SP, **MLP}, {"dtype": "float64"}, MOE),
    "pp2-tp2-experts-recomputed": ({**PP2, **TP2, **FULL}, {"balance_loss": 0.01}, {**MOE, "n_layers": 3}),
    "zero1": (ZERO1, ONE, MODEL),
    "zero2": (ZERO2, ONE, {**LLAMA, "n_layers": 2}),
    "zero3-tp2": ({**ZERO3, **TP2}, TWO, LLAMA),
    "zero3-regions": ({**ZERO3, **FULL, "recompute_interval": 2}, ONE, LLAMA),
    "zero3-hybrid": ({**ZERO3, "data_parallel_replicate": 2}, {**ONE, "dtype": "bfloat16"}, MODEL),
    "zero0-pp2": ({**PP2, "data_parallel_replicate": 2}, {"dtype": "bfloat16"}, MODEL),
    "zero1-zbv": ({**ZBV, **ZERO1}, {}, MODEL),
    "zero1-zbv-experts": ({**ZBV, **ZERO1}, {}, MOE),
    "zero3-tp2-experts": ({**ZERO3, **TP2}, {}, MOE),
    "zero2-interleaved": ({**ILV, **ZERO2}, {}, LLAMA),
    "cp2": ({"context_parallel": 2}, TWO, {**LLAMA, "n_layers": 2}),
    "cp2-tp2-recomputed": ({"context_parallel": 2, **TP2, **FULL}, TWO, MODEL),
    "cp2-zero3": ({"context_parallel": 2, **ZERO3}, ONE, LLAMA),
    "ep2-zero1": ({**ZERO1, "expert_parallel": 2}, ONE, {**EXCHANGED, "n_layers": 2}),
    "ep2-tp2-zero3-recomputed": ({**ZERO3, **TP2, "expert_parallel": 2, **FULL}, TWO, EXCHANGED),
    "ep4-tp2-cp2": ({"context_parallel": 2, **TP2, "expert_parallel": 4}, TWO, {**EXCHANGED, "experts_per_token": 7}),
}


@pytest.mark.parametrize("name", ["pp2", *in_turns(name for name in CASES if name != "pp2")])
def test_every_rank_holds_and_moves_what_was_counted(ranks, name):
    config = plan_config(configuration(*CASES[name]))
    fsdp = config.parallel.copies > 1
    found = ranks(config.parallel.world_size).run(real, config, not fsdp)
    for rank in range(config.parallel.world_size):
        check_rank(config, rank, found[rank], fsdp=fsdp)
