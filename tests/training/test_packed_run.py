"""Runs with packed activations have the bits of others, also where a step overflows on a rank and is repeated."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from small_runs import build, run_config, take_step
from testing import all_exponents, assert_identical, on_every_rank
from tiny_runs import rows, values_with
from turns import in_turns

from tpformer.config import RunConfig, build_config
from tpformer.kernels.pack import reference
from tpformer.kernels.route import reference as route
from tpformer.ops import packing
from tpformer.parallel import local_part
from tpformer.training.trainer import Trainer
from tpformer.training.verify import verify_config

MODEL = {"vocab_size": 60, "seq_length": 64, "n_layers": 2, "hidden_size": 128, "n_heads": 4, "dropout": 0.1}
EXPERTS = {
    "n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64, "first_dense_layers": 1, "activation": "swiglu",
    "bias": False, "router_bias": True,
}  # fmt: skip
BATCH, STEPS = 8, 2
LAYOUTS = {  # layout, model, and which packed tensor overflows: (rank, step, which of the tensors that it packs)
    "pp2": ({"pipeline_parallel": 2, "recompute": "mlp"}, MODEL, (0, 1, 3)),
    "zbv": ({"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}, {**MODEL, "n_layers": 4}, (1, 1, 5)),
    "zero3": ({"context_parallel": 2, "zero_stage": 3}, MODEL, (1, 1, 1)),
    "compressed": ({"data_parallel_replicate": 2, "exchange": "powersgd"}, MODEL, (0, 2, 2)),
    "experts": ({"tensor_parallel": 2}, {**MODEL, **EXPERTS}, (1, 2, 4)),
    "experts without a token": ({"tensor_parallel": 2}, {**MODEL, **EXPERTS}, ()),
}


def config_of(parallel: dict, model: dict, packs: bool) -> RunConfig:
    train = {"global_batch_size": BATCH, "microbatch_size": 4, "dtype": "bfloat16"}
    return run_config({**parallel, "pack_activations": packs}, model, **train)


def overflow_at(rank: int, step: int, call: int, now: dict[str, int]):
    """On one rank, the packed tensor number `call` of a step overflows, and the host does not know."""
    pack = reference.pack

    def broken(x):
        now["calls"] += 1
        if dist.get_rank() != rank or (now["step"], now["calls"]) != (step, call):
            return pack(x)
        return pack(all_exponents(x))

    return mock.patch.multiple(reference, pack=broken)


def one_sided(logits, policy, bias=None):
    """In place of a router's decision: all tokens go to the first experts, which are the first rank's."""
    chosen = torch.arange(policy.k, dtype=torch.int32).expand(len(logits), policy.k).contiguous()
    return chosen, torch.ones(len(logits), policy.k, dtype=logits.dtype), logits.softmax(1)


def run_steps(name: str, packs: bool) -> tuple:
    """(losses and norms as texts, parameters of this rank, repeats of each step, loads of experts). Where no tensor
    overflows the host knows of each whether it fits."""
    parallel, model, broken = LAYOUTS[name]
    parts, optimizers = build(config_of(parallel, model, packs))
    now, numbers, repeats, loads = {"step": 0, "calls": 0}, [], [], []
    broken = broken if packs else ()
    patched = overflow_at(*broken, now) if broken else nullcontext()
    idle = mock.patch.object(route, "route_forward", one_sided) if "without" in name else nullcontext()
    with patched, idle, mock.patch.object(packing, "host_knows", lambda counts: not broken):
        for step in range(1, STEPS + 1):
            now |= {"step": step, "calls": 0}
            rows = torch.randint(60, (BATCH, 65), generator=torch.Generator().manual_seed(step))
            result = take_step(parts, optimizers, rows, lr=3e-3)
            numbers.append((float(result.loss).hex(), float(result.norm).hex(), float(result.skipped)))
            loads.append(None if result.loads is None else result.loads.tolist())
            if packs:
                repeats.append(int(result.packing[3]))
    return numbers, [local_part(p.detach()).clone() for p in parts.parameters()], repeats, loads


IN_SUITE = ("experts", "experts without a token")


@pytest.mark.parametrize("name", [*IN_SUITE, *in_turns(name for name in LAYOUTS if name not in IN_SUITE)])
def test_a_step_that_overflows_on_one_rank_is_computed_again_on_all_and_no_other_is(ranks: WorkerPool, name) -> None:
    plain, packed = (ranks(2).run(run_steps, name, packs) for packs in (False, True))
    for (numbers, values, _, loads), (found, own, repeats, own_loads) in zip(plain, packed, strict=True):
        assert found == numbers and own_loads == loads
        assert_identical(own, values, name)
        assert repeats == [int(each in LAYOUTS[name][2][1:2]) for each in range(1, STEPS + 1)]


@on_every_rank(1)
def test_rows_of_metrics_say_what_was_packed(tiny_values) -> None:
    train, found = {"steps": 2, "dtype": "bfloat16", "device": "cpu"}, []
    values = values_with(tiny_values, model=MODEL | {"vocab_size": 257}, train=train, data={"valid": []})
    for packs in (False, True):
        run = {"dir": f"{values['run']['dir']}-{packs}"}
        Trainer(build_config(values, {"run": run, "parallel": {"pack_activations": packs}})).run()
        found.append(rows(run["dir"]))
    for row, other in zip(*found, strict=True):
        assert all(row[key] == other[key] for key in ("step_loss", "grad_norm"))
        assert "pack_escapes" not in row
        assert 0 < other["pack_escapes"] < 1e-3 and other["pack_left"] == other["pack_repeats"] == 0


def test_verifying_leaves_packing_out() -> None:
    parallel = verify_config(config_of({"pack_layers": "0"}, MODEL, True)).parallel
    assert not parallel.pack_activations and parallel.pack_layers == ""
