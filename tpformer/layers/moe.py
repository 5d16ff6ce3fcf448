"""Mixture of experts: Experts and MoE, which takes an MLP's place in a block. Experts are divided over ranks.

Belongs here: the modules. Their router is in router.py; the computation is ops.experts and ops.exchanged_experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import FP8, MLP_ACTIVATIONS, check_choice, check_expert_ranks, check_fp8_sizes, check_positive
from tpformer.ops.sequence import flat_rows
from tpformer.torch_private import is_own_parameter, refuse_replicas

from .children import call_rows, fusable, fusable_norm, unwrapped
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import MLP
from .module import EXCHANGING, Normal, ParallelModule
from .positions import Positions, positions_of
from .router import Router, take_balance_loss
from .tensor_parallel import TensorParallel


class Experts(ParallelModule):
    """n_experts gated MLPs without biases, whose matrices are stacked: y = W_down[e] (act(W_gate[e] x) * (W_up[e] x)).

    Layout:  gate_up_proj (n_experts, 2 * ffn_hidden_size, hidden_size), the gate first, and down_proj (n_experts,
             hidden_size, ffn_hidden_size) are Shard(0): each rank has n_experts / t whole experts. x and result as in
             MLP; routing is that of all tokens. With tp.experts of ep ranks they are cut over these, n_experts / ep on
             each, and routing is that of this rank's rows.
    Communication, per rank: that of ops.experts, or with tp.experts of ops.exchanged_experts, without the routing's.
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
        of_model = TensorParallel.of(tp)
        super().__init__(of_model.of_experts)
        if of_model.experts is not None:
            self.exchanges = True
            refuse_replicas(self, EXCHANGING)
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, n_experts=n_experts)
        check_choice("activation", activation, [name for name, (_, gated) in MLP_ACTIVATIONS.items() if gated])
        check_expert_ranks(n_experts, self.tp.size, "expert_parallel" if self.exchanges else "tensor_parallel")
        if self.tp.precision == FP8:
            check_fp8_sizes({"hidden_size": (hidden_size, 1), "ffn_hidden_size of an expert": (ffn_hidden_size, 1)})
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
        """ops.experts, or ops.exchanged_experts, of rows (tokens / t, hidden_size) with this layer's matrices.

        shared: what ops.experts computes of the same rows. An exchange takes what others have computed as `added`.
        """
        if self.exchanges:
            assert shared is None, "a shared expert runs beside an exchange"
            return ops.exchanged_experts(
                rows,
                self.matrices(),
                n_experts=self.n_experts,
                activation=self.activation,
                group=self.tp.group,
                transport=self.tp.alone.column_transport(rows, 2 * self.ffn_hidden_size),
                deferred=self.deferred(),
                **options,
            )
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
        ranks = f"{'ep' if self.exchanges else 'tp'}={self.tp.size}"
        return f"{self.n_experts} x ({self.hidden_size}, {self.ffn_hidden_size}), {ranks}"


class MoE(ParallelModule):
    """A router, experts, and maybe a shared expert, in the place of a block's MLP. No token is dropped.

    gate: the Router, which chooses policy.k experts for a token; experts: the Experts; shared_experts: an MLP that
    takes every token, or None. The names are those of transformers' Qwen3-MoE and DeepSeek-V3.
    Layout:  x and result as in MLP.
    Communication, per rank: that of ops.experts: the five collectives of a dense MLP, and the routing's. With
             tp.experts that of ops.exchanged_experts, and a shared expert's own.
    Memory:  2 + 4 (K f + f_s) / h bytes per token and hidden unit for the backward, in 16 bits, with K experts of width
             f a token and a shared expert of width f_s; and 12 K + 4 E bytes of routing a token.
    A child is called as a module, not fused, if it has a hook, a parametrization or a replaced forward, and so is a
    shared expert with biases or another activation than the experts'. The result is the same; norm(x) is then kept,
    too. Errors: ValueError on several ranks for a gate or experts of another class.
    DistributedDataParallel: with tp.experts it would overwrite experts by those of rank 0, and add up gradients of
    different ones. Around a module of this library it raises ValueError; around another one that contains such a layer
    torch raises an error of its own about DTensors. It takes one that leaves experts' parameters out, by their names.
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
        private: bool = False,
    ) -> Tensor:
        """The layer of norm(rows), or with `residual` rows + dropout(layer(norm(rows))). normed, private: as in
        MLP.branch."""
        if not (self.fuses() and (norm is None or fusable_norm(norm))):
            x = rows if norm is None else call_rows(norm, rows, self.tp)
            y = ops.dropout(self._called(x, positions), dropout)
            return rows + y if residual else y
        gate: Router = self.gate
        shared, beside = self.shared_experts, {}
        if self.experts.exchanges and shared is not None:
            beside = {"added": partial(shared.branch, rows, norm, normed=normed)}  # while the rows travel
            shared = None
        y, loss = self.experts.run(
            rows,
            gate.policy.k,
            shared,
            router_weight=gate.local("weight", self.tp.sequence_parallel),
            router=gate.options(rows, positions),
            norm=None if norm is None else norm.prologue(rows.shape[1]),
            normed=normed,
            residual=rows if residual else None,
            dropout=dropout,
            private=private and not beside,  # else its gradient is a sum of two
            **beside,
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
        if not fusable(MLP, shared) or self.why_shared_is_called() is not None:
            return False
        *columns, down = shared.children()
        return fusable(ColumnParallelLinear, *columns) and fusable(RowParallelLinear, down)

    def why_shared_is_called(self) -> str | None:
        """Why the operation that runs the experts cannot compute the shared one as it is; None if it can, or if that
        runs by itself."""
        shared, experts = self.shared_experts, self.experts
        if type(shared) is not MLP or type(experts) is not Experts or experts.exchanges:
            return None
        if not shared.gated or shared.activation != experts.activation:
            return "its activation is not that of the experts"
        *_, down = linears = list(shared.children())
        if getattr(down, "activation", None) is not None:
            return "its down_proj has an activation of its own"
        return "it has biases" if any(getattr(each, "bias", None) is not None for each in linears) else None

    def _called(self, x: Tensor, positions: Positions | None) -> Tensor:
        """The children, called as modules."""
        ranks = max(self.tp.size, self.tp.of_experts.size)
        for name, kind in (("gate", Router), ("experts", Experts)):
            child = getattr(self, name)
            if ranks > 1 and not isinstance(unwrapped(child), kind):
                raise ValueError(
                    f"{name} is a {type(child).__name__}, which does not know what {ranks} ranks share: derive it from "
                    f"{kind.__name__}, or replace the whole MoE"
                )
        routing = self.gate(x, positions) if isinstance(unwrapped(self.gate), Router) else self.gate(x)
        y = self.experts(x, routing)
        return y if self.shared_experts is None else y + call_rows(self.shared_experts, x, self.tp)
