"""One optimizer step and one evaluation, on a model that is already laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tpformer.distributed.local_gradients import clipping, local_norms
from tpformer.exchange import StepResult
from tpformer.ops.embedding import check_ids

from .data import Samples, TokenSamples
from .experts import settle_experts
from .model import ModelParts, summed_loss, token_ids
from .norms import NormWatch
from .transfers import to_device
from .updates import LocalUpdate


class LossScaler:
    """Dynamic loss scaling for float16: the scale is halved when a gradient overflows, and doubled after `interval`
    steps without overflow.

    All ranks have the same scale, because they see the same global norm. The usual first scale, 2**16, suits the mean
    over a microbatch. Here a loss is divided by the tokens of the global batch, so multiply 2**16 by the number of
    microbatches in it. device: that of the parameters, where the scale has one place: no step
    waits for it, and a CUDA graph finds it.
    Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """

    def __init__(self, scale: float = 2.0**16, interval: int = 2000, device: torch.device | str = "cpu") -> None:
        self.scale, self.interval = torch.tensor(scale, device=device), interval
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, skipped: Tensor) -> None:
        """Change the scale after a step. skipped: 1 if its loss or gradient norm was not finite, else 0."""
        failed = skipped > 0
        self.good_steps.add_(1).mul_(~failed)
        grown = torch.where(self.good_steps % self.interval == 0, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(failed, torch.clamp(self.scale / 2, min=1.0), grown))

    def state_dict(self) -> dict[str, float]:
        """The scale and the count of good steps, for a checkpoint. Waits for the device."""
        return {"scale": float(self.scale), "good_steps": int(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state that state_dict returned."""
        self.scale.fill_(float(state["scale"]))
        self.good_steps.fill_(int(state["good_steps"]))


def train_step(
    model: ModelParts,
    optimizers: Sequence[LocalUpdate],
    batch: Tensor,
    *,
    first_sample: int | Tensor,
    lr: float | Tensor,
    clip_norm: float,
    scaler: LossScaler | None = None,
    watch: NormWatch | None = None,
) -> StepResult:
    """Compute and clip gradients, and step the optimizers. If loss or norm is not finite, nothing is updated.

    The device decides that: on a GPU the host queues the step and waits for nothing, except with cpu_offload, where
    optimizers run on the host, with packed activations, and in each layer whose experts lie on several ranks, and
    each forward with separated documents. why_skipped says why.
    batch, first_sample: as for ModelParts.gradients. lr: the learning rate of this step. clip_norm: the largest
    gradient norm; 0 turns clipping off. scaler: for float16. watch: what measures norms by layer.
    Gradients are None afterwards. Communication: that of ModelParts.gradients, gradient_norm, settle_experts and the
    exchange's `after`.
    """
    scale = 1.0 if scaler is None else scaler.scale
    with watch or nullcontext():
        loss = model.gradients(batch, first_sample=first_sample, loss_scale=scale)
    parameters = model.parameters()
    local = local_norms(parameters)
    norm = model.gradient_norms([parameters], [local])[0] / scale
    measured = None if watch is None else watch.measured(scale)
    loss = loss.to(norm.device)
    skipped = (~(loss.isfinite() & norm.isfinite())).float()
    clip = clipping(norm, clip_norm)
    for optimizer in optimizers:
        optimizer.update(lr, skipped, clip / scale)
    model.exchange.settle(skipped)
    loads = settle_experts(model, skipped)
    model.exchange.after(model.targets, skipped)
    packing = None if model.packing is None else model.packing.to(norm.device)
    if scaler is not None:
        scaler.update(skipped)
    next_scale = None if scaler is None else scaler.scale.clone()
    return StepResult(loss, norm, skipped, local, measured, next_scale, loads, packing)


def take_steps(model: ModelParts, optimizers: Sequence[LocalUpdate]) -> Callable[..., StepResult]:
    """What takes a model's steps: train_step without its first two arguments, or what its exchange has in its place."""
    loss = partial(summed_loss, end_of_document=model.end_of_document)
    return model.exchange.steps(partial(train_step, model, optimizers), model, optimizers, loss)


def why_skipped(model: ModelParts, batch: Tensor, result: StepResult) -> str | None:
    """The first parameter whose gradient had no finite norm in a step that was skipped; None if there is none.

    batch: that of the step, on the host. Waits for the device; communicates one gather of names over the world.
    ValueError if the step was skipped because of ids outside the vocabulary.
    """
    # on a GPU such an id gives NaN instead of an error
    check_ids(token_ids(batch), model.config.vocab_size or 0, "token ids of this batch")
    return model.first_not_finite(result.local)


def batch(samples: Samples, first: int, count: int) -> Tensor:
    """Samples first .. first + count - 1 as one int64 tensor (count, seq_length + 1); ValueError when count < 1.

    A token that is no target is stored as -1 - id.
    """
    if count < 1:
        raise ValueError(f"a batch needs at least one sample, got count {count}")
    return torch.from_numpy(np.stack([samples.sample(i) for i in range(first, first + count)]))


def _slice(samples: Samples, first: int, size: int, end: int) -> Tensor:
    """Samples first ... first + size - 1. From sample `end` on they are copies of another one, without targets: one
    token alone, repeated, would fill a few experts and the memory of their ranks."""
    real = max(0, min(size, end - first))
    rows = batch(samples, first if real else 0, max(1, real))
    no_targets = torch.where(rows[:1] < 0, rows[:1], ~rows[:1])
    return torch.cat([rows[:real], no_targets.expand(size - real, -1)])


def evaluate(model: ModelParts, datasets: Iterable[TokenSamples], n_samples: int, device: torch.device) -> float:
    """Mean loss (nats per target) over the first n_samples of each dataset, equal on all ranks; NaN without targets.

    Data-parallel ranks share the samples; in the last round samples without targets fill the gaps. Where replicas take
    steps by themselves, the model is what they have in common. It is in training mode afterwards.
    """
    model.train(False)
    size = model.microbatch_size * (1 if model.pipeline is None else model.n_microbatches)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with model.exchange.showing_common():
        for samples in datasets:
            count = min(n_samples, samples.n_samples)
            for first in range(0, count, size * model.layout.data_parallel):
                rows = _slice(samples, first + model.data_rank * size, size, count)
                total += model.summed_loss(to_device(rows, device))
    model.train()
    total = model.over_replicas(total)
    return float(total[0] / total[1])
