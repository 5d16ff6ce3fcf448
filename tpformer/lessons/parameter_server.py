"""Training by a parameter server, to learn from: workers push gradients and pull parameters, at once or late.

Belongs here: the steps of both servers, on CPU processes. Every data-parallel rank is a worker, and the
server of a part of the parameters. In which order late gradients are taken is in arrivals.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.distributed import all_reduce
from tpformer.distributed.collectives import combine
from tpformer.distributed.local_gradients import clipping, local_norms, scale_gradients
from tpformer.exchange import StepResult

from .arrivals import Arrivals
from .reductions import Members

PUSH, PULL, TICKET = range(1, 4)  # tags
DONE, APPLY, SKIP = 0.0, 1.0, 2.0  # what a push begins with


def owners_of(sizes: Sequence[int], servers: int) -> list[int]:
    """Which server has each of the parameters of these sizes: the largest first, to the server that has least."""
    held, owners = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(servers), key=held.__getitem__)
        held[owners[index]] += sizes[index]
    return owners


class ParameterServer:
    """Takes the steps of a run on data-parallel ranks, each of which is a worker and the server of whole parameters.

    sync_server: each worker pushes its gradient of the global batch's loss, each server adds up in the order of
    workers, updates, and gives parameters back: the step of synchronous data parallelism.
    stale_server: each microbatch's gradient, of the mean loss over its own targets, is an update by itself. A worker
    that gets parameters goes on with the next microbatch that nobody has, so a slow one computes fewer. A step ends
    when all microbatches have had their updates; then all ranks hold the same parameters again.
    Memory: the optimizer's state of the own parameters; stale_server has a second copy of the model.
    Communicates: for each update a push to and a pull from each other server, of its parameters; stale_server also 8
    bytes from rank 0 to each other server, and at the end of a step a message that a worker is done and all parameters
    once.
    model, optimizers, loss: as for Exchange.steps.
    Errors: RuntimeError that names the rank, if one dies or does not answer within the group's timeout.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], loss: Callable[..., Tensor]) -> None:
        (self.part,), (self.optimizer,) = model.parts, optimizers
        self.dtype = next(self.part.parameters()).dtype
        if next(self.part.parameters()).is_cuda:
            raise ValueError(
                f"parallel.exchange={model.layout.exchange!r} works on CPU processes, to learn from, and this run has "
                f'a GPU: set train.device = "cpu"'
            )
        self.exchange = model.exchange
        self.model, self.loss, self.group = model, loss, model.groups["dp_replicate"]
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.members = Members("the parameter server's exchange", self.group, tuple(range(self.ranks)))
        self.owners = owners_of([parameter.numel() for parameter in model.parameters()], self.ranks)
        self.worker = copy.deepcopy(self.part) if self.exchange.changes_losses else self.part
        self.arrivals: Arrivals | None = None
        """The order of updates in the last step, if it was a stale one."""

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of tensors one after another, in the model's dtype."""
        nothing = torch.zeros(0, dtype=self.dtype)
        return torch.cat([nothing, *(tensor.detach().reshape(-1) for tensor in tensors)])

    def elements(self, server: int) -> int:
        """How many elements the parameters of a server have."""
        return sum(parameter.numel() for parameter in self.of_server(self.part, server))

    def of_server(self, part: nn.Module, server: int) -> list[nn.Parameter]:
        """The parameters of a copy of the model that a server has."""
        return [each for each, owner in zip(part.parameters(), self.owners, strict=True) if owner == server]

    def step(
        self,
        batch: Tensor,
        *,
        first_sample: int,
        lr: float,
        clip_norm: float,
        scaler: None = None,
        watch: None = None,
    ) -> StepResult:
        """Take a step, as train_step. batch: this rank's slice, but for stale_server the whole global batch.

        stale_server: lr and clip_norm hold for each update; norm is the largest of them; an update whose gradient is
        not finite changes nothing, and then `skipped` is 1, though others have changed parameters.
        """
        for parameter, owner in zip(self.part.parameters(), self.owners, strict=True):
            if owner != self.rank:
                self.optimizer.state.pop(parameter, None)  # a checkpoint gave all ranks all of it
        take = self._stale if self.exchange.changes_losses else self._sync
        return take(batch, first_sample, lr, clip_norm)

    # all at once

    def own_gradients(self, batch: Tensor, first_sample: int) -> Tensor:
        """Fill .grad with this worker's share of the gradient; returns the mean loss over the global batch."""
        return self.model.gradients(batch, first_sample=first_sample)

    def _sync(self, batch: Tensor, first_sample: int, lr: float, clip_norm: float) -> StepResult:
        loss = self.own_gradients(batch, first_sample)
        gradients = [
            self.flat([held(p.grad) for p in self.of_server(self.part, server)]) for server in range(self.ranks)
        ]
        parts = [gradients[self.rank].clone() for _ in range(self.ranks)]
        sends = [(rank, gradients[rank]) for rank in self.others]
        self.members.exchange(sends, [(rank, parts[rank]) for rank in self.others])
        self.optimizer.zero_grad()
        give(self.of_server(self.part, self.rank), combine(parts, torch.add), as_gradients=True)
        local = local_norms(self.model.parameters())
        norm = all_reduce(local.square().sum().reshape(1), self.group)[0].sqrt()
        skipped = (~(loss.isfinite() & norm.isfinite())).float()
        self.optimizer.update(lr, skipped, clipping(norm, clip_norm))
        self._pull_all()
        return StepResult(loss, norm, skipped, local, None, None, None, None)

    def _pull_all(self) -> None:
        """Give this server's parameters to all others, and take theirs."""
        own = self.flat(self.of_server(self.part, self.rank))
        taken = {rank: torch.empty(self.elements(rank), dtype=self.dtype) for rank in self.others}
        self.members.exchange([(rank, own) for rank in self.others], list(taken.items()))
        for rank, values in taken.items():
            give(self.of_server(self.part, rank), values)

    # late

    def microbatch_gradients(self, rows: Tensor, first_sample: int) -> tuple[Tensor, Tensor]:
        """Fill .grad of the worker's copy with the gradient of a microbatch's mean loss; returns its summed loss and
        targets."""
        targets = (rows[:, 1:] >= 0).sum()
        loss = self.loss(self.worker, rows, first_sample)
        (loss / targets.clamp(min=1)).backward()
        return loss.detach(), targets

    def _stale(self, batch: Tensor, first_sample: int, lr: float, clip_norm: float) -> StepResult:
        size = self.model.microbatch_size
        self.arrivals = Arrivals(self.ranks, len(batch) // size, self.exchange.staleness, self.exchange.given)
        server = Server(self, self.arrivals, lr)
        parameters = list(self.worker.parameters())
        give(parameters, self.flat(list(self.part.parameters())))
        local = torch.zeros(len(parameters), dtype=torch.float64)
        sums = torch.zeros(2, dtype=torch.float64)
        number: int | None = self.arrivals.computing.get(self.rank)
        norms, skipped = torch.zeros((), dtype=torch.float64), torch.zeros(())
        with server:
            while number is not None:
                first = number * size
                loss, targets = self.microbatch_gradients(batch[first : first + size], first_sample + first)
                sums += torch.stack([loss.double(), targets.double()])
                own = local_norms(parameters)
                norm = own.square().sum().sqrt()
                finite = bool(norm.isfinite() & loss.isfinite())
                scale_gradients(parameters, clipping(norm, clip_norm) if finite else 0.0)
                number = server.push_and_pull(APPLY if finite else SKIP)
                local, norms = torch.maximum(local, own), torch.maximum(norms, norm)
                skipped = skipped.clamp(min=float(not finite))
            server.done()
        self._pull_all()
        sums = all_reduce(sums, self.group)
        both = all_reduce(torch.stack([norms, skipped.double()]), self.group, "max")
        loss = sums[0] / sums[1].clamp(min=1)
        return StepResult(loss, both[0], both[1].float(), local, None, None, None, None)


class Server:
    """A rank's server through a stale step, and the worker's side of its exchange: a context.

    A thread for each other worker takes its pushes and answers with parameters. Rank 0 decides the order of updates and
    tells the other servers; each applies an update when its gradient is there and its turn has come.
    """

    def __init__(self, owner: ParameterServer, arrivals: Arrivals, lr: float) -> None:
        self.owner, self.arrivals, self.lr = owner, arrivals, lr
        self.rank, self.others = owner.rank, owner.others
        self.masters = owner.of_server(owner.part, self.rank)
        self.turn = threading.Condition()
        self.arrived: dict[int, Tensor] = {}  # by worker, as they come
        self.order: list[int] = []  # decided, and applied up to the length of arrivals.order
        self.replies: dict[int, Tensor] = {}
        self.error: Exception | None = None
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Server:
        jobs: list[Callable[[], None]] = [partial(self._serve, worker) for worker in self.others]
        if self.rank:
            jobs.append(self._take_tickets)
        self.threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            for thread in self.threads:
                thread.join()
            self._check()

    def flag(self, value: float) -> Tensor:
        """What a message begins with."""
        return torch.tensor([value], dtype=self.owner.dtype)

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # the worker's thread raises it
            with self.turn:
                self.error = self.error or error
                self.turn.notify_all()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _send(self, x: Tensor, rank: int, tag: int) -> None:
        self.owner.members.exchange([(rank, x)], [], tag)

    def _receive(self, x: Tensor, rank: int, tag: int) -> Tensor:
        self.owner.members.exchange([], [(rank, x)], tag)
        return x

    # the server's side

    def _serve(self, worker: int) -> None:
        """Take the pushes of a worker, and answer each, until it is done."""
        push = torch.empty(1 + self.owner.elements(self.rank), dtype=self.owner.dtype)
        while float(self._receive(push, worker, PUSH)[0]) != DONE:
            self._send(self._exchange(worker, push), worker, PULL)

    def _take_tickets(self) -> None:
        """Hear from rank 0 whose update is next, until all are decided."""
        for _ in range(self.arrivals.microbatches):
            ticket = self._receive(torch.empty(1, dtype=torch.int64), 0, TICKET)
            with self.turn:
                self.order.append(int(ticket))
                self._apply()

    def _exchange(self, worker: int, push: Tensor) -> Tensor:
        """Give a push to this server, and wait for its answer: the next microbatch, or -1, and parameters."""
        with self.turn:
            self.arrived[worker] = push
            self._apply()
            self.turn.wait_for(lambda: worker in self.replies or self.error is not None)
            self._check()
            return self.replies.pop(worker)

    @torch.no_grad()
    def _apply(self) -> None:
        """Decide what can be decided, and apply what has its turn. Its caller holds the lock."""
        while True:
            if self.rank == 0 and len(self.order) == len(self.arrivals.order):
                chosen = self.arrivals.choose(self.arrived)
                if chosen is not None:
                    self.order.append(chosen)
                    for rank in self.others:
                        self._send(torch.tensor([chosen]), rank, TICKET)
            done = len(self.arrivals.order)
            if done == len(self.order) or self.order[done] not in self.arrived:
                return
            worker = self.order[done]
            push = self.arrived.pop(worker)
            following = self.arrivals.take(worker)
            if float(push[0]) == APPLY:
                give(self.masters, push[1:], as_gradients=True)
                self.owner.optimizer.update(self.lr, torch.zeros(()))
            head = self.flag(-1.0 if following is None else float(following))
            self.replies[worker] = torch.cat([head, self.owner.flat(self.masters)])
            self.turn.notify_all()

    # the worker's side

    def push_and_pull(self, flag: float) -> int | None:
        """Push the gradients of the worker's copy to all servers, and fill it with what they answer; returns the next
        microbatch."""
        worker, answers = self.owner.worker, {}
        for rank in [*self.others, self.rank]:
            gradients = [held(parameter.grad) for parameter in self.owner.of_server(worker, rank)]
            push = torch.cat([self.flag(flag), self.owner.flat(gradients)])
            if rank == self.rank:
                answers[rank] = self._exchange(rank, push)
            else:
                self._send(push, rank, PUSH)
                answers[rank] = torch.empty_like(push)
        for rank in self.others:
            self._receive(answers[rank], rank, PULL)
        for rank, answer in answers.items():
            give(self.owner.of_server(worker, rank), answer[1:])
        worker.zero_grad()
        following = int(answers[self.rank][0])
        return None if following < 0 else following

    def done(self) -> None:
        """Tell all servers that this worker has no more to push."""
        for rank in self.others:
            self._send(torch.full((1 + self.owner.elements(rank),), DONE, dtype=self.owner.dtype), rank, PUSH)


def held(gradient: Tensor | None) -> Tensor:
    """A gradient; every parameter of the models that run here has one."""
    assert gradient is not None
    return gradient


@torch.no_grad()
def give(parameters: Sequence[nn.Parameter], values: Tensor, as_gradients: bool = False) -> None:
    """Take values apart into parameters, or into their gradients."""
    for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        if as_gradients:
            parameter.grad = part.view_as(parameter).clone()
        else:
            parameter.copy_(part.view_as(parameter))
