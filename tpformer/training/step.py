"""One optimizer step and one evaluation, on a model that is already laid out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpformer.ops.embedding import check_ids
from tpformer.parallel import scale_gradients

from .data import Samples, TokenSamples
from .model import NO_TARGET, ModelParts, token_ids
from .norms import NormWatch


class StepResult(NamedTuple):
    """What a step gave, equal on all ranks.

    loss: the mean over the global batch. norm: of all gradients before clipping. skipped: loss or norm was not finite,
    so nothing was updated. offender: the first parameter whose gradient is not finite, if there is one. norms: those by
    layer, if they were asked for.
    """

    loss: float
    norm: float
    skipped: bool
    offender: str | None
    norms: dict[str, float]


class LossScaler:
    """Dynamic loss scaling for float16: the scale is halved when a gradient overflows, and doubled after `interval`
    steps without overflow.

    All ranks have the same scale, because they see the same global norm. The usual first scale, 2**16, suits the mean
    over a microbatch. Here a loss is divided by the tokens of the global batch, so multiply 2**16 by the number of
    microbatches in it. Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """

    def __init__(self, scale: float = 2.0**16, interval: int = 2000) -> None:
        self.scale, self.interval, self.good_steps = scale, interval, 0

    def update(self, finite: bool) -> None:
        """Change the scale after a step. finite: whether its loss and gradient norm were."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps % self.interval == 0:
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        """The scale and the count of good steps, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state that state_dict returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def train_step(
    model: ModelParts,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Tensor,
    *,
    first_sample: int,
    step: int,
    lr: float,
    clip_norm: float,
    scaler: LossScaler | None = None,
    watch: NormWatch | None = None,
) -> StepResult:
    """Compute and clip gradients, and step the optimizers. If loss or norm is not finite, nothing is updated.

    batch, first_sample: as for ModelParts.gradients. step: 1, 2, ... lr: the learning rate of this step. clip_norm:
    the largest gradient norm; 0 turns clipping off. scaler: for float16. watch: what measures norms by layer,
    of which the result has a row. Gradients are None afterwards.
    Communication: that of ModelParts.gradients and gradient_norm; a skipped step also gathers the offender's name.
    ValueError if loss or norm is not finite because of ids outside the vocabulary.
    """
    scale = 1.0 if scaler is None else scaler.scale
    with watch or nullcontext():
        loss_tensor = model.gradients(batch, first_sample=first_sample, step=step, loss_scale=scale)
    norm = float(model.gradient_norm()) / scale
    norms = {} if watch is None else watch.row(scale)
    loss = float(loss_tensor)
    skipped, offender = not (math.isfinite(loss) and math.isfinite(norm)), None
    if skipped:
        # on a GPU an id outside the vocabulary gives NaN instead of an error
        check_ids(token_ids(batch).cpu(), model.config.vocab_size or 0, "token ids of this batch")
        offender = model.first_not_finite()
    else:
        clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
        scale_gradients(model.parameters(), clip / scale)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    if scaler is not None:
        scaler.update(not skipped)
    return StepResult(loss, norm, skipped, offender, norms)


def batch(samples: Samples, first: int, count: int) -> Tensor:
    """Samples first .. first + count - 1 as one int64 tensor (count, seq_length + 1); ValueError when count < 1.

    A token that is no target is stored as -1 - id.
    """
    if count < 1:
        raise ValueError(f"a batch needs at least one sample, got count {count}")
    return torch.from_numpy(np.stack([samples.sample(i) for i in range(first, first + count)]))


def _slice(samples: Samples, first: int, size: int, end: int) -> Tensor:
    """Samples first ... first + size - 1. From sample `end` on, rows are filled with NO_TARGET."""
    real = max(0, min(size, end - first))
    rows = batch(samples, first if real else 0, max(1, real))
    return torch.cat([rows[:real], torch.full((size - real, rows.shape[1]), NO_TARGET)])


def evaluate(model: ModelParts, datasets: Iterable[TokenSamples], n_samples: int, device: torch.device) -> float:
    """Mean loss (nats per target) over the first n_samples of each dataset, equal on all ranks; NaN without targets.

    Data-parallel ranks share the samples; in the last round samples without targets fill the gaps. The model is in
    training mode afterwards.
    """
    model.train(False)
    size = model.microbatch_size * (1 if model.pipeline is None else model.n_microbatches)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for samples in datasets:
        count = min(n_samples, samples.n_samples)
        for first in range(0, count, size * model.layout.data_parallel):
            rows = _slice(samples, first + model.data_rank * size, size, count)
            total += model.summed_loss(rows.to(device))
    model.train()
    return float(total[0] / total[1])
