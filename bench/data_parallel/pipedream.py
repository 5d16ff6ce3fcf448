"""PipeDream as it was published, simulated in one process on real gradients: no flush, stashed weights, replicated
stages.

Belongs here: the order of a pipeline without flush, the versions of weights that its stages hold, and training in that
order. What is compared with it is in strategies.py beside this.

A stage alternates between the forward of one minibatch and the backward of another, and updates its weights after each
backward. So a minibatch meets other weights on its way back than on its way there, unless a stage keeps those of its
forward until its backward: it stashes them. Source: arXiv:1806.03377 (PipeDream), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from tpformer.config import OptimizerSection
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import split_stages
from tpformer.training.model import inputs_of
from tpformer.training.optimizer import build_optimizer

FORWARD, BACKWARD = 1, 2  # units of time: a backward takes twice as long


class Action(NamedTuple):
    """What a worker does from `start` on: the forward or backward ("F" or "B") of a minibatch."""

    start: int
    stage: int
    worker: int
    kind: str
    minibatch: int

    @property
    def end(self) -> int:
        return self.start + (FORWARD if self.kind == "F" else BACKWARD)


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Minibatches between their forward and the end of their backward on a worker of a stage, at most: ceil(workers of
    this stage and all after it / workers of this stage). So many versions of its weights it may hold."""
    return -(-sum(replicas[stage:]) // replicas[stage])


def schedule(replicas: Sequence[int], minibatches: int) -> list[Action]:
    """Who does what when. replicas: the workers of each stage, which take minibatches by turns.

    A worker begins with as many forwards as may be in flight, then takes a backward after each forward.
    """
    stages = len(replicas)
    ready = {kind: [set[int]() for _ in replicas] for kind in "FB"}
    ready["F"][0] = set(range(minibatches))
    workers = [(stage, worker) for stage in range(stages) for worker in range(replicas[stage])]
    running: dict[tuple[int, int], Action] = {}
    flying, last = dict.fromkeys(workers, 0), dict.fromkeys(workers, "B")
    now = 0
    found: list[Action] = []

    def choose(stage: int, worker: int) -> Action | None:
        full = flying[stage, worker] >= in_flight(replicas, stage)
        for kind in "BF" if last[stage, worker] == "F" or full else "FB":
            own = [each for each in ready[kind][stage] if each % replicas[stage] == worker]
            if own and not (kind == "F" and full):
                return Action(now, stage, worker, kind, min(own))
        return None

    def finish(action: Action) -> None:
        stage, minibatch = action.stage, action.minibatch
        del running[stage, action.worker]
        if action.kind == "F" and stage + 1 < stages:
            ready["F"][stage + 1].add(minibatch)
        elif action.kind == "F":
            ready["B"][stage].add(minibatch)
        else:
            flying[stage, action.worker] -= 1
            if stage:
                ready["B"][stage - 1].add(minibatch)

    while len(found) < 2 * stages * minibatches or running:
        for action in [each for each in running.values() if each.end == now]:
            finish(action)
        for place in workers:
            if place not in running and (begun := choose(*place)) is not None:
                found.append(begun)
                running[place] = begun
                ready[begun.kind][begun.stage].remove(begun.minibatch)
                flying[place] += begun.kind == "F"
                last[place] = begun.kind
        now = min((action.end for action in running.values()), default=now)
    return found


class Stage:
    """A stage's part of the model, its latest weights, and those that it has stashed."""

    def __init__(self, part: GPT, optimizer: OptimizerSection, replicas: int) -> None:
        self.part, self.replicas = part, replicas
        self.optimizer = build_optimizer(part, optimizer)
        self.latest = self._copy()
        self.stashed: dict[int, tuple[dict[str, Tensor], Tensor, Tensor]] = {}
        """By minibatch: the weights of its forward, its input, and its output."""
        self.gradients: dict[int, dict[int, list[Tensor]]] = {}
        """By round, that is one minibatch of each worker, and by minibatch: what no update has had yet."""
        self.most_versions, self.most_bytes = 1, 0

    def _copy(self) -> dict[str, Tensor]:
        return {name: each.detach().clone().requires_grad_() for name, each in self.part.named_parameters()}

    def forward(self, minibatch: int, x: Tensor, **options: Tensor | int) -> Tensor:
        """Compute with the latest weights, and stash them."""
        x = x.detach().requires_grad_(x.is_floating_point())
        y = functional_call(self.part, self.latest, (x,), options)
        self.stashed[minibatch] = self.latest, x, y
        own = (held for other, held in self.stashed.items() if (other - minibatch) % self.replicas == 0)
        versions = {id(weights): weights for weights, _, _ in own}
        self.most_versions = max(self.most_versions, len(versions))
        held = sum(each.nbytes for weights in versions.values() for each in weights.values())
        self.most_bytes = max(self.most_bytes, held)
        return y.detach()

    def backward(self, minibatch: int, gradient: Tensor) -> Tensor | None:
        """The input's gradient, by the stashed weights. The gradients of the weights wait for `update`."""
        weights, x, y = self.stashed.pop(minibatch)
        wanted = [*weights.values(), *([x] if x.requires_grad else [])]
        found = list(torch.autograd.grad(y, wanted, gradient))
        self.gradients.setdefault(minibatch // self.replicas, {})[minibatch] = found[: len(weights)]
        return found[-1] if x.requires_grad else None

    def update(self, round_: int, lr: float) -> None:
        """Change the latest weights by the mean of a round's gradients, in the order of minibatches."""
        own = self.gradients.pop(round_)
        for parameter, *grads in zip(self.part.parameters(), *(own[each] for each in sorted(own)), strict=True):
            parameter.grad = sum(grads[1:], grads[0]) / len(grads)
        self.optimizer.update(lr, torch.zeros(()))
        self.latest = self._copy()


class Trained(NamedTuple):
    """losses: of each minibatch, by its own forward. versions, nbytes: the most that a worker of each stage held."""

    losses: list[float]
    versions: list[int]
    nbytes: list[int]
    parts: list[GPT]


def train(
    config: GPTConfig,
    replicas: Sequence[int],
    batch_of: Callable[[int], Tensor],
    minibatches: int,
    optimizer: OptimizerSection,
    lr_of: Callable[[int], float],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Train a model in stages with so many workers each, in the order of `schedule`.

    batch_of: the rows (samples, seq_length + 1) of a minibatch 0, 1, ... lr_of: the learning rate of its update.
    Without a flush nothing waits: the weights of a stage are those after all updates that it has made.
    """
    ranges = split_stages(config.layer_costs("parameters"), len(replicas))
    parts = [GPT(config, part=each, seed=seed, dtype=dtype) for each in ranges]
    stages = [Stage(part, optimizer, count) for part, count in zip(parts, replicas, strict=True)]
    if config.tie_embeddings and len(stages) > 1:
        raise ValueError("stages update apart from one another, so embeddings cannot be tied: set tie_embeddings=False")
    inputs: dict[tuple[int, int], Tensor] = {}
    gradients: dict[tuple[int, int], Tensor] = {}
    losses = [0.0] * minibatches
    # weights are read when a forward begins, and changed when the last backward of a round ends
    order = schedule(replicas, minibatches)
    for action in sorted(order, key=lambda a: (a.start, 1, a) if a.kind == "F" else (a.end, 0, a)):
        stage, number = stages[action.stage], action.minibatch
        rows = batch_of(number)
        ids, targets, index = inputs_of(rows, number * len(rows))
        count = int((targets >= 0).sum())
        if action.kind == "F":
            last = action.stage == len(stages) - 1
            x = ids if action.stage == 0 else inputs.pop((action.stage, number))
            y = stage.forward(number, x, **({"targets": targets} if last else {}), sample_index=index, step=number + 1)
            if last:
                losses[number] = float(y) / count
                gradients[action.stage, number] = torch.full_like(y, 1 / count)
            else:
                inputs[action.stage + 1, number] = y
            continue
        back = stage.backward(number, gradients.pop((action.stage, number)))
        if back is not None:
            gradients[action.stage - 1, number] = back
        round_ = number // stage.replicas
        if len(stage.gradients[round_]) == min(stage.replicas, minibatches - round_ * stage.replicas):
            stage.update(round_, lr_of(number))
    return Trained(losses, [s.most_versions for s in stages], [s.most_bytes for s in stages], parts)
