"""A parameter server at once is data parallelism, and late it is the one-process simulation of its order of updates."""

import copy
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import lost_ranks
import pytest
import torch
from testing import assert_identical, assert_same

from tpformer.config import RunConfig, build_config, check_config
from tpformer.config.arrivals import Arrivals
from tpformer.distributed import record_collectives
from tpformer.distributed.algorithms import ALGORITHMS
from tpformer.parallel import local_norms, scale_gradients
from tpformer.training.metrics import read_metrics
from tpformer.training.optimizer import build_optimizer
from tpformer.training.parameter_server import ParameterServer, owners_of
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step
from tpformer.training.trainer import Trainer
from tpformer.training.verify import one_process

MODEL = {"vocab_size": 128, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 2, "dropout": 0.1}
BATCH = 12


def config_of(server: str, ranks: int, optimizer: str = "adamw", **parallel: object) -> RunConfig:
    train = {"global_batch_size": BATCH, "microbatch_size": 1, "device": "cpu", "dtype": "float64"}
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


@pytest.mark.parametrize(("workers", "optimizer"), [(2, "adamw"), (3, "sgd")])
def test_at_once_it_is_data_parallelism_and_sends_what_the_formula_says(ranks, workers, optimizer):
    """Each rank's part is not exactly a P-th, so the busiest sends a little more."""
    config = config_of("sync", workers, optimizer)
    losses, norms, parameters, _ = ranks(workers).run(train, config_of("none", workers, optimizer), 3)[0]
    found = ranks(workers).run(train, config, 3)
    for mine in found:
        assert_same(mine[:2], (losses, norms), "losses and norms")
        assert_same(mine[2], parameters, "parameters")
        assert_identical(mine[2], found[0][2], "parameters of all ranks")
    sent = [each[3] for each in found]
    cost = ALGORITHMS["parameter_server"](workers, 8.0 * config.model.n_parameters)
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


@pytest.mark.parametrize(("arrivals", "optimizer"), [("0,0,1,0,2,0", "adamw"), ("2,1,2,2,0", "sgd")])
def test_late_it_is_its_simulation(ranks, arrivals, optimizer):
    config = config_of("stale", 3, optimizer, arrivals=arrivals)
    expected = simulate(config, 2)
    for _, _, parameters, _ in ranks(3).run(train, config, 2):
        assert_identical(parameters, expected, arrivals)


class SlowWorker(ParameterServer):
    """The last worker computes a microbatch until the others have made all updates that they may, or can."""

    def microbatch_gradients(self, rows, first_sample, step):
        deadline = time.monotonic() + 60
        while self.rank == self.ranks - 1 and not self.waited_for():
            assert time.monotonic() < deadline, "the others do not go on while this worker computes"
            time.sleep(0.001)
        return super().microbatch_gradients(rows, first_sample, step)

    def waited_for(self) -> bool:
        arrivals = self.arrivals
        too_stale = len(arrivals.order) - arrivals.versions[self.rank] == arrivals.bound
        return too_stale or list(arrivals.computing) == [self.rank]


def beside_a_slow_worker(config: RunConfig) -> tuple[list[list[int]], list[int], list[torch.Tensor], int]:
    """(order of each step, staleness of all updates, parameters, messages of the last step) of a rank."""
    model = build_model(config, run_mesh(config, "cpu"))
    server = SlowWorker(model, [build_optimizer(part, config.optimizer) for part in model.parts])
    orders, staleness = [], []
    for step in (1, 2):
        first = BATCH * (step - 1)
        with record_collectives() as calls:
            server.step(rows_of(first, BATCH), first_sample=first, step=step, lr=1e-2, clip_norm=0.5)
        orders.append(server.arrivals.order)
        staleness += server.arrivals.staleness
    sent = sum(name == "send" for name, _ in calls)
    return orders, staleness, [each.detach().clone() for each in model.parameters()], sent


@pytest.mark.parametrize(("bound", "its_share"), [(2, 4), (3, 3), (16, 1)])
def test_a_slow_worker_delays_the_others_by_the_bound_alone(ranks, bound, its_share):
    """The others' updates go on while it computes, until one more would be too stale. At once it has a third."""
    config = config_of("stale", 3, staleness=bound)
    found = ranks(3).run(beside_a_slow_worker, config)
    orders, staleness, parameters, _ = found[0]
    assert [order.count(2) for order in orders] == [its_share] * 2 and len(staleness) == 2 * BATCH
    assert max(staleness) == min(bound, BATCH - 1)
    assert all(orders == others for others, *_ in found), "all servers have the same order"
    if bound == 2:
        assert all(order[n : n + 3] != order[n + 1 : n + 2] * 3 for order in orders for n in range(BATCH - 3))
    assert_identical(parameters, simulate(config, 2, orders), "parameters of the simulation in this order")
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


def test_a_worker_that_dies_is_named(commands, tmp_path):
    names = ("sync", "stale")
    arguments = (Path(__file__).stem, "train_beside_a_dying_worker", str(tmp_path), "3", *names)
    code, _, err = commands.call(lost_ranks.main, *arguments).finish()
    assert code == 0, err
    for name in names:
        said = [each.read_text() for each in sorted(tmp_path.glob(f"{name}-*"))]
        assert len(said) == 2 and any("the parameter server's exchange failed on rank" in each for each in said), said
        assert any(": rank 2 has died, or did not answer in time" in each for each in said), said


# runs


def losses_of_runs(values: dict, servers: list[dict]) -> list[list[list[float]]]:
    """For each server: the losses of a whole run of four steps, and of one that stops after two and is resumed."""
    found = []
    for number, server in enumerate(servers):
        losses = []
        for name, ends in (("whole", [4]), ("parts", [2, 4])):
            directory = Path(f"{values['run']['dir']}-{name}-{number}")
            for steps in ends:
                changes = {
                    "run": {"dir": str(directory), "resume": True},
                    "parallel": server,
                    "train": {"steps": steps},
                }
                Trainer(build_config(values, changes)).run()
            losses.append([row["loss"] for row in read_metrics(directory / "metrics.jsonl")])
        found.append(losses)
    return found


def test_a_run_that_is_resumed_is_one_that_was_not(ranks, commands, tiny_values):
    more = {
        "data": {**tiny_values["data"], "valid": []},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "lr": 3e-3},
    }
    servers = [{"parameter_server": "sync"}, {"parameter_server": "stale", "arrivals": "0,1,1"}]
    servers = [{"data_parallel_replicate": 2, **server} for server in servers]
    train = {"train": {**tiny_values["train"], "microbatch_size": 1}}
    for whole, parts in ranks(2).run(losses_of_runs, {**tiny_values, **more, **train}, servers)[0]:
        assert whole == parts and len(whole) == 4 and whole[-1] < whole[0]
    run = f"{tiny_values['run']['dir']}-whole-1"
    code, out, err = commands.run("generate", run, "--max-new-tokens", "3")  # in one process, without workers
    assert code == 0, out + err
