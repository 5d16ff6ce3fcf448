"""Compressed sums of gradients: what they give, send and keep of what is lost, and that a run goes on from it."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from test_replicas import config_of, train

from tpformer.config import Layout, check_config
from tpformer.config.layout import COMPRESSIONS
from tpformer.distributed import record_collectives
from tpformer.distributed.reductions import reduce_by
from tpformer.parallel import replica_sums
from tpformer.parallel.compression import BLOCK, Compression, compression_of
from tpformer.training.checkpoint import Checkpointer, CheckpointError, load_checkpoint
from tpformer.training.checkpoint_files import step_path
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

SHAPES = [(40, 30), (30,), (3, 20, 25), (2, 2), (0, 30)]
N = sum(math.prod(shape) for shape in SHAPES)
KINDS = COMPRESSIONS[1:]
GOES_ON = torch.tensor(0.0)


def made(kind: str, **options: object) -> Compression:
    found = compression_of(Layout(compression=kind, **options), dist.group.WORLD, SHAPES)
    assert found is not None
    return found


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank))


def sums(kind: str, steps: int) -> dict:
    """Sums of several steps, the bytes of each collective of the last, and this rank's errors after each step."""
    compression, given, errors = made(kind), [], []
    for step in range(steps):
        x = drawn(step, dist.get_rank())
        with record_collectives() as sent:
            compression.add(x)
        compression.settle(GOES_ON)
        given.append(x)
        kept = {name: value for name, value in compression.state.items() if not name.startswith("right")}
        errors.append({name: value.clone() for name, value in kept.items()})
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


@pytest.mark.parametrize(("kind", "size"), [*itertools.product(KINDS, (2, 3))])
def test_what_is_lost_is_kept_and_what_is_sent_is_counted(ranks, kind, size):
    """All that went in, less all that came out, is what all ranks keep, after every step."""
    found = ranks(size).run(sums, kind, 4)
    total_in, total_out = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(4):
        given = [each["given"][step] for each in found]
        assert all(torch.equal(given[0], other) for other in given), "the same bits on all ranks"
        total_in += sum(drawn(step, rank).double() for rank in range(size))
        total_out += given[0].double()
        kept = sum(each["errors"][step]["error"][:N].double() for each in found)
        if "second" in found[0]["errors"][step]:
            kept += torch.cat([each["errors"][step]["second"] for each in found])[:N].double()
        assert (total_in - total_out - kept).abs().max() < 1e-5, step
        assert 0 < kept.abs().max() < 20
    assert [tuple(each) for each in found[0]["sent"]] == bytes_of(kind, size)


def lossless(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what a compression without error feedback gives, the sum in rank order) of numbers that it can hold."""
    pairs = []
    for step in range(2):
        x = drawn(step, dist.get_rank())
        if kind == "bfloat16":
            x = x.mul(4).round()
        if kind == "int8":  # of one rank alone, whose largest magnitude in a block is 127
            x = x.mul(30).round().clamp(-127, 127) * (dist.get_rank() == 1)
            x[::BLOCK] = 127 * (dist.get_rank() == 1)
        share = {"compression_share": 1.0} if kind == "topk" else {}
        expected = reduce_by("all_pairs", x.clone(), dist.group.WORLD)
        compression = made(kind, error_feedback=False, **share)
        compression.add(x)
        compression.settle(GOES_ON)
        assert not any(name in compression.state for name in ("error", "second"))
        pairs.append((x, expected))
    return pairs


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "topk"])
def test_without_loss_it_is_the_sum_bit_for_bit(ranks, kind):
    for pairs in ranks(3).run(lossless, kind):
        assert all(torch.equal(got, expected) for got, expected in pairs)


def skip_one(kind: str, bad: float) -> bool:
    """Whether a skipped step leaves the state as it was, though a value of one rank was not finite."""
    compression = made(kind)
    for step in range(2):
        compression.add(drawn(step, dist.get_rank()))
        compression.settle(GOES_ON)
    before = {name: value.clone() for name, value in compression.state.items()}
    x = drawn(2, dist.get_rank())
    x[7] = bad if dist.get_rank() == 1 else x[7]
    compression.add(x)
    assert not x.isfinite().all(), "a gradient that is not finite is seen on all ranks"
    compression.settle(torch.tensor(1.0))
    return all(torch.equal(before[name], value) for name, value in compression.state.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_keeps_nothing(ranks, kind, bad):
    assert ranks(2).run(skip_one, kind, bad) == [True, True]


SHARDED = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
PIPELINED = {"data_parallel_replicate": 2, "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}


def go_on(parallel: dict, directory) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a rank holds after four steps, without a stop, and with a save and a load after two."""
    ends = []
    for stops in (False, True):
        config = config_of(**parallel, n_layers=4)
        model = build_model(config, run_mesh(config, "cpu"))
        optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
        for step in range(1, 5):
            if stops and step == 3:
                checkpointer = Checkpointer(directory)
                checkpointer.save(2, model.parts, optimizers)
                checkpointer.wait()
                model = build_model(config, run_mesh(config, "cpu"))
                optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
                checkpointer.load(2, model.parts, optimizers)
            first, share = model.own_samples(8 * (step - 1), 8)
            rows = torch.arange(first, first + share)[:, None] * 7 % 50 + torch.arange(9)
            train_step(model, optimizers, rows, first_sample=first, step=step, lr=1e-2, clip_norm=1.0)
        ends.append([parameter.to_local().detach().clone() for parameter in model.parameters()])
    return ends[0], ends[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [SHARDED, PIPELINED], ids=["shards", "pipeline"])
def test_a_run_goes_on_bit_for_bit(ranks, tmp_path, kind, parallel):
    rank = {"compression_rank": 1} if kind == "powersgd" else {}
    for whole, resumed in ranks(4).run(go_on, {**parallel, "compression": kind, **rank}, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def after_zeros() -> float:
    """What PowerSGD gives of a gradient in rows of which it has only seen zeros."""
    compression = made("powersgd")
    for step in range(3):
        x = torch.zeros(N)
        if step:
            x[20 * 30 : 40 * 30] = drawn(step, dist.get_rank())[20 * 30 : 40 * 30]
        compression.add(x)
        compression.settle(GOES_ON)
    return float(x[: 40 * 30].abs().max())


def test_powersgd_sees_what_comes_after_zeros(ranks):
    """A right factor of zeros stayed zero: nothing of the matrix was ever sent again."""
    assert all(largest > 0.1 for largest in ranks(2).run(after_zeros))


def resume_with(directory, rank: int) -> tuple[list[tuple], str]:
    """Save PowerSGD of rank 1, and load it with another rank: shapes of what was kept, and the error's sum."""
    train(config_of(**SHARDED, compression="powersgd", compression_rank=1), 1, directory)
    config = config_of(**SHARDED, compression="powersgd", compression_rank=rank)
    model = build_model(config, run_mesh(config, "cpu"))
    optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
    load_checkpoint(step_path(directory, 1), model.parts, optimizers, group=dist.group.WORLD)
    states = [hook.compression.state for hook in replica_sums(model.parts[0]).values()]
    kept = {key.partition(".")[0] for state in states for key in state}
    return sorted(kept), all(bool(state["error"].any()) for state in states)


@pytest.mark.parametrize(("rank", "kept"), [(1, ["error", "right"]), (2, ["error"])])
def test_another_rank_of_powersgd_draws_its_factors_again(ranks, tmp_path, rank, kept):
    assert ranks(4).run(resume_with, tmp_path, rank) == [(kept, True)] * 4


def load_elsewhere(directory, other: dict) -> str:
    config = config_of(**SHARDED, compression="int8")
    train(config, 1, directory)
    config = config_of(**other)
    model = build_model(config, run_mesh(config, "cpu"))
    optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
    try:
        load_checkpoint(step_path(directory, 1), model.parts, optimizers, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return ""


def test_errors_of_another_layout_are_refused(ranks, tmp_path):
    for said in ranks(4).run(load_elsewhere, tmp_path / "one", {"data_parallel_replicate": 4, "compression": "int8"}):
        assert "for the ranks of another layout: go on in the layout that saved it, or without compression" in said
    assert ranks(4).run(load_elsewhere, tmp_path / "two", SHARDED) == [""] * 4, "without compression it is not needed"


def test_a_run_that_loses_nothing_is_the_run_without_compression(ranks):
    """Top-k of everything, without error feedback; and with what is lost, error feedback keeps the loss near."""
    whole = {"compression": "topk", "compression_share": 1.0, "error_feedback": False}
    (losses, _, parameters), *_ = ranks(4).run(train, config_of(data_parallel_replicate=4, **whole), 4)
    (expected, _, others), *_ = ranks(4).run(train, config_of(data_parallel_replicate=4, all_reduce="all_pairs"), 4)
    assert losses == expected and all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    for kind in KINDS:
        (compressed, _, _), *_ = ranks(4).run(train, config_of(**SHARDED, compression=kind), 4)
        assert compressed != expected and compressed[-1] == pytest.approx(expected[-1], rel=0.1), kind


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"compression": "int8", "data_parallel_replicate": 1}, "compression='int8' is about sums over replicas"),
        ({"compression": "int8", "all_reduce": "ring"}, "a compression has its own exchange, leave out one"),
        ({"compression": "int8", "reduce_dtype": "bfloat16"}, "compressed from float32, leave reduce_dtype out"),
        ({"compression_share": 0.5}, "compression_share=0.5 is of compression='topk', and it is 'none'"),
        ({"compression": "topk", "compression_rank": 2}, "compression_rank=2 is of compression='powersgd'"),
        # a shard has parameters that tensor-parallel ranks share, which would drift apart
        ({"compression": "int8", "tensor_parallel": 2}, "their copies of norms and biases; choose bfloat16"),
        ({"error_feedback": False}, "error_feedback=False without compression would do nothing"),
        ({"compression": "gzip"}, "parallel.compression='gzip': choose one of none, bfloat16"),
        ({"compression": "topk", "compression_share": 1.5}, "parallel.compression_share"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parallel, words):
    with pytest.raises(ValueError, match=words):
        config_of(**{"data_parallel_replicate": 2, **parallel})


@pytest.mark.parametrize(("section", "key", "value"), [("train", "dtype", "float16"), ("log", "noise_interval", 5)])
def test_what_would_keep_wrong_errors_is_refused(section, key, value):
    config = config_of(data_parallel_replicate=2, compression="int8")
    changed = dataclasses.replace(getattr(config, section), **{key: value})
    with pytest.raises(ValueError, match="parallel.compression='int8' keeps"):
        check_config(dataclasses.replace(config, **{section: changed}))
