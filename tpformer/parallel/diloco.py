"""DiLoCo: replicas train by themselves for a round of steps, and then take one outer step together.

Belongs here: the options of parallel.exchange = "diloco", when a round ends, whose turn it is, and what a checkpoint
has of it. The tensors are in fragments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig, check_choice
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.encodings import ENCODINGS
from tpformer.exchange import NamedExchange

from .fragments import Fragment, Held, Sum, check_equal, held_by, layer_of

WHOLE = "whole"
MOMENTUM, FLIGHT, COUNTS, TARGETS = "momentum.", "flight.", "flight_counts", "targets."


@dataclass
class DiLoCo(NamedExchange):
    """Gradients are not summed over replicas; parameters are, once in `every` steps.

    A replica's loss is the mean over its own samples of a step, and so is its gradient norm, by which it clips. At the
    end of a round delta = start - parameters is averaged over replicas, each weighted by its targets in that round;
    then m = momentum m + delta, start = start - lr (delta + momentum m), parameters = start.
    every:     steps of a round.
    lr, momentum: of the outer step.
    fragments: the layers are dealt out by their index, with the rest of the model beside layer 0; one fragment is sent
               every `every` / fragments steps.
    delay:     steps after which a sent fragment is taken, beside which it travels.
    mix:       the share of its own value that a replica keeps then.
    send:      whole, bfloat16 or int8.
    agree:     steps after which replicas agree whether to stop; 0: when a round ends.
    Communicates: what Fragment.send says, for all elements of a rank's shards once in `every` steps.
    Memory: twice the shards, in the dtype of the parameters.
    Source: arXiv:2311.08105 (DiLoCo), arXiv:2501.18512 (streaming: fragments, delay and mix).
    """

    RANGES = {
        **{"every": "[1, inf)", "lr": "(0, inf)", "momentum": "[0, 1)", "fragments": "[1, inf)"},
        **{"delay": "[0, inf)", "mix": "[0, 1)", "agree": "[0, inf)"},
    }
    sums_replicas = changes_losses = keeps_apart = True

    every: int = 30
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    send: str = WHOLE
    agree: int = field(default=0, compare=False)
    present: bool = field(default=True, init=False, compare=False)
    """Whether this replica takes part in the next mean. One that does not, because it trained on bad samples or is
    being replaced, has the common parameters when a round ends. Equal on all ranks of the replica."""

    def __post_init__(self) -> None:
        self._parts: Sequence[nn.Module] = ()
        self._tied: Sequence[nn.Parameter] = ()
        self._replicas: ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._fragments: list[Fragment] = []
        self._step = 0
        self._sent = [-1] * self.fragments
        """The step after which each fragment was sent last."""
        self._flight: tuple[int, Callable[[], Sum]] | None = None
        """The fragment that is on its way, and what waits for it."""
        self._targets = torch.zeros(self.fragments, dtype=torch.float64)
        """For each fragment the targets that this replica has trained on since it was sent."""
        self._loaded: dict[str, Tensor] = {}
        """Of a fragment that was on its way: what a checkpoint has of it."""

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """ValueError for options that contradict each other, a single replica, and what a replica's own steps leave
        without meaning."""
        self.check_replicas(layout)
        what = f"parallel.exchange={self.text!r}"
        check_choice(f"{what}: send", self.send, (WHOLE, *ENCODINGS))
        for name in ("fragments", "agree"):
            if (number := getattr(self, name)) and self.every % number:
                raise ValueError(f"{what}: {name}={number} does not divide every={self.every}: choose a divisor of it")
        if self.delay >= self._gap:
            raise ValueError(
                f"{what}: delay={self.delay} and a fragment is sent every {self.every} / {self.fragments} = "
                f"{self._gap} steps: lower delay, so that each has been taken before the next one leaves"
            )
        if self.mix and not self.delay:
            raise ValueError(
                f"{what}: mix={self.mix:g} keeps what a replica learns while a fragment travels, which without delay "
                "is nothing: set delay, or leave mix out"
            )
        if layout.zero == 0 and layout.context_parallel > 1:
            raise ValueError(
                f"{what} with zero_stage=0 and context_parallel={layout.context_parallel}: ranks of one replica add up "
                f"gradients and replicas do not, so leave zero_stage out"
            )
        if run is not None:
            self._check_run(what, run)

    def _check_run(self, what: str, run: RunConfig) -> None:
        if self.fragments > run.model.n_layers:
            raise ValueError(
                f"{what}: fragments={self.fragments} of model.n_layers={run.model.n_layers} layers would be empty: "
                "lower it"
            )
        if run.train.dtype == "float16":
            raise ValueError(
                f"{what} and train.dtype=float16, whose loss scale each replica would find for itself: set "
                f'train.dtype = "bfloat16"'
            )
        if run.log.noise_interval:
            raise ValueError(
                f"{what} and log.noise_interval={run.log.noise_interval}, which compares gradients of the whole batch: "
                f"leave one of them out"
            )

    @property
    def _gap(self) -> int:
        """Steps between two fragments."""
        return self.every // self.fragments

    def meets(self, step: int) -> bool:
        return step % (self.agree or self.every) == 0

    def unit(self, name: str, shapes: Sequence[tuple[int, ...]], group: ProcessGroup) -> Callable[[Tensor], object]:
        """Nothing: a replica's gradients are its own."""
        return lambda x: None

    # what is held

    def join(
        self,
        parts: Sequence[nn.Module],
        replicas: ProcessGroup | None,
        tied: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        """ValueError without other replicas, which a run's check would have found."""
        if replicas is None:
            raise ValueError(f"parallel.exchange={self.text!r} takes outer steps over replicas, of which there is one")
        self._parts, self._replicas, self._tied, self._device = parts, replicas, tied, device

    @torch.no_grad()
    def begin(self, *, anew: bool = False) -> None:
        """RuntimeError, on the ranks that hold it, if replicas begin with other values of something."""
        if self._replicas is None or (self._fragments and not anew):
            return
        held = held_by(self._parts, self._tied)
        check_equal(held, self._replicas, self._device)
        dealt: list[list[Held]] = [[] for _ in range(self.fragments)]
        for each in held:
            dealt[(layer_of(each.name) or 0) % self.fragments].append(each)
        encoding = ENCODINGS.get(self.send)
        self._fragments = [Fragment(each, self._replicas, encoding, self._device) for each in dealt]
        self._targets = torch.zeros(self.fragments, dtype=torch.float64, device=self._device)

    def _held(self) -> Iterator[Held]:
        for fragment in self._fragments:
            yield from fragment

    # steps

    def after(self, targets: Tensor, skipped: Tensor) -> None:
        self._step += 1
        learned = torch.where(skipped.to(targets.device) > 0, 0.0, targets)  # a skipped step has taught nothing
        self._targets += learned.to(self._targets)
        if self._flight is not None and self._step % self._gap == self.delay:
            self._take(self.mix)
        if self._step % self._gap == 0:
            self._send((self._step // self._gap - 1) % self.fragments)
            if self.delay == 0:
                self._take(0.0)

    def finish(self) -> None:
        if self._flight is not None:
            self._take(0.0)
        for index in range(self.fragments if self._step else 0):
            if self._sent[index] != self._step:
                self._send(index)
                self._take(0.0)

    def _send(self, index: int) -> None:
        weight = self._targets[index] * self.present
        self._targets[index] = 0
        self._flight = index, self._fragments[index].send(weight)
        if self.delay:  # else all replicas have the next common values at once
            self._fragments[index].rejoin(weight)
        self._sent[index] = self._step

    def _take(self, mix: float) -> None:
        assert self._flight is not None
        index, wait = self._flight
        self._flight = None
        self._fragments[index].take(wait(), lr=self.lr, momentum=self.momentum, mix=mix)

    # checkpoints

    @property
    def replica(self) -> tuple[int, int] | None:
        return None if self._replicas is None else (self._replicas.rank(), self._replicas.size())

    @property
    def _number(self) -> int:
        """Which replica this rank is of."""
        return 0 if self.replica is None else self.replica[0]

    @property
    def apart(self) -> bool:
        begun = bool(self._fragments)
        return begun and (self._flight is not None or any(sent != self._step for sent in self._sent))

    def common(self) -> Mapping[str, Tensor]:
        return {each.name: each.start for each in self._held()}

    @contextmanager
    def showing_common(self) -> Iterator[None]:
        with torch.no_grad():
            for each in self._held():
                each.swap()
        try:
            yield
        finally:
            with torch.no_grad():
                for each in self._held():
                    each.swap()

    def state(self) -> dict[str, Tensor]:
        """The outer momentum, which all replicas have in common, this replica's targets, and what is on its way."""
        found = {MOMENTUM + each.name: each.momentum for each in self._held() if each.momentum is not None}
        if self._fragments:
            found[f"{TARGETS}{self._number}"] = self._targets
        if self._flight is not None:
            index, wait = self._flight
            arrived = wait()
            for each, delta in zip(self._fragments[index], arrived.deltas, strict=True):
                travelling = torch.empty_like(each.start)
                local_part(travelling).copy_(delta.view_as(each.own))
                found[FLIGHT + each.name] = travelling
            found[COUNTS] = arrived.counts.reshape(1)
        return found

    def load(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Without a momentum, as in the checkpoint of another exchange, it begins with none."""
        if not any(name.startswith(MOMENTUM) for name in saved):
            return {}
        found = {MOMENTUM + each.name: each.momentum for each in self._held() if each.momentum is not None}
        replicas = sum(name.startswith(TARGETS) for name in saved)
        own = f"{TARGETS}{self._number % max(1, replicas)}"
        if own in saved and saved[own].shape == self._targets.shape:
            found[own] = self._targets
        self._loaded = {}
        for each in self._held():
            if FLIGHT + each.name in saved:
                self._loaded[FLIGHT + each.name] = torch.empty_like(each.start)
        if self._loaded:
            self._loaded[COUNTS] = torch.empty(1, dtype=torch.float64, device=self._targets.device)
        return found | self._loaded

    def at(self, step: int) -> None:
        """ValueError, with the remedy, if a fragment was on its way in another schedule of rounds."""
        self._step, self._flight, self._sent = step, None, [-1] * self.fragments
        rounds, last = step // self._gap, step - step % self._gap
        for back in range(min(self.fragments, rounds)):
            self._sent[(rounds - 1 - back) % self.fragments] = last - back * self._gap
        loaded, self._loaded = self._loaded, {}
        if not loaded:
            return
        index = (rounds - 1) % self.fragments
        names = {FLIGHT + each.name for each in self._fragments[index]} | {COUNTS}
        if step % self._gap >= self.delay or names != loaded.keys():
            raise ValueError(
                f"was saved after step {step}, while parameters were on their way between replicas, in "
                f"rounds that parallel.exchange={self.text!r} does not have: go on with the options that saved it"
            )
        deltas = [local_part(loaded[FLIGHT + each.name]).reshape(-1) for each in self._fragments[index]]
        arrived = Sum(deltas, loaded[COUNTS][0])
        self._flight = index, lambda: arrived

    # for the planner

    def kept_bytes(self, elements: float, itemsize: int) -> float:
        """The common values and the outer momentum, and a fragment that travels beside steps."""
        return (2 + (1 / self.fragments if self.delay else 0)) * itemsize * elements

    def sent_bytes(self, elements: float, replicas: int) -> float:
        """What a replica sends in a round, of so many float32 elements on all its ranks: by a ring, or encoded to each
        other replica."""
        if self.send == WHOLE:
            return 2 * (replicas - 1) / replicas * 4 * elements
        return (replicas - 1) * ENCODINGS[self.send].value_bytes * elements

    def exposed_seconds(self, exchange: float, step: float) -> float:
        """Seconds that a step waits for an exchange of so many seconds a round, in the mean of a round's steps. step:
        of computing, beside which a fragment travels for `delay` steps."""
        each = exchange / self.fragments
        return self.fragments * max(0.0, each - self.delay * step) / self.every
