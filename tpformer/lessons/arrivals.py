"""The order in which a stale parameter server takes the gradients of its workers.

Belongs here: the order of updates, bounded staleness, and which microbatch a worker computes next. No tensors, no
processes: parameter_server.py asks it, and servers.py has it check a given order before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Arrivals:
    """The updates of one step. Each is the gradient of one microbatch, by one worker.

    Worker r begins with microbatch r. With update n its worker gets the parameters after it, and microbatch
    workers + n, as long as there is one.
    staleness: how many updates may lie between a gradient's parameters and its own update.
    given:   the workers in the order in which gradients are taken, again and again, without those that have none left;
             empty: gradients are taken as they arrive.
    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter server (NeurIPS 2013),
    with updates in the place of a worker's clock.
    """

    def __init__(self, workers: int, microbatches: int, staleness: int, given: Sequence[int] = ()) -> None:
        self.workers, self.microbatches, self.bound, self.given = workers, microbatches, staleness, given
        self.computing = {worker: worker for worker in range(min(workers, microbatches))}
        """The microbatch of each worker that has one."""
        self.versions = [0] * workers
        """How many updates there had been when each worker got its parameters."""
        self.order: list[int] = []
        self.staleness: list[int] = []
        """How many updates lay between each update and its gradient's parameters."""
        self._turn = 0

    @property
    def finished(self) -> bool:
        """Whether every microbatch has had its update."""
        return not self.computing

    def choose(self, arrived: Iterable[int]) -> int | None:
        """The worker whose update is next, of those whose gradients have arrived, in this order; None: wait.

        A gradient waits if its update would make that of a slower worker too stale.
        """
        if self.given and self.computing:
            while self.given[self._turn % len(self.given)] not in self.computing:
                self._turn += 1
            worker = self.given[self._turn % len(self.given)]
            return worker if worker in arrived else None
        return next((worker for worker in arrived if self._may(worker)), None)

    def take(self, worker: int) -> int | None:
        """Count this worker's update; returns its next microbatch, or None. ValueError if it is too stale."""
        stale = len(self.order) - self.versions[worker]
        if stale > self.bound:
            raise ValueError(
                f"update {len(self.order)} is of worker {worker}, whose parameters are {stale} updates old, and "
                f"staleness={self.bound}: raise it, or let the worker come earlier in arrivals"
            )
        self.order.append(worker)
        self.staleness.append(stale)
        self.versions[worker] = len(self.order)
        self._turn += 1
        following = self.workers + len(self.order) - 1
        if following < self.microbatches:
            self.computing[worker] = following
            return following
        del self.computing[worker]
        return None

    def _may(self, worker: int) -> bool:
        """Whether all others can still be in time after it, if those with the oldest parameters come first."""
        others = sorted(self.versions[other] for other in self.computing if other != worker)
        return all(len(self.order) + 1 + place - version <= self.bound for place, version in enumerate(others))
