"""The router of a layer of experts, and the balance losses of the routers that run in a forward.

Belongs here: the module that decides, its counts and its bias. How a router decides is kernels/route; experts are in
moe.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import check_positive, check_range, check_router
from tpformer.ops.packing import has_other_hooks
from tpformer.ops.recompute import running_again
from tpformer.ops.route import wide
from tpformer.ops.sequence import flat_rows
from tpformer.ops.uncompiled import untraced
from tpformer.torch_private import in_backward

from .module import Normal, ParallelModule
from .positions import Positions, positions_of
from .tensor_parallel import TensorParallel

LOSSES: ContextVar[list[Tensor] | None] = ContextVar("balance_losses", default=None)


@contextmanager
def balance_losses() -> Iterator[list[Tensor]]:
    """Yield a list that gets the balance loss of each MoE whose forward runs in the context; add their sum to the loss.

        with balance_losses() as losses:
            y = block(x)
        loss = criterion(y) + sum(losses)

    With sequence shards each is the loss of this rank's tokens. GPT does this itself. In a recomputed region only the
    first run gives one.
    """
    losses: list[Tensor] = []
    token = LOSSES.set(losses)
    try:
        yield losses
    finally:
        LOSSES.reset(token)


@untraced
def _collected() -> list[Tensor] | None:
    return LOSSES.get()


class Router(ParallelModule):
    """Chooses experts for each token: logits = x W^T, scores, the largest score + bias, weights. ops.Policy has more.

    Layout:  weight (n_experts, hidden_size) is Replicate on the tp axis; x (tokens / t, hidden_size) with
             sequence_parallel, else (tokens, hidden_size), equal on all ranks. The result is the ops.Routing of all
             tokens, on every rank; with tp.experts, which exchange tokens, that of this rank's rows.
    Communication, per rank: that of ops.route. With sequence_parallel the weight's gradient is a partial sum.
    It computes in float32, or float64 for float64 parameters, whatever the rows' dtype is.
    bias: a buffer `bias` (n_experts,) that is added to the scores for the choice alone, and that an optimizer step
             moves by `move_bias`. It is saved with the parameters.
    balance: the coefficient of the balance loss (ops.Balance), in training mode.
    load: (n_experts,) int64, the tokens of each expert since it was last set to None, of all tp ranks, or with
             tp.experts of this rank alone. Forwards in training mode count, like the statistics of a batch norm;
             recomputation does not, and neither do tokens that a key_padding_mask leaves out.
    """

    def __init__(
        self,
        hidden_size: int,
        n_experts: int,
        policy: ops.Policy,
        *,
        bias: bool = False,
        balance: float = 0.0,
        init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_positive(hidden_size=hidden_size, n_experts=n_experts)
        check_router(n_experts, policy.k, policy.score, policy.groups, policy.top_groups)
        check_range("train.balance_loss", balance, "balance")
        self.hidden_size, self.n_experts, self.policy, self.balance = hidden_size, n_experts, policy, balance
        self.load: Tensor | None = None
        self._gave_loss = False  # whether a forward has given a balance loss
        initial = Normal(hidden_size**-0.5 if init_std is None else init_std)
        self.add_parameter("weight", (n_experts, hidden_size), initial, shard=None, device=device, dtype=dtype)
        self.bias: Tensor | None
        place = self.device_for(device)
        zeros = torch.zeros(n_experts, dtype=wide(self.weight.dtype), device=place) if bias else None
        self.register_buffer("bias", zeros)
        self.reset_parameters()

    def reset_buffers(self) -> None:
        """Set the bias to zero."""
        if self.bias is not None:
            self.bias.zero_()

    def _apply(self, *args: Any, **options: Any) -> Self:
        """Do as nn.Module for .to() and the like, but keep the bias in at least float32: a step of it is small."""
        before = self.bias
        super()._apply(*args, **options)
        if before is not None and self.bias is not None and self.bias.dtype != wide(self.bias.dtype):
            self.bias = before.to(self.bias.device, wide(self.bias.dtype))
        return self

    @property
    def balances(self) -> bool:
        """Whether a forward makes a balance loss now."""
        return self.balance > 0 and self.training and torch.is_grad_enabled()

    def options(self, rows: Tensor, positions: Positions | None) -> ops.Router:
        """What the operation takes of this layer for these rows. Errors: ValueError for a balance loss nobody takes."""
        bias = None if self.bias is None else self.bias.to(rows.device, wide(rows.dtype))
        if not self.training or running_again():  # a region's second run takes its decision from the first
            return ops.Router(self.policy, bias)
        load = None
        if not in_backward():  # where torch's checkpoint repeats a forward, its tokens have been counted
            if self.load is None or self.load.device != rows.device:
                with torch.inference_mode(False):  # the tensor is kept, and training may follow
                    self.load = torch.zeros(self.n_experts, dtype=torch.int64, device=rows.device)
            load = self.load
        counted = None
        if positions is not None and positions.key_padding_mask is not None:
            counted = self._decided(~positions.to_rows(positions.key_padding_mask.reshape(-1).to(rows.device)))
        balance = self._balance(positions, counted, rows.device) if self.balances else None
        return ops.Router(self.policy, bias, load, counted, balance)

    def _decided(self, of_tokens: Tensor) -> Tensor:
        """Of a value (T,) for each token of the tp ranks: those of the tokens that this rank decides about."""
        own = self.tp.experts is not None and self.tp.sharded
        return of_tokens.chunk(self.tp.size)[self.tp.rank] if own else of_tokens

    def _check_loss_is_taken(self) -> None:
        if in_backward():
            if not (self._gave_loss and has_other_hooks()):  # torch's other checkpoint has such hooks
                raise ValueError(
                    "the balance loss of a Router is lost in torch.utils.checkpoint with use_reentrant=True, whose "
                    "first forward has no graph: set use_reentrant=False, or the block's recompute"
                )
        elif _collected() is None:
            raise ValueError(
                f"the balance loss of a Router (coefficient {self.balance}) would be lost: run the forward in "
                f"`with balance_losses() as losses` and add sum(losses) to the loss, or set balance to 0"
            )
        self._gave_loss = True

    def _balance(self, positions: Positions | None, counted: Tensor | None, device: torch.device) -> ops.Balance:
        self._check_loss_is_taken()
        if positions is None:
            raise ValueError(
                "the balance loss is one of sequences, and rows do not tell them: pass positions=Positions(batch, "
                "seq_length), or x as (batch, seq, hidden)"
            )
        batch = positions.batch
        samples = torch.arange(batch, device=device).repeat_interleave(positions.seq_length)
        sample = self._decided(positions.to_rows(samples))
        if counted is not None:
            sample = torch.where(counted, sample, batch)
        context = None if positions.context is None else positions.context.group
        tp = self.tp.group if self.tp.experts is not None else None
        groups = tuple(group for group in (context, tp) if group is not None)
        return ops.Balance(self.balance, batch, sample, groups)

    @torch.no_grad()
    def move_bias(self, load: Tensor, rate: float, skipped: Tensor | None = None) -> None:
        """bias += rate * sign(mean load - load), for the tokens of each expert in a global batch, (n_experts,).

        skipped: a scalar, 1 where nothing shall change. Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1
        """
        if self.bias is None:
            return
        step = rate * (load.double().mean() - load).sign().to(self.bias.dtype)
        self.bias += step if skipped is None else step * (1 - skipped)

    def forward(self, x: Tensor, positions: Positions | None = None) -> ops.Routing:
        """Where all tokens go. positions: needed for a balance loss, if x does not tell its batch and sequence."""
        if positions is not None or x.ndim == 3:
            positions = positions_of(x, positions, self.tp)
        rows, sharded = flat_rows(x), self.tp.sequence_parallel
        weight = self.local("weight", sharded)
        assert weight is not None
        options = self.options(rows, positions)
        alone = self.tp.experts is not None
        group, gathers = (None, False) if alone else (self.tp.group, sharded)
        routing, loss = ops.route(rows, weight, options, group=group, sequence_parallel=gathers)
        take_balance_loss(loss)
        return routing

    def extra_repr(self) -> str:
        """Sizes and options, as repr() shows them."""
        return f"{self.hidden_size}, {self.n_experts}, {self.policy}, bias={self.bias is not None}"


def take_balance_loss(loss: Tensor | None) -> None:
    """Give a balance loss to the balance_losses around this call; not in a recomputation."""
    collected = _collected()
    if loss is not None and collected is not None and not (running_again() or in_backward()):
        collected.append(loss)


def routers(model: nn.Module) -> dict[str, Router]:
    """The routers in a model, by their names in it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
