"""Compressed sums of gradients: what they give, send and keep of what is lost, and that a run goes on from it."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from small_runs import build
from test_all_reduces import config_of, load, save, take_step, train
from testing import assert_identical, on_every_rank
from turns import in_turns, of_turn

from tpformer.distributed import record_collectives
from tpformer.distributed.encodings import BLOCK
from tpformer.lessons.compression import Compression
from tpformer.lessons.reductions import reduce_by
from tpformer.parallel import exchange_named, exchange_of
from tpformer.training.checkpoint import CheckpointError

SHAPES = [(40, 30), (30,), (3, 20, 25), (2, 2), (0, 30)]
N = sum(math.prod(shape) for shape in SHAPES)
GOES_ON = torch.tensor(0.0)
SHARDED = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
PIPELINED = {"n_layers": 4, "data_parallel_replicate": 2, "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}


def made(text: str) -> Compression:
    return exchange_named(text).compression(dist.group.WORLD, SHAPES)


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank))


def sums(kind: str, steps: int) -> dict:
    """Sums of several steps, the bytes of each collective of the last, and this rank's errors after each step. Then
    steps that are skipped, because a value of one rank is not finite, leave the state as it was."""
    compression, given, errors = made(kind), [], []
    for step in range(steps):
        x = drawn(step, dist.get_rank())
        with record_collectives() as sent:
            compression.add(x)
        compression.settle(GOES_ON)
        given.append(x)
        before = {name: value.clone() for name, value in compression.state.items()}
        errors.append({name: value for name, value in before.items() if not name.startswith("right")})
    for bad in (math.nan, math.inf):
        x = drawn(steps, dist.get_rank())
        x[7] = bad if dist.get_rank() == 1 else x[7]
        compression.add(x)
        assert not x.isfinite().all(), "a gradient that is not finite is seen on all ranks"
        compression.settle(torch.tensor(1.0))
        assert_identical(compression.state, before, f"after a step with {bad}")
    return {"given": given, "sent": sent, "errors": errors}


def bytes_of(kind: str, ranks: int) -> list[tuple[str, int]]:
    """What a compression says that it sends: collectives, and the bytes of their full tensors."""
    if kind == "bfloat16":
        padded = -(-N // ranks) * ranks
        return [("all_to_all", 2 * padded), ("all_gather", 2 * padded)]
    if kind == "int8":
        padded = -(-N // (ranks * BLOCK)) * ranks * BLOCK
        both = [padded, 4 * padded // BLOCK]
        return [(name, size) for name in ("all_to_all", "all_gather") for size in both]
    if kind == "topk":
        return [("all_gather", 4 * ranks * math.ceil(0.01 * N))] * 2
    rows, columns = 40 + 3 * 20, 30 + 25
    return [("all_reduce", 4 * 4 * rows), ("all_reduce", 4 * 4 * columns), ("all_reduce", 4 * (30 + 4))]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "topk", "powersgd"])
def test_what_is_lost_is_kept_unless_a_step_is_skipped_and_what_is_sent_is_counted(ranks, kind, size):
    """All that went in, less all that came out, is what all ranks keep, after every step."""
    found = ranks(size).run(sums, kind, 4)
    total_in, total_out, largest = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64), 0.0
    for step in range(4):
        given = [each["given"][step] for each in found]
        assert all(torch.equal(given[0], other) for other in given), "the same bits on all ranks"
        total_in += sum(drawn(step, rank).double() for rank in range(size))
        total_out += given[0].double()
        kept = sum(each["errors"][step]["error"][:N].double() for each in found)
        if "second" in found[0]["errors"][step]:
            kept += torch.cat([each["errors"][step]["second"] for each in found])[:N].double()
        # Each rank adds what it has kept and subtracts what it sends, a sum over the ranks adds size - 1 times and does
        # so, too: each rounds by half an eps of a number that is at most as large as all that comes in and is kept
        rounded = [drawn(step, rank) for rank in range(size)]
        rounded += [x for each in found for x in each["errors"][step].values()]
        largest += sum(float(x.abs().max()) for x in rounded)
        bound = (3 * size + 1) * torch.finfo(torch.float32).eps / 2 * largest
        assert (total_in - total_out - kept).abs().max() <= bound, step
        assert 0 < kept.abs().max() < 20
    assert [tuple(each) for each in found[0]["sent"]] == bytes_of(kind, size)


@on_every_rank(3)
def test_without_loss_it_is_the_sum_bit_for_bit() -> None:
    """Without error feedback numbers that a compression can hold are added up in rank order."""
    for kind, step in itertools.product(("bfloat16", "int8", "topk"), range(2)):
        x = drawn(step, dist.get_rank())
        if kind == "bfloat16":
            x = x.mul(4).round()
        if kind == "int8":  # of one rank alone, whose largest magnitude in a block is 127
            x = x.mul(30).round().clamp(-127, 127) * (dist.get_rank() == 1)
            x[::BLOCK] = 127 * (dist.get_rank() == 1)
        expected = reduce_by("all_pairs", x.clone(), dist.group.WORLD)
        compression = made(f"{kind} feedback=false" + " share=1.0" * (kind == "topk"))
        compression.add(x)
        compression.settle(GOES_ON)
        assert not any(name in compression.state for name in ("error", "second"))
        assert torch.equal(x, expected), kind


@pytest.mark.parametrize(("kind", "parallel"), [
    ("int8", SHARDED), *in_turns([("powersgd rank=1", PIPELINED), ("topk", SHARDED)], first=1)
])  # fmt: skip
@on_every_rank(4)
def test_a_run_learns_and_goes_on_bit_for_bit(tmp_path, kind, parallel):
    config = config_of(**parallel, exchange=kind)
    model, optimizers = build(config)
    first = take_step(model, optimizers, 1)
    save(tmp_path, 1, model, optimizers)
    states = [each.state for each in model.exchange.units.values()]
    assert states and all(state["error"].any() for state in states), "something is lost"
    assert take_step(model, optimizers, 2) < first
    again, its_optimizers = build(config)
    load(tmp_path, 1, again, its_optimizers)
    take_step(again, its_optimizers, 2)
    assert_identical(*([parameter.to_local() for parameter in each.parameters()] for each in (again, model)))


@on_every_rank(2)
def test_powersgd_sees_what_comes_after_zeros() -> None:
    """A right factor of zeros stayed zero: nothing of the matrix was ever sent again."""
    compression = made("powersgd")
    for step in range(3):
        x = torch.zeros(N)
        if step:
            x[20 * 30 : 40 * 30] = drawn(step, dist.get_rank())[20 * 30 : 40 * 30]
        compression.add(x)
        compression.settle(GOES_ON)
    assert x[: 40 * 30].abs().max() > 0.1


@of_turn(0)
@on_every_rank(4)
def test_errors_are_for_the_layout_that_saved_them(tmp_path):
    """PowerSGD of another rank draws its factors again; without compression errors are not needed."""
    saved = {**SHARDED, "exchange": "powersgd rank=1"}
    model, optimizers = build(config_of(**saved))
    take_step(model, optimizers, 1)
    save(tmp_path, 1, model, optimizers)
    for exchange, kept in (("powersgd rank=1", {"error", "right"}), ("powersgd rank=2", {"error"}), ("library", set())):
        model, optimizers = build(config_of(**SHARDED, exchange=exchange))
        load(tmp_path, 1, model, optimizers)
        states = [each.state for each in getattr(model.exchange, "units", {}).values()]
        assert all(state["error"].any() for state in states)
        assert {key.partition(".")[0] for state in states for key in state} == kept
    model, optimizers = build(config_of(**saved | {"data_parallel_replicate": 4, "data_parallel_shard": 1}))
    words = "for the ranks of another layout: go on in the layout that saved it, or without compression"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, 1, model, optimizers)


@on_every_rank(4)
def test_a_run_that_loses_nothing_is_the_run_without_compression() -> None:
    both = ("topk share=1.0 feedback=false", "all_pairs")
    runs = [train(config_of(data_parallel_replicate=4, exchange=each), 2) for each in both]
    assert_identical(*([losses, parameters] for losses, _, parameters in runs))


@pytest.mark.parametrize(("exchange", "parallel", "words"), [
    ("ring", {"data_parallel_replicate": 1}, "='ring' is about sums over replicas, of which .* one"),
    ("star", {}, "parallel.exchange='star': choose one of library, diloco, driver"),
    ("gzip", {}, "parallel.exchange='gzip': choose one of library, .* bfloat16"),
    ("", {}, "parallel.exchange='': choose one of library, diloco, driver"),
    ("library twice", {}, "parallel.exchange='library twice': library has no options"),
    ("int8", {"data_parallel_replicate": 1}, "exchange='int8' is about sums over replicas"),
    ("int8", {"reduce_dtype": "bfloat16"}, "compressed from float32, leave reduce_dtype out"),
    ("ring share=0.5", {}, "exchange='ring share=0.5': ring has no options: leave 'share=0.5' out"),
    ("topk rank=2", {}, "exchange='topk rank=2': unknown option of topk 'rank': known: feedback, share"),
    ("topk shar=2", {}, "exchange='topk shar=2': unknown option of topk 'shar': did you mean 'share'"),
    ("topk share", {}, "exchange='topk share': 'share' is not one OPTION=VALUE more"),
    ("topk share=0.5 share=1", {}, "'share=1' is not one OPTION=VALUE more"),
    # a shard has parameters that tensor-parallel ranks share, which would drift apart
    ("int8", {"tensor_parallel": 2}, "their copies of norms and biases; choose bfloat16"),
    ("int8 feedback=no", {}, "exchange='int8 feedback=no': feedback='no': write true or false"),
    ("topk share=much", {}, "share='much': write a value such as 0.01"),
    ("topk share=1.5", {}, r"share=1.5 must be in \(0, 1\]"),
    ("powersgd rank=0", {}, "rank=0 must be at least 1"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(exchange, parallel, words):
    with pytest.raises(ValueError, match=words):
        exchange_of(config_of(**{"data_parallel_replicate": 2, **parallel}, exchange=exchange))


@pytest.mark.parametrize(("section", "key", "value"), [("train", "dtype", "float16"), ("log", "noise_interval", 5)])
def test_what_would_keep_wrong_errors_is_refused(section, key, value):
    config = config_of(data_parallel_replicate=2, exchange="int8")
    changed = dataclasses.replace(getattr(config, section), **{key: value})
    with pytest.raises(ValueError, match="parallel.exchange='int8' keeps"):
        exchange_of(dataclasses.replace(config, **{section: changed}))
