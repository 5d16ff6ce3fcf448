"""A parameter server at once is data parallelism, and late it is the one-process simulation of its order of updates."""

import copy
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Sequence

import lost_ranks
import pytest
import torch
import torch.distributed as dist

from tpformer.config import RunConfig, build_config, check_config, to_toml
from tpformer.config.arrivals import Arrivals
from tpformer.distributed import record_collectives
from tpformer.distributed.algorithms import ALGORITHMS
from tpformer.parallel import local_norms, scale_gradients
from tpformer.training.optimizer import build_optimizer
from tpformer.training.parameter_server import ParameterServer, owners_of
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step
from tpformer.training.verify import one_process

MODEL = {"vocab_size": 128, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 2, "dropout": 0.1}
BATCH = 12


def config_of(
    server: str, ranks: int, optimizer: str = "adamw", dtype: str = "float64", **parallel: object
) -> RunConfig:
    train = {"global_batch_size": BATCH, "microbatch_size": 1, "device": "cpu", "dtype": dtype}
    layout = {"data_parallel_replicate": ranks, "parameter_server": server, **parallel}
    sections = {"model": MODEL, "parallel": layout, "train": train, "optimizer": {"name": optimizer}}
    config = build_config({**sections, "data": {"train": ["unused"]}})
    check_config(config)
    return config


def rows_of(first: int, share: int) -> torch.Tensor:
    return torch.arange(first, first + share)[:, None] * 7 % 50 + torch.arange(9)


# at once


def train(config: RunConfig, steps: int) -> tuple[list[float], list[float], list[torch.Tensor], list[int]]:
    """(losses, norms, parameters, bytes of the messages of the last step) of this rank."""
    model = build_model(config, run_mesh(config, "cpu"))
    optimizers = [build_optimizer(part, config.optimizer) for part in model.parts]
    served = config.parallel.parameter_server != "none"
    server = ParameterServer(model, optimizers) if served else None
    losses, norms = [], []
    for step in range(1, steps + 1):
        first, share = model.own_samples(BATCH * (step - 1), BATCH)
        options = {"first_sample": first, "step": step, "lr": 1e-2, "clip_norm": 0.5}
        with record_collectives() as calls:
            batch = rows_of(first, share)
            result = server.step(batch, **options) if server else train_step(model, optimizers, batch, **options)
        losses.append(float(result.loss))
        norms.append(float(result.norm))
    held = [getattr(each, "full_tensor", each.detach)().detach().clone() for each in model.parameters()]
    return losses, norms, held, [nbytes for name, nbytes in calls if name == "send"]


@pytest.mark.parametrize(("ranks_", "optimizer"), [(2, "adamw"), (3, "sgd"), (4, "adamw")])
def test_at_once_it_is_data_parallelism(ranks, ranks_, optimizer):
    found = ranks(ranks_).run(train, config_of("sync", ranks_, optimizer), 4)
    losses, norms, parameters, _ = ranks(ranks_).run(train, config_of("none", ranks_, optimizer), 4)[0]
    for mine in found:
        assert mine[0] == pytest.approx(losses, rel=1e-12) and mine[1] == pytest.approx(norms, rel=1e-12)
        for a, b in zip(mine[2], parameters, strict=True):
            assert (a - b).abs().max() < 1e-12
        assert all(torch.equal(a, b) for a, b in zip(mine[2], found[0][2], strict=True)), "the same bits on all ranks"


def test_pushes_and_pulls_are_those_of_the_formula(ranks):
    """Each rank's part is not exactly a P-th, so the busiest sends a little more."""
    config = config_of("sync", 3)
    sent = [each[3] for each in ranks(3).run(train, config, 2)]
    cost = ALGORITHMS["parameter_server"](3, 8.0 * config.model.n_parameters)
    assert sum(map(len, sent)) == cost.messages and sum(map(sum, sent)) == cost.values
    assert cost.busiest <= max(map(sum, sent)) < 1.1 * cost.busiest


def test_the_servers_share_the_parameters():
    assert owners_of([5, 4, 3, 2], 2) == [0, 1, 1, 0]
    assert owners_of([1, 1], 3) == [0, 1]


# late


def simulate(config: RunConfig, steps: int, orders: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
    """One process: each worker has parameters of its own, and the server's are updated in the given order.

    orders: of each step, or None: by parallel.arrivals.
    """
    model = one_process(config, "cpu")
    model.parts[0].init_weights()
    (part,), ranks = model.parts, config.parallel.data_parallel_replicate
    optimizer = build_optimizer(part, config.optimizer)
    for step in range(1, steps + 1):
        pattern = (
            itertools.cycle(map(int, config.parallel.arrivals.split(","))) if orders is None else iter(orders[step - 1])
        )
        copies, waiting = [copy.deepcopy(part) for _ in range(ranks)], list(range(ranks, BATCH))
        has = {rank: rank for rank in range(ranks)}
        while has:
            worker = next(pattern)
            if worker not in has:
                continue
            first = BATCH * (step - 1) + has[worker]
            rows = rows_of(first, 1)
            copies[worker].zero_grad()
            loss = copies[worker](rows[:, :-1], targets=rows[:, 1:], sample_index=torch.tensor([first]), step=step)
            (loss / 8).backward()
            parameters = list(copies[worker].parameters())
            norm = local_norms(parameters).square().sum().sqrt()
            scale_gradients(parameters, torch.clamp(0.5 / (norm + 1e-6), max=1.0))
            for mine, its in zip(part.parameters(), parameters, strict=True):
                mine.grad = its.grad
            optimizer.update(1e-2, torch.tensor(0.0))
            copies[worker] = copy.deepcopy(part)
            has.pop(worker)
            if waiting:
                has[worker] = waiting.pop(0)
    return [each.detach().clone() for each in part.parameters()]


@pytest.mark.parametrize(
    ("arrivals", "optimizer"), [("0,1,2", "adamw"), ("0,0,1,0,2,0", "adamw"), ("2,1,2,2,0", "sgd")]
)
def test_late_it_is_its_simulation(ranks, arrivals, optimizer):
    config = config_of("stale", 3, optimizer, arrivals=arrivals)
    expected = simulate(config, 2)
    for _ in range(2):
        for _, _, parameters, _ in ranks(3).run(train, config, 2):
            assert all(torch.equal(mine, its) for mine, its in zip(parameters, expected, strict=True))


class Uneven(ParameterServer):
    """Each microbatch takes a random time, and on the last worker three times as long."""

    def microbatch_gradients(self, rows, first_sample, step):
        time.sleep(random.Random(1000 * first_sample + self.rank).random() * 0.01 * (3 if self.rank == 2 else 1))
        return super().microbatch_gradients(rows, first_sample, step)


def as_they_come(config: RunConfig) -> tuple[list[list[int]], list[int], list[torch.Tensor], int]:
    """(order of each step, staleness of all updates, parameters, messages of the last step) of a rank."""
    model = build_model(config, run_mesh(config, "cpu"))
    server = Uneven(model, [build_optimizer(part, config.optimizer) for part in model.parts])
    orders, staleness = [], []
    for step in range(1, 4):
        first = BATCH * (step - 1)
        with record_collectives() as calls:
            server.step(rows_of(first, BATCH), first_sample=first, step=step, lr=1e-2, clip_norm=0.5)
        orders.append(server.arrivals.order)
        staleness += server.arrivals.staleness
    sent = sum(name == "send" for name, _ in calls)
    return orders, staleness, [each.detach().clone() for each in model.parameters()], sent


@pytest.mark.parametrize("bound", [2, 3, 16])
def test_as_they_come_no_update_is_too_stale_and_the_order_is_told(ranks, bound):
    config = config_of("stale", 3, staleness=bound)
    found = ranks(3).run(as_they_come, config)
    orders, staleness, parameters, _ = found[0]
    assert max(staleness) <= bound and len(staleness) == 3 * BATCH
    assert all(orders == others for others, *_ in found), "all servers have the same order"
    if bound == 2:
        assert all(order[n : n + 3] != order[n + 1 : n + 2] * 3 for order in orders for n in range(BATCH - 3))
    expected = simulate(config, 3, orders)
    assert all(torch.equal(mine, its) for mine, its in zip(parameters, expected, strict=True))
    # each of 12 updates is pushed to and pulled from two servers; rank 0 tells two; three are done; all is given out
    assert sum(sent for *_, sent in found) == BATCH * (2 + 2 + 2) + 3 * 2 + 3 * 2


@pytest.mark.parametrize("seed", range(20))
def test_any_arrivals_end_and_keep_the_bound(seed):
    """Workers of any speed: there is always one that may go on, also if one waits as long as it can."""
    draw = random.Random(seed)
    workers, microbatches = draw.randint(1, 6), draw.randint(1, 60)
    bound = max(0, workers - 1 + draw.randint(0, 5))
    arrivals, arrived = Arrivals(workers, microbatches, bound), []
    speed = [draw.choice([1, 1, 5, 20]) for _ in range(workers)]
    while not arrivals.finished:
        if (worker := arrivals.choose(arrived)) is not None:
            arrived.remove(worker)
            arrivals.take(worker)
            continue
        late = [each for each in arrivals.computing if each not in arrived]
        assert late, "gradients wait, and nobody computes"
        arrived.append(draw.choices(late, [1 / speed[each] for each in late])[0])
    assert len(arrivals.order) == microbatches and max(arrivals.staleness) <= bound


def test_an_order_that_is_too_stale_is_refused():
    arrivals = Arrivals(2, 10, 3, [0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="update 4 is of worker 1, whose parameters are 4 updates old.*staleness=3"):
        while not arrivals.finished:
            arrivals.take(arrivals.choose(arrivals.computing))


class Straggler(ParameterServer):
    """Every microbatch takes as long, and on the last worker four times as long if it is slow."""

    slow = 1.0

    def wait(self, microbatches: int) -> None:
        time.sleep(0.05 * microbatches * (self.slow if self.rank == self.ranks - 1 else 1.0))

    def own_gradients(self, batch, first_sample, step):
        self.wait(len(batch))
        return super().own_gradients(batch, first_sample, step)

    def microbatch_gradients(self, rows, first_sample, step):
        self.wait(len(rows))
        return super().microbatch_gradients(rows, first_sample, step)


def seconds_of_a_step(server: str, slow: float) -> float:
    config = config_of(server, 3, dtype="float32")
    model = build_model(config, run_mesh(config, "cpu"))
    straggler = Straggler(model, [build_optimizer(part, config.optimizer) for part in model.parts])
    straggler.slow = slow
    found = []
    for step in range(2):
        first, share = model.own_samples(0, 48)
        dist.barrier()
        began = time.perf_counter()
        straggler.step(rows_of(first, share), first_sample=first, step=step + 1, lr=1e-3, clip_norm=1.0)
        found.append(time.perf_counter() - began)
    return min(found)


def test_a_slow_worker_delays_all_at_once_and_hardly_late(ranks):
    """3 workers, 48 microbatches of 50 ms, one worker four times as slow: late 48 / 2.25 turns, not 48 / 3."""
    times = {(server, slow): max(ranks(3).run(seconds_of_a_step, server, slow))
             for server in ("sync", "stale") for slow in (1.0, 4.0)}  # fmt: skip
    assert times["sync", 4.0] / times["sync", 1.0] > 2.2, times
    assert times["stale", 4.0] / times["stale", 1.0] < 1.75, times


def one_bad(config: RunConfig) -> tuple[float, float, bool]:
    """(skipped, loss) of a step in which one microbatch's gradient is not finite, and whether parameters are finite."""
    model = build_model(config, run_mesh(config, "cpu"))
    server = ParameterServer(model, [build_optimizer(part, config.optimizer) for part in model.parts])
    gradients = server.microbatch_gradients

    def spoiled(rows, first_sample, step):
        found = gradients(rows, first_sample, step)
        if first_sample == 5:
            next(server.worker.parameters()).grad.fill_(float("nan"))
        return found

    server.microbatch_gradients = spoiled
    before = [each.detach().clone() for each in model.parameters()]
    result = server.step(rows_of(0, BATCH), first_sample=0, step=1, lr=1e-2, clip_norm=0.5)
    after = list(model.parameters())
    moved = all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return float(result.skipped), float(result.loss), moved and all(bool(each.isfinite().all()) for each in after)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_told(ranks):
    for skipped, loss, fine in ranks(3).run(one_bad, config_of("stale", 3)):
        assert skipped == 1 and 3 < loss < 6 and fine


class Dying(ParameterServer):
    """The last worker dies behind its first gradient of a step, or before it if it is a late one."""

    def own_gradients(self, batch, first_sample, step):
        loss = super().own_gradients(batch, first_sample, step)
        if self.rank == self.ranks - 1:
            lost_ranks.die()
        return loss

    def microbatch_gradients(self, rows, first_sample, step):
        if self.rank == self.ranks - 1:
            lost_ranks.die()
        return super().microbatch_gradients(rows, first_sample, step)


def train_beside_a_dying_worker(server: str) -> None:
    config = config_of(server, 3)
    model = build_model(config, run_mesh(config, "cpu"))
    dying = Dying(model, [build_optimizer(part, config.optimizer) for part in model.parts])
    first, share = model.own_samples(0, BATCH)
    dying.step(rows_of(first, share), first_sample=first, step=1, lr=1e-2, clip_norm=0.5)


def test_a_worker_that_dies_is_named(tmp_path):
    heard = lost_ranks.heard(tmp_path, __file__, "train_beside_a_dying_worker", 3, ("sync", "stale"))
    for said in heard.values():
        assert len(said) == 2 and any("the parameter server's exchange failed on rank" in each for each in said), said
        assert any(": rank 2 has died, or did not answer in time" in each for each in said), said


# runs


@pytest.mark.parametrize("server", [{"parameter_server": "sync"}, {"parameter_server": "stale", "arrivals": "0,1,1"}])
def test_a_run_that_is_resumed_is_one_that_was_not(commands, tmp_path, server):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of {number * 7}\n" for number in range(300)))
    assert commands.run("data", "build", str(text), "--out", str(tmp_path / "data"), "--tokenizer", "bytes")[0] == 0
    sections = {
        "model": MODEL | {"vocab_size": 257}, "data": {"train": [str(tmp_path / "data")]},
        "parallel": {"data_parallel_replicate": 2, **server}, "optimizer": {"schedule": "constant", "warmup_steps": 0},
        "train": {"steps": 4, "global_batch_size": 8, "microbatch_size": 1, "device": "cpu"},
        "checkpoint": {"interval": 2}, "log": {"interval": 1, "plot": False, "tensorboard": False},
    }  # fmt: skip
    rows = {}
    for name, ends in (("whole", [4]), ("parts", [2, 4])):
        for steps in ends:
            config = build_config(sections, {"run": {"dir": str(tmp_path / name), "resume": True}})
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
            (tmp_path / "run.toml").write_text(to_toml(config))
            code, out, err = commands.run("pretrain", str(tmp_path / "run.toml"))
            assert code == 0, out + err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    code, out, err = commands.run("generate", str(tmp_path / "whole"), "--max-new-tokens", "3")
    assert code == 0, out + err  # one process, without workers
    assert rows["whole"] == rows["parts"] and len(rows["whole"]) == 4 and rows["whole"][-1] < rows["whole"][0]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"parameter_server": "async"}, "parallel.parameter_server='async': choose one of none, sync, stale"),
        ({"parameter_server": "sync", "tensor_parallel": 2}, "not with tensor_parallel=2: leave one of them out"),
        ({"parameter_server": "sync", "data_parallel_replicate": 1}, "not with data_parallel_replicate=1"),
        ({"parameter_server": "stale", "all_reduce": "ring"}, "not with all_reduce='ring'"),
        ({"parameter_server": "stale", "staleness": 1}, "staleness=1 with 3 workers: .* at least 2 are needed"),
        ({"parameter_server": "stale", "arrivals": "0,1"}, "must name each of the 3 workers, 0 to 2"),
        ({"parameter_server": "stale", "arrivals": "0,1,2,3"}, "must name each of the 3 workers, 0 to 2"),
        ({"parameter_server": "stale", "reduce_dtype": "bfloat16"}, "not with reduce_dtype='bfloat16'"),
        ({"parameter_server": "stale", "staleness": 2, "arrivals": "0,0,0,0,1,2"}, "update 4 is of worker 1"),
        ({"staleness": 5}, "parallel.staleness=5 is of parameter_server='stale'"),
        ({"parameter_server": "sync", "arrivals": "0,1,2"}, "parallel.arrivals='0,1,2' is of parameter_server='stale'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parallel, words):
    layout = {"data_parallel_replicate": 3, **parallel}
    train = {"global_batch_size": 12, "microbatch_size": 1, "device": "cpu"}
    config = build_config({"model": MODEL, "parallel": layout, "train": train, "data": {"train": ["unused"]}})
    with pytest.raises(ValueError, match=words):
        check_config(config)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "dtype", "bfloat16"), ("train", "device", "cuda"), ("log", "norm_interval", 2)],
)
def test_what_a_server_does_not_have_is_refused(section, key, value):
    config = config_of("sync", 3)
    changed = dataclasses.replace(getattr(config, section), **{key: value})
    with pytest.raises(ValueError, match=f"not with {section}.{key}={value}: leave that out"):
        check_config(dataclasses.replace(config, **{section: changed}))
