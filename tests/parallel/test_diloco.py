"""DiLoCo: what is refused, who sends what in which step, weights of replicas, and replicas that are out.

Whole runs beside replicas in one process are in tests/checks/test_replicas_check.py and `python -m bench replicas`.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import MODEL, build, merged, run_config, take_step
from testing import assert_identical, assert_same, on_every_rank
from turns import in_turns

from tpformer.config import build_config
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.distributed.encodings import ENCODINGS
from tpformer.parallel import exchange_named, exchange_of, local_part
from tpformer.parallel.fragments import Fragment, Held, held_by, layer_of
from tpformer.training.model import ModelParts

BATCH, TOKENS = 8, MODEL["seq_length"] + 1
TWO = MODEL | {"n_layers": 2}
PLAIN = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "warmup_steps": 0}  # whose steps add up


def config_of(exchange: str, model: dict | None = None, optimizer: dict | None = None, dtype="float64", **parallel):
    layout = {"data_parallel_replicate": 2, "exchange": exchange, **parallel}
    return run_config(layout, {**TWO, **(model or {})}, optimizer, global_batch_size=BATCH, dtype=dtype)


def rows_of(step: int, masked: int = 0) -> torch.Tensor:
    """A global batch; the first `masked` samples have one target."""
    rows = torch.randint(1, 100, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
    rows[:masked, 2:] = -1 - rows[:masked, 2:]
    return rows


def values_of(model: ModelParts) -> dict[str, torch.Tensor]:
    named = [each for part in model.parts for each in part.state_dict(keep_vars=True).items()]
    return {name: full_tensor(value.detach()).clone() for name, value in named}


def everywhere(values: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The values of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


@pytest.mark.parametrize(("exchange", "sections", "words"), [
    ("diloco", {"parallel": {"data_parallel_replicate": 1}}, "of which there is one: set data_parallel_replicate"),
    ("diloco every=0", {}, "every=0 must be at least 1"),
    ("diloco every=x", {}, "every='x': write a value such as 30"),
    ("diloco momentum=1", {}, r"momentum=1.0 must be in \[0, 1\)"),
    ("diloco rounds=3", {}, "unknown option of diloco"),
    ("diloco send=int4", {}, "send"),
    ("diloco every=4 fragments=3", {}, "fragments=3 does not divide every=4"),
    ("diloco every=4 agree=3", {}, "agree=3 does not divide every=4"),
    ("diloco every=4 fragments=2 delay=2", {}, "every 4 / 2 = 2 steps: lower delay"),
    ("diloco mix=0.5", {}, "without delay is nothing: set delay, or leave mix out"),
    ("diloco every=8 fragments=8", {}, "fragments=8 of model.n_layers=4 layers would be empty"),
    ("diloco", {"parallel": {"context_parallel": 2, "zero_stage": 0}}, "leave zero_stage out"),
    ("diloco", {"train": {"dtype": "float16"}}, 'set train.dtype = "bfloat16"'),
    ("diloco", {"log": {"noise_interval": 2}}, "compares gradients of the whole batch"),
])  # fmt: skip
def test_what_is_refused(exchange, sections, words):
    values = {"model": MODEL, "data": {"train": ["none"]}, "parallel": {"data_parallel_replicate": 2}}
    with pytest.raises(ValueError, match=words):
        exchange_of(build_config({**values, "train": {"dtype": "float64", "device": "cpu"}}, sections, {
            "parallel": {"exchange": exchange}}))  # fmt: skip


def test_rounds_that_are_equal_in_other_words():
    assert exchange_named("diloco every=30") == exchange_named("diloco") != exchange_named("diloco every=31")
    often, seldom = (exchange_named(f"diloco every=6{agree}") for agree in (" agree=3", ""))
    assert often == seldom, "when replicas agree decides no loss"
    steps = range(1, 13)
    assert [[*filter(each.meets, steps)] for each in (often, seldom)] == [[3, 6, 9, 12], [6, 12]]


def started(exchange: str, **options) -> tuple[ModelParts, list]:
    """A model whose replicas have begun."""
    model, optimizers = build(config_of(exchange, **options))
    model.exchange.begin()
    return model, optimizers


@on_every_rank(2)
def test_each_tensor_is_in_one_fragment_and_layers_take_turns():
    model, optimizers = started("diloco every=4 fragments=4", model={"n_layers": 4, "tie_embeddings": False})
    fragments = model.exchange._fragments
    names = [sorted(each.name for each in fragment) for fragment in fragments]
    together = [name for each in names for name in each]
    assert sorted(together) == sorted(name for name, _ in model.parts[0].named_parameters())
    assert [{layer_of(name) for name in each} for each in names] == [{0, None}, {1}, {2}, {3}]
    for step in range(1, 9):
        take_step(model, optimizers, rows_of(step), first=step * BATCH, clip_norm=0.0)
        changed, same = everywhere(values_of(model))
        equal = {layer_of(name) for name in changed if torch.equal(changed[name], same[name])}
        assert equal == {(step - 1) % 4} | ({None} if (step - 1) % 4 == 0 else set()), step


@pytest.mark.parametrize(("send", "parallel"), [
    ("int8", {"pipeline_parallel": 2}),
    *in_turns([("whole", {"data_parallel_shard": 2, "zero_stage": 3}), ("bfloat16", {"tensor_parallel": 2})]),
])  # fmt: skip
@on_every_rank(4)
def test_what_a_round_sends(send, parallel):
    """The elements of this rank's shards once in a round, whatever shares them, and 8 bytes for each weight."""
    model, _ = started(f"diloco every=3 send={send}", **parallel)
    (fragment,) = model.exchange._fragments
    sizes = [sum(each.own.numel() for each in bucket) for bucket in fragment.buckets]
    assert sum(sizes) == sum(local_part(each).numel() for each in model.parameters())
    with record_collectives() as found:
        fragment.send(torch.ones((), dtype=torch.float64))()
    wanted = [8 * size for size in sizes]  # float64
    if send != "whole":  # a gather's bytes are those of both replicas
        block, each = ENCODINGS[send].block, ENCODINGS[send].value_bytes
        wanted = [2 * round(-(-size // block) * block * each) for size in sizes]
    assert sum(nbytes for _, nbytes in found) == sum(wanted) + 8


@on_every_rank(2)
def test_a_round_sends_once():
    """Seven steps of rounds of three send twice; between rounds nothing goes over replicas at all."""
    model, optimizers = started("diloco every=3")
    quiet = []
    for step in range(1, 8):
        with record_collectives() as found:
            take_step(model, optimizers, rows_of(step), first=step * BATCH)
        quiet.append(sum(nbytes for _, nbytes in found))
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert quiet == [0, 0, 8 * elements + 8] * 2 + [0]


@on_every_rank(2)
def test_replicas_with_unequal_targets_count_by_them():
    """A round for each step of SGD is the step of one process, where a replica has fewer and fewer targets."""
    rates, unbiased = {"lr": 0.3, "clip_norm": 0.0}, {"bias": False}  # a key's bias has no gradient but rounding
    model, optimizers = started("diloco every=1 lr=1 momentum=0", model=unbiased, optimizer=PLAIN)
    alone, of_alone = build(config_of("library", unbiased, PLAIN))
    for step in range(1, 4):
        rows = rows_of(step, masked=step)
        for each, steps in ((model, optimizers), (alone, of_alone)):
            take_step(each, steps, rows, first=step * BATCH, **rates)
    wanted = values_of(alone)
    for name, value in values_of(model).items():
        assert_same(value, wanted[name], name)


def poisoned(model: ModelParts, replica: int):
    """On a replica gradients become NaN."""
    gradients = ModelParts.gradients

    def spoiled(self, *arguments, **options):
        loss = gradients(self, *arguments, **options)
        if dist.get_rank() == replica:
            local_part(next(iter(self.parameters())).grad).fill_(float("nan"))
        return loss

    return mock.patch.object(ModelParts, "gradients", spoiled)


@on_every_rank(2)
def test_a_step_that_one_replica_skips_is_no_part_of_the_mean():
    """The other replica's step alone decides, and its norm is finite."""
    model, optimizers = started("diloco every=1 lr=1 momentum=0", optimizer=PLAIN)
    with poisoned(model, 1):
        result = take_step(model, optimizers, rows_of(1), clip_norm=0.0)
    assert bool(result.skipped) == (dist.get_rank() == 1)
    alone, of_alone = build(config_of("diloco every=9", optimizer=PLAIN))
    take_step(alone, of_alone, rows_of(1), clip_norm=0.0)  # no round ends: each replica has its own
    wanted = everywhere(values_of(alone))[0]
    for name, value in values_of(model).items():
        assert_same(value, wanted[name], name)


@on_every_rank(2)
def test_a_replica_that_is_out_for_a_round_takes_the_others_parameters():
    """Its values do not enter the mean, not even one that is no number, and it goes on with the next round."""
    for fragments in ("", " fragments=2 delay=1 mix=0.5"):
        model, optimizers = started("diloco every=4 lr=0.7 momentum=0.9" + fragments)
        for step in range(1, 13):
            out = step in (5, 6, 7, 8)
            model.exchange.present = not (out and dist.get_rank() == 1)
            if out and dist.get_rank() == 1:
                local_part(model.parts[0].layers["1"].mlp.fc1.weight).data.fill_(float("nan"))
            take_step(model, optimizers, rows_of(step), first=step * BATCH)
            if step == 8 and not fragments:
                assert_identical(*everywhere(values_of(model)))
        model.exchange.finish()
        common = merged(everywhere(values_of(model)))
        assert all(value.isfinite().all() for value in common.values())


@on_every_rank(2)
def test_nobody_in_a_round_changes_nothing():
    model, optimizers = started("diloco every=2")
    for step in (1, 2):
        take_step(model, optimizers, rows_of(step), first=step * BATCH)
    before = values_of(model)
    model.exchange.present = False
    for step in (3, 4):
        take_step(model, optimizers, rows_of(step), first=step * BATCH)
    assert_identical(values_of(model), before)


@on_every_rank(2)
def test_replicas_that_begin_differently_are_told():
    model, optimizers = build(config_of("diloco"))
    if dist.get_rank() == 1:
        weight = model.parts[0].layers["1"].mlp.fc1.weight.data
        weight.copy_(weight.roll(1, 0))
    with pytest.raises(RuntimeError, match=r"replicas begin with other values of layers\.1\.mlp\.fc1\.weight"):
        take_step(model, optimizers, rows_of(1))


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_a_replica_of_no_weight_goes_on_from_the_common_values(weight):
    """And so does its copy in another part, such as a tied table's in the last stage."""
    own, common = torch.randn(2, 3, 4, dtype=torch.float64)
    copies = own.clone(), own.clone()
    held = Held("wte.weight", copies[0], common.clone(), torch.zeros(3, 4), "stages", [copies[1]])
    Fragment([held], dist.group.WORLD, None, torch.device("cpu")).rejoin(torch.tensor(weight, dtype=torch.float64))
    for copy in copies:
        assert_identical(copy, own if weight else common)
    assert_identical(held.start, common)


@pytest.mark.parametrize(("send", "dtype", "parallel"), [
    ("bfloat16", "bfloat16", {"tensor_parallel": 2}),
    *in_turns([("int8", "float32", {"pipeline_parallel": 2, "pipeline_schedule": "1F1B"})], first=0),
])  # fmt: skip
@on_every_rank(4)
def test_copies_have_equal_bits_whatever_is_sent(send, dtype, parallel):
    """Replicas, tensor-parallel ranks' copies of norms, and both stages' copies of a tied table. In 16 bits float32
    masters meet."""
    model, optimizers = started(f"diloco every=2 send={send}", dtype=dtype, **parallel)
    assert {each.start.dtype for each in held_by(model.parts, ())} == {torch.float32}
    for step in range(1, 5):
        take_step(model, optimizers, rows_of(step), first=step * BATCH)
    merged(everywhere(values_of(model)))
    assert model.exchange.apart is False


@on_every_rank(2)
def test_a_sum_in_fewer_bits_is_near_the_whole_one():
    """int8 rounds each block of 256 to a 254th of its range, bfloat16 to eight bits."""
    moved = {}
    for send in ("whole", "bfloat16", "int8"):
        model, optimizers = started(f"diloco every=2 lr=1 momentum=0 send={send}", dtype="float32")
        before = values_of(model)
        for step in (1, 2):
            take_step(model, optimizers, rows_of(step), first=step * BATCH)
        moved[send] = {name: value - before[name] for name, value in values_of(model).items()}
    for name, whole in moved["whole"].items():
        largest = max(float(each.abs().max()) for each in everywhere({name: whole})[0].values())
        assert (moved["bfloat16"][name] - whole).abs().max() <= largest * 2**-7, name
    worst = max(float((moved["int8"][name] - whole).abs().max()) for name, whole in moved["whole"].items())
    assert 0 < worst <= max(float(whole.abs().max()) for whole in moved["whole"].values()) * 2 / 127
