"""A pipeline rank: its stages, and the torch.distributed.pipelining schedule that runs them.

Belongs here: what connects stages with FSDP2 and with the weight-gradient queue. A stage's module has what it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tpformer.config import Layout
from tpformer.layers import ColumnParallelLinear, RowParallelLinear
from tpformer.ops import WeightGradientQueue
from tpformer.torch_private import is_view

from .recording import Action
from .zero import prepare_backward, reduce_accumulated, reshard, take_weight_gradients


class _Part(nn.Module):
    """The module that torch runs as a stage: a part whose weight gradients go to `queue`.

    It hides the part's FSDP2 class from torch, which would keep gradients and parameters whole until the last
    microbatch.
    """

    def __init__(self, module: nn.Module, queue: WeightGradientQueue | None) -> None:
        super().__init__()
        self.module, self.queue = module, queue

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.queue is None else self.queue.collect():
            return self.module(*args, **kwargs)


class _Stage(PipelineStage):
    """A stage that tells FSDP2 when to reduce, and records what it does."""

    def __init__(self, part: _Part, *args: Any, zero_stage: int, **kwargs: Any) -> None:
        queue = part.queue
        super().__init__(part, *args, dw_builder=None if queue is None else queue.take, **kwargs)
        self.part, self.zero_stage = part.module, zero_stage
        self.record: list[Action] | None = None

    @contextmanager
    def _recorded(self, kind: str, microbatch: int) -> Iterator[None]:
        if self.record is None:
            yield
            return
        start = self._now()
        yield
        self.record.append(Action(self.group_rank, self.stage_index, microbatch, kind, start, self._now()))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # At the first step torch allocates receive buffers for all microbatches, and keeps them. A schedule such as 1F1B
    # needs them only for the microbatches in flight, so a buffer stays on meta until something is received into it.
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            _receive_on(infos, "meta")
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _receive_on(infos, "meta")
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _receive_on(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward:
            _receive_on(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._recorded("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _receive_on(self.args_recv_info[fwd_chunk_id], "meta")  # torch holds the input itself until its backward
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            self.fwd_cache.pop(bwd_chunk_id, None)  # otherwise torch would keep what this forward of an evaluation left
            return
        # in ZeRO stages 0 and 1 perform_reduce_grad reduces at the end, because weight gradients may still be missing
        prepare_backward(self.part, self.zero_stage, last=last_backward and self.zero_stage >= 2)
        with self._recorded("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if full_backward and self.dw_builder is not None:
                take_weight_gradients(self.part)
        _receive_on(self.grad_recv_info[bwd_chunk_id], "meta")
        if loss is not None and (full_backward or self.dw_builder is not None) and not is_view(loss):
            loss.detach_()  # torch keeps losses until the step ends; their graphs would keep what was received

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self._recorded("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            take_weight_gradients(self.part)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # an evaluation, too, goes through a V schedule's backwards, and torch asserts that they left a gradient
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing. torch drops all gradients here, after it ran on real tensors to learn shapes; ours are given."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward and self.zero_stage < 2:
            with self._recorded("R", -1):
                reduce_accumulated(self.part)


def _receive_on(infos: Any, device: torch.device | str) -> None:
    """Replace the buffers that a microbatch receives into by new ones on `device`. On meta they take no memory."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=info.buffer.requires_grad)


def _queues(part: nn.Module) -> bool:
    """Whether the part has linears that use a WeightGradientQueue. For other modules torch splits the backward."""
    return any(isinstance(module, ColumnParallelLinear | RowParallelLinear) for module in part.modules())


class Pipeline:
    """The stages of one pipeline rank and the schedule that runs them.

    parts: the modules of the stages layout.stages_of(rank), in that order. Call apply_zero on them before.
    boundaries: n_stages + 1 tensors on the meta device, each for one microbatch: the first argument of every stage, and
    then the result of the last one. Only floating-point ones get gradients.
    loss_fn(result of the last stage, target) -> scalar. The gradients of all microbatches' losses are summed.
    Communication, per microbatch and boundary between ranks: the boundary's tensor is sent forward and its gradient
    backward, point to point. Errors: ValueError for more or fewer parts or boundaries than the layout has.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        layout: Layout,
        mesh: DeviceMesh,
        *,
        n_microbatches: int,
        boundaries: Sequence[Tensor],
        loss_fn: Callable[[Any, Any], Tensor],
        device: torch.device,
    ) -> None:
        rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        indices = layout.stages_of(rank)
        if len(parts) != len(indices) or len(boundaries) != layout.n_stages + 1:
            raise ValueError(
                f"pipeline rank {rank} has the stages {indices} of {layout.n_stages}: it needs {len(indices)} parts "
                f"and {layout.n_stages + 1} boundaries, not {len(parts)} and {len(boundaries)}"
            )
        self.parts, self.is_first, self.is_last = list(parts), 0 in indices, layout.n_stages - 1 in indices
        examples = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in boundaries]
        splits = layout.schedule.splits_backward
        self.stages = [
            _Stage(
                _Part(part, WeightGradientQueue() if splits and _queues(part) else None),
                index,
                layout.n_stages,
                device,
                input_args=(examples[index],),
                output_args=(examples[index + 1],),
                group=group,
                zero_stage=layout.zero,
            )
            for part, index in zip(parts, indices, strict=True)
        ]
        schedule = get_schedule_class(layout.schedule.torch_name)
        single = issubclass(schedule, PipelineScheduleSingle)
        stages = self.stages[0] if single else self.stages
        self.schedule = schedule(stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=False)

    def step(self, inputs: Tensor, target: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of all microbatches. Returns the sum of their losses, 0-dim, 0 without the last stage.

        inputs, target and the tensors in kwargs hold all microbatches along dim 0. Every stage gets kwargs.
        Communication: each boundary tensor to the next stage, its gradient back, and what the parts and FSDP2 send.
        When it returns, gradients are complete but for reduce_partial_gradients.
        """
        return self._run(self.schedule.step, inputs, target, kwargs)

    def evaluate(self, inputs: Tensor, target: Any, **kwargs: Any) -> Tensor:
        """The losses' sum as in `step`, without backward."""
        loss = self._run(self.schedule.eval, inputs, target, kwargs)
        for part in self.parts:
            reshard(part)
        return loss

    def _run(self, run: Callable[..., Any], inputs: Tensor, target: Any, kwargs: dict[str, Any]) -> Tensor:
        losses: list[Tensor] = []
        run(
            *((inputs,) if self.is_first else ()),
            target=target if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
            **kwargs,
        )
        if not losses:
            return torch.zeros((), device=self.stages[0].device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @contextmanager
    def recording(self) -> Iterator[list[Action]]:
        """Yield a list to which every action of this rank's stages is added while the context is open.

        A CUDA device is synchronised before and after each action.
        """
        actions: list[Action] = []
        for stage in self.stages:
            stage.record = actions
        try:
            yield actions
        finally:
            for stage in self.stages:
                stage.record = None
