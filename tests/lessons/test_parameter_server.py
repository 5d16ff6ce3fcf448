"""A parameter server at once is data parallelism, and late it is the one-process simulation of its order of updates."""

import copy
import itertools
import random
import time
from functools import partial
from types import SimpleNamespace

import lost_ranks
import pytest
import torch
from small_runs import build, run_config
from testing import assert_identical, assert_same
from turns import in_turns, of_turn

from tpformer.config import RunConfig
from tpformer.distributed import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.lessons.algorithms import ALGORITHMS
from tpformer.lessons.arrivals import Arrivals
from tpformer.lessons.parameter_server import ParameterServer, owners_of
from tpformer.parallel import exchange_named, local_norms, scale_gradients
from tpformer.training.model import summed_loss
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import train_step
from tpformer.training.verify import one_process

MODEL = {"vocab_size": 128, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 2, "dropout": 0.1}
BATCH, BAD = 12, 5


def config_of(exchange: str, ranks: int, optimizer: str = "adamw") -> RunConfig:
    layout = {"data_parallel_replicate": ranks, "exchange": exchange}
    train = {"global_batch_size": BATCH, "microbatch_size": 1, "dtype": "float64"}
    return run_config(layout, MODEL, {"name": optimizer}, **train)


def rows_of(first: int, share: int) -> torch.Tensor:
    return torch.arange(first, first + share)[:, None] * 7 % 50 + torch.arange(9)


def train(config: RunConfig, steps: int, kind: type[ParameterServer] = ParameterServer) -> SimpleNamespace:
    """What a rank finds in the steps of a run. sent: bytes of each message of the last step."""
    model, optimizers = build(config)
    server = kind(model, optimizers, summed_loss) if model.exchange.takes_steps else None
    take_step = server.step if server else partial(train_step, model, optimizers)
    results, orders, staleness = [], [], []
    for step in range(1, steps + 1):
        first, share = model.own_samples(BATCH * (step - 1), BATCH)
        with record_collectives() as calls:
            results.append(take_step(rows_of(first, share), first_sample=first, lr=1e-2, clip_norm=0.5))
        if model.exchange.changes_losses:
            orders.append(server.arrivals.order)
            staleness += server.arrivals.staleness
    return SimpleNamespace(
        numbers=[[float(each.loss), float(each.norm)] for each in results],
        skipped=[float(each.skipped) for each in results],
        parameters=[full_tensor(each.detach()).clone() for each in model.parameters()],
        sent=[nbytes for name, nbytes in calls if name == "send"], orders=orders, staleness=staleness,
    )  # fmt: skip


def test_at_once_it_is_data_parallelism_and_sends_what_the_formula_says(ranks):
    """Each rank's part is not exactly a P-th, so the busiest sends a little more."""
    config = config_of("sync_server", 3)
    expected, found = ranks(3).run(train, config_of("library", 3), 3)[0], ranks(3).run(train, config, 3)
    for mine in found:
        assert_same(mine.numbers, expected.numbers, "losses and norms")
        assert_same(mine.parameters, expected.parameters, "parameters")
        assert_identical(mine.parameters, found[0].parameters, "parameters of all ranks")
    cost = ALGORITHMS["parameter_server"](3, 8.0 * config.model.n_parameters)
    total = [sum(each.sent) for each in found]
    assert sum(len(each.sent) for each in found) == cost.messages and sum(total) == cost.values
    assert cost.busiest <= max(total) < 1.1 * cost.busiest
    assert owners_of([5, 4, 3, 2], 2) == [0, 1, 1, 0] and owners_of([1, 1], 3) == [0, 1]


def simulate(config: RunConfig, steps: int, orders: list[list[int]] | None = None, bad: int = -1) -> list[torch.Tensor]:
    """One process: each worker has parameters of its own, and the server's are updated in the given order. orders: of
    each step, or None: by the exchange's arrivals. bad: the sample whose gradient updates nothing."""
    model = one_process(config, "cpu")
    model.parts[0].init_weights()
    (part,), ranks = model.parts, config.parallel.data_parallel_replicate
    optimizer = build_optimizer(part, config.optimizer)
    for step in range(1, steps + 1):
        arrivals = itertools.cycle(exchange_named(config.parallel.exchange).given)
        pattern = arrivals if orders is None else iter(orders[step - 1])
        copies, waiting = [copy.deepcopy(part) for _ in range(ranks)], list(range(ranks, BATCH))
        has = {rank: rank for rank in range(ranks)}
        while has:
            if (worker := next(pattern)) not in has:
                continue
            first = BATCH * (step - 1) + has[worker]
            rows = rows_of(first, 1)
            copies[worker].zero_grad()
            loss = copies[worker](rows[:, :-1], targets=rows[:, 1:], sample_index=torch.tensor([first]), step=0)
            (loss / 8).backward()
            parameters = list(copies[worker].parameters())
            norm = local_norms(parameters).square().sum().sqrt()
            scale_gradients(parameters, torch.clamp(0.5 / (norm + 1e-6), max=1.0))
            for mine, its in zip(part.parameters(), parameters, strict=True):
                mine.grad = its.grad
            optimizer.update(1e-2, torch.tensor(float(first == bad)))
            copies[worker] = copy.deepcopy(part)
            has.pop(worker)
            if waiting:
                has[worker] = waiting.pop(0)
    return [each.detach().clone() for each in part.parameters()]


class SlowWorker(ParameterServer):
    """The last worker computes a microbatch until the others have made all updates that they may, or can."""

    def microbatch_gradients(self, rows, first_sample):
        deadline = time.monotonic() + 60
        while self.rank == self.ranks - 1 and not self.waited_for():
            assert time.monotonic() < deadline, "the others do not go on while this worker computes"
            time.sleep(0.001)
        return super().microbatch_gradients(rows, first_sample)

    def waited_for(self) -> bool:
        arrivals = self.arrivals
        too_stale = len(arrivals.order) - arrivals.versions[self.rank] == arrivals.bound
        return too_stale or list(arrivals.computing) == [self.rank]


@pytest.mark.parametrize(("bound", "its_share"), [(2, 4), *in_turns([(16, 1)], first=0)])
def test_a_slow_worker_delays_the_others_by_the_bound_alone(ranks, bound, its_share):
    """The others' updates go on while it computes, until one more would be too stale. At once it has a third."""
    config = config_of(f"stale_server staleness={bound}", 3)
    found = ranks(3).run(train, config, 2, SlowWorker)
    orders, staleness = found[0].orders, found[0].staleness
    assert [order.count(2) for order in orders] == [its_share] * 2 and len(staleness) == 2 * BATCH
    assert max(staleness) == min(bound, BATCH - 1)
    assert all(orders == each.orders for each in found), "all servers have the same order"
    if bound == 2:
        assert all(order[n : n + 3] != order[n + 1 : n + 2] * 3 for order in orders for n in range(BATCH - 3))
    assert_identical(found[0].parameters, simulate(config, 2, orders), "parameters of the simulation in this order")
    # each of 12 updates is pushed to and pulled from two servers; rank 0 tells two; three are done; all is given out
    assert sum(len(each.sent) for each in found) == BATCH * (2 + 2 + 2) + 3 * 2 + 3 * 2


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


class Spoiled(ParameterServer):
    """The gradients of one microbatch are no numbers."""

    def microbatch_gradients(self, rows, first_sample):
        found = super().microbatch_gradients(rows, first_sample)
        if first_sample == BAD:
            next(self.worker.parameters()).grad.fill_(float("nan"))
        return found


@pytest.mark.parametrize(("arrivals", "optimizer"), [("", "adamw"), *in_turns([("2,1,2,2,0", "sgd")], first=1)])
def test_late_it_is_its_simulation_in_which_a_gradient_that_is_not_finite_changes_nothing(ranks, arrivals, optimizer):
    """In the order of arrivals, or in any other; there one gradient is no number, which is told."""
    config = config_of(f"stale_server arrivals={arrivals}", 3, optimizer)
    by_rank = ranks(3).run(train, config, 2, ParameterServer if arrivals else Spoiled)
    expected = simulate(config, 2) if arrivals else simulate(config, 2, by_rank[0].orders, BAD)
    for found in by_rank:
        assert found.skipped == [float(not arrivals), 0] and 3 < found.numbers[0][0] < 6
        assert_identical([found.orders, found.parameters], [by_rank[0].orders, expected], arrivals)


class Dying(ParameterServer):
    """The last worker dies behind its first gradient of a step, or before it if it is a late one."""

    def own_gradients(self, *arguments):
        loss = super().own_gradients(*arguments)
        if self.rank == self.ranks - 1:
            lost_ranks.die()
        return loss

    def microbatch_gradients(self, *arguments):
        if self.rank == self.ranks - 1:
            lost_ranks.die()
        return super().microbatch_gradients(*arguments)


def train_beside_a_dying_worker(server: str) -> None:
    train(config_of(server, 3), 1, Dying)


@of_turn(2)
def test_a_worker_that_dies_is_named(commands, tmp_path):
    heard = lost_ranks.heard(commands, tmp_path, train_beside_a_dying_worker, 3, ("sync_server", "stale_server"))
    for said in heard.values():
        assert len(said) == 2 and any("the parameter server's exchange failed on rank" in each for each in said), said
        assert any(": rank 2 has died, or did not answer in time" in each for each in said), said
