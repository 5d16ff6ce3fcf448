"""One optimizer step and one evaluation, on a model that is already laid out."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from tpformer.parallel import clip_gradients, gradient_norm, reduce_partial_gradients


def accumulate_gradients(model: nn.Module, batch: Tensor, first_sample: int, microbatch_size: int, step: int) -> Tensor:
    """Gradients of the mean loss over the batch, microbatch by microbatch; the loss (a scalar) is returned.

    batch: (samples, seq_length + 1) int64, global samples first_sample, first_sample + 1, ... Every microbatch's summed
    loss is divided by the target tokens of the whole batch, so the result does not depend on microbatch_size.
    """
    samples, length = batch.shape
    scale = 1.0 / (samples * (length - 1))
    total = torch.zeros((), device=batch.device)
    for first in range(0, samples, microbatch_size):
        rows = batch[first : first + microbatch_size]
        index = torch.arange(first_sample + first, first_sample + first + len(rows), device=batch.device)
        loss = model(rows[:, :-1], targets=rows[:, 1:], sample_index=index, step=step) * scale
        if isinstance(model, FSDPModule):
            last = first + microbatch_size >= samples
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        loss.backward()
        total = total + loss.detach()
    reduce_partial_gradients(model)
    return total


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    *,
    first_sample: int,
    microbatch_size: int,
    step: int,
    lr: float,
    clip_norm: float,
    groups: Iterable[ProcessGroup | None],
) -> tuple[Tensor, Tensor]:
    """One step of the optimizer; (mean loss, global gradient norm before clipping), scalars equal on all tp ranks.

    groups: the process groups that parameters are laid out over, for the norm. Gradients are gone afterwards.
    """
    loss = accumulate_gradients(model, batch, first_sample, microbatch_size, step)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = gradient_norm(parameters, groups)
    if clip_norm > 0:
        clip_gradients(parameters, norm, clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Tensor]) -> float:
    """Mean loss (nats per target token) over batches (samples, seq_length + 1) int64; equal on all tp ranks."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        total += float(model(batch[:, :-1], targets=batch[:, 1:]))
        tokens += batch[:, 1:].numel()
    model.train(was_training)
    return total / tokens
