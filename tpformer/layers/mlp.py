"""The transformer's MLP, plain (GELU, squared ReLU) or gated (SwiGLU, GeGLU). Hidden features are sharded."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import MLP_ACTIVATIONS, check_choice, default_ffn_size
from tpformer.ops.sequence import flat_rows

from .children import Features, enter, leave
from .linear import ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule
from .tensor_parallel import TensorParallel


class MLP(ParallelModule):
    """fc2(act(fc1(x))), or down_proj(act(gate_proj(x)) * up_proj(x)).

    Layout:  x and result (tokens / t, hidden_size) with sequence_parallel, else (tokens, hidden_size), equal on all
             ranks; leading dims are flattened. fc1, gate_proj and up_proj are Shard(0); fc2 and down_proj Shard(1).
    Communication, per rank: one ops.column_linear (one gather for gate and up) and one ops.row_linear.
    Errors:  ValueError for an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        ffn_hidden_size: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = True,
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_choice("activation", activation, MLP_ACTIVATIONS)
        self.activation, self.gated = MLP_ACTIVATIONS[activation]
        if ffn_hidden_size is None:
            ffn_hidden_size = default_ffn_size(hidden_size, activation)
        self.ffn_hidden_size = ffn = ffn_hidden_size
        width = -(-ffn // self.tp.size)
        self._features = Features(slice(self.tp.rank * width, min((self.tp.rank + 1) * width, ffn)), ffn)
        column = partial(
            ColumnParallelLinear, hidden_size, ffn, bias=bias, init_std=init_std, tp=self.tp, device=device, dtype=dtype
        )
        row = partial(
            RowParallelLinear, ffn, hidden_size, bias=bias, init_std=output_init_std,
            tp=self.tp, device=device, dtype=dtype,
        )  # fmt: skip
        if self.gated:
            self.shares_gather = ("gate_proj", "up_proj")
            self.gate_proj, self.up_proj, self.down_proj = column(), column(), row()
        else:
            self.fc1, self.fc2 = column(), row()

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of x (..., hidden_size); result like x."""
        y = self.branch(flat_rows(x))
        return y if y.shape == x.shape else y.view(x.shape)

    def branch(
        self,
        rows: Tensor,
        norm: nn.Module | None = None,
        *,
        normed: ops.Normed | None = None,
        residual: bool = False,
        dropout: ops.Dropout | None = None,
        private: bool = False,
    ) -> Tensor:
        """The MLP of norm(rows), or with `residual` rows + dropout(mlp(norm(rows))).

        normed: norm(rows), if it has been made together with rows. private: as of ops.column_linear.
        """
        columns = [(child, self._features) for child in ([self.gate_proj, self.up_proj] if self.gated else [self.fc1])]
        outputs, carried, fused = enter(rows, norm, columns, self.tp, normed=normed, carry=residual, private=private)
        y, _ = leave(
            outputs[-1],
            self.down_proj if self.gated else self.fc2,
            self.tp,
            self.ffn_hidden_size,
            activation=self.activation,
            gate=outputs[0] if self.gated else None,
            residual=carried if residual else None,
            dropout=dropout,
            private=fused,
        )
        return y
