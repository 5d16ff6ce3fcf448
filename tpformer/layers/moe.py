"""Mixture of experts: Router, Experts and MoE, which takes an MLP's place in a block. Experts are divided over ranks.

Belongs here: the modules, and the balance losses of the layers that run in a forward. How a router decides is
kernels/route; the computation is ops.experts.
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
from tpformer.config import (
    MLP_ACTIVATIONS,
    check_choice,
    check_expert_ranks,
    check_positive,
    check_range,
    check_router,
)
from tpformer.ops.packing import has_other_hooks
from tpformer.ops.recompute import running_again
from tpformer.ops.route import wide
from tpformer.ops.sequence import flat_rows
from tpformer.ops.uncompiled import untraced
from tpformer.torch_private import in_backward, is_own_parameter

from .children import call_rows, fusable, fusable_norm, unwrapped
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import MLP
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
             tokens, on every rank.
    Communication, per rank: that of ops.route. With sequence_parallel the weight's gradient is a partial sum.
    It computes in float32, or float64 for float64 parameters, whatever the rows' dtype is.
    bias: a buffer `bias` (n_experts,) that is added to the scores for the choice alone, and that an optimizer step
             moves by `move_bias`. It is saved with the parameters.
    balance: the coefficient of the balance loss (ops.Balance), in training mode.
    load: (n_experts,) int64, the tokens of each expert since it was last set to None, of all tp ranks. Forwards in
             training mode count, like the statistics of a batch norm; recomputation does not, and neither do tokens
             that a key_padding_mask leaves out.
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
            counted = ~positions.to_rows(positions.key_padding_mask.reshape(-1).to(rows.device))
        balance = self._balance(positions, counted, rows.device) if self.balances else None
        return ops.Router(self.policy, bias, load, counted, balance)

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
        sample = positions.to_rows(torch.arange(batch, device=device).repeat_interleave(positions.seq_length))
        if counted is not None:
            sample = torch.where(counted, sample, batch)
        groups = () if positions.context is None else (positions.context.group,)
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
        routing, loss = ops.route(rows, weight, options, group=self.tp.group, sequence_parallel=sharded)
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


class Experts(ParallelModule):
    """n_experts gated MLPs without biases, whose matrices are stacked: y = W_down[e] (act(W_gate[e] x) * (W_up[e] x)).

    Layout:  gate_up_proj (n_experts, 2 * ffn_hidden_size, hidden_size), the gate first, and down_proj (n_experts,
             hidden_size, ffn_hidden_size) are Shard(0): each rank has n_experts / t whole experts. x and result as in
             MLP; routing is that of all tokens.
    Communication, per rank: that of ops.experts, without the routing's.
    Errors:  ValueError for experts that the ranks cannot share, and for an activation that is not gated.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        n_experts: int,
        *,
        activation: str = "swiglu",
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, n_experts=n_experts)
        check_choice("activation", activation, [name for name, (_, gated) in MLP_ACTIVATIONS.items() if gated])
        check_expert_ranks(n_experts, self.tp.size)
        self.hidden_size, self.ffn_hidden_size, self.n_experts = hidden_size, ffn_hidden_size, n_experts
        self.activation, _ = MLP_ACTIVATIONS[activation]
        h, f = hidden_size, ffn_hidden_size
        for name, shape, std in (
            ("gate_up_proj", (n_experts, 2 * f, h), h**-0.5 if init_std is None else init_std),
            ("down_proj", (n_experts, h, f), f**-0.5 if output_init_std is None else output_init_std),
        ):
            self.add_parameter(name, shape, Normal(std), shard=0, device=device, dtype=dtype)
        self.reset_parameters()

    def matrices(self, shared: MLP | None = None) -> ops.ExpertWeights:
        """This rank's experts, and its part of a shared expert."""
        own: list[Any] = [self.local("gate_up_proj"), self.local("down_proj")]
        if shared is not None:
            own += [layer.local("weight") for layer in (shared.gate_proj, shared.up_proj, shared.down_proj)]
        return ops.ExpertWeights(*own)

    def deferred(self, shared: MLP | None = None) -> ops.Deferred | None:
        """Where the matrices' gradients go, in the order of `matrices`; None: to autograd."""
        queue = ops.active_queue()
        layers = [] if shared is None else [shared.gate_proj, shared.up_proj, shared.down_proj]
        own = all(is_own_parameter(self, name) for name in ("gate_up_proj", "down_proj"))
        if queue is None or not own or not all(layer.defers() for layer in layers):
            return None
        sinks = [lambda gradient, name=name: self.accumulate(name, gradient) for name in ("gate_up_proj", "down_proj")]
        return ops.Deferred(queue, [*sinks, *(layer.take_weight_gradient for layer in layers)])

    def grouped(self, k: int) -> ops.Grouped:
        """What "auto" has to know of the GEMM behind the gather, for k experts a token."""
        return ops.Grouped(k, self.n_experts // self.tp.size, 2 * self.ffn_hidden_size)

    def run(self, rows: Tensor, k: int, shared: MLP | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """ops.experts of rows (tokens / t, hidden_size) with this layer's matrices and transport."""
        grouped = self.grouped(k)
        return ops.experts(
            rows,
            self.matrices(shared),
            n_experts=self.n_experts,
            activation=self.activation,
            transport=self.tp.column_transport(rows, grouped.width(self.tp.size), grouped),
            deferred=self.deferred(shared),
            **options,
        )

    def forward(self, x: Tensor, routing: ops.Routing) -> Tensor:
        """The experts' weighted sum for each token of x (..., hidden_size); result like x."""
        y, _ = self.run(flat_rows(x), routing.experts.shape[1], routing=routing)
        return y if y.shape == x.shape else y.view(x.shape)

    def extra_repr(self) -> str:
        """Sizes, as repr() shows them."""
        return f"{self.n_experts} x ({self.hidden_size}, {self.ffn_hidden_size}), tp={self.tp.size}"


class MoE(ParallelModule):
    """A router, experts, and maybe a shared expert, in the place of a block's MLP. No token is dropped.

    gate: the Router, which chooses policy.k experts for a token; experts: the Experts; shared_experts: an MLP that
    takes every token, or None. The names are those of transformers' Qwen3-MoE and DeepSeek-V3.
    Layout:  x and result as in MLP.
    Communication, per rank: that of ops.experts: the five collectives of a dense MLP, and the routing's.
    Memory:  2 + 4 (K f + f_s) / h bytes per token and hidden unit for the backward, in 16 bits, with K experts of width
             f a token and a shared expert of width f_s; and 12 K + 4 E bytes of routing a token.
    A child is called as a module, not fused, if it has a hook, a parametrization or a replaced forward. The result is
    the same; norm(x) is then kept, too. Errors: ValueError on several ranks for a gate or experts of another class.
    """

    def __init__(
        self,
        hidden_size: int,
        n_experts: int,
        policy: ops.Policy = ops.Policy(2),  # noqa: B008  (immutable)
        *,
        ffn_hidden_size: int,
        shared_ffn_size: int = 0,
        activation: str = "swiglu",
        router_bias: bool = False,
        balance: float = 0.0,
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        place: dict = {"tp": self.tp, "device": device, "dtype": dtype}
        stds: dict = {"init_std": init_std, "output_init_std": output_init_std, "activation": activation}
        self.gate = Router(
            hidden_size, n_experts, policy, bias=router_bias, balance=balance, init_std=init_std, **place
        )
        self.experts = Experts(hidden_size, ffn_hidden_size, n_experts, **stds, **place)
        self.shared_experts: Any = None
        if shared_ffn_size:
            self.shared_experts = MLP(hidden_size, ffn_hidden_size=shared_ffn_size, bias=False, **stds, **place)

    def forward(self, x: Tensor, positions: Positions | None = None) -> Tensor:
        """The layer of x (..., hidden_size); result like x. positions: as in Router."""
        if positions is not None or x.ndim == 3:
            positions = positions_of(x, positions, self.tp)
        y = self.branch(flat_rows(x), positions=positions)
        return y if y.shape == x.shape else y.view(x.shape)

    def branch(
        self,
        rows: Tensor,
        norm: nn.Module | None = None,
        *,
        normed: ops.Normed | None = None,
        residual: bool = False,
        dropout: ops.Dropout | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """The layer of norm(rows), or with `residual` rows + dropout(layer(norm(rows))). normed: as in MLP.branch."""
        if not (self.fuses() and (norm is None or fusable_norm(norm))):
            x = rows if norm is None else call_rows(norm, rows, self.tp)
            y = ops.dropout(self._called(x, positions), dropout)
            return rows + y if residual else y
        gate: Router = self.gate
        y, loss = self.experts.run(
            rows,
            gate.policy.k,
            self.shared_experts,
            router_weight=gate.local("weight", self.tp.sequence_parallel),
            router=gate.options(rows, positions),
            norm=None if norm is None else norm.prologue(),
            normed=normed,
            residual=rows if residual else None,
            dropout=dropout,
        )
        take_balance_loss(loss)
        return y

    def fuses(self) -> bool:
        """Whether all children are this library's and unchanged, so that one operation runs them."""
        shared = self.shared_experts
        if not (fusable(Router, self.gate) and fusable(Experts, self.experts)):
            return False
        if shared is None:
            return True
        columns = fusable(MLP, shared) and fusable(ColumnParallelLinear, shared.gate_proj, shared.up_proj)
        return columns and fusable(RowParallelLinear, shared.down_proj)

    def _called(self, x: Tensor, positions: Positions | None) -> Tensor:
        """The children, called as modules."""
        for name, kind in (("gate", Router), ("experts", Experts)):
            child = getattr(self, name)
            if self.tp.size > 1 and not isinstance(unwrapped(child), kind):
                raise ValueError(
                    f"{name} is a {type(child).__name__}, which does not know what {self.tp.size} tensor-parallel "
                    f"ranks share: derive it from {kind.__name__}, or replace the whole MoE"
                )
        routing = self.gate(x, positions) if isinstance(unwrapped(self.gate), Router) else self.gate(x)
        y = self.experts(x, routing)
        return y if self.shared_experts is None else y + call_rows(self.shared_experts, x, self.tp)


def routers(model: nn.Module) -> dict[str, Router]:
    """The routers in a model, by their names in it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
