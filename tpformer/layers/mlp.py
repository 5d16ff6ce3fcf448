"""The transformer's MLP, plain (GELU) or gated (SwiGLU, GeGLU), hidden features sharded over tensor-parallel ranks."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops

from .linear import ColumnParallelLinear, RowParallelLinear, project
from .module import ParallelModule

# name in a config -> (elementwise function, gated)
MLP_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu_tanh", True),
}


def default_ffn_size(hidden_size: int, activation: str) -> int:
    """4 * hidden, or for a gated MLP 8/3 * hidden (as many parameters) rounded up to a multiple of 128."""
    return -(-8 * hidden_size // 384) * 128 if MLP_ACTIVATIONS[activation][1] else 4 * hidden_size


class MLP(ParallelModule):
    """fc2(act(fc1(x))), or down_proj(act(gate_proj(x)) * up_proj(x)).

    Layout:  x, residual and result (tokens / t, hidden_size) with sequence_parallel, else (tokens, hidden_size) equal
             on all ranks; leading dims are flattened. fc1, gate_proj, up_proj are Shard(0); fc2, down_proj Shard(1).
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
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = True,
        transport: str = "auto",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp_mesh, sequence_parallel, transport)
        if activation not in MLP_ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; choose one of {', '.join(MLP_ACTIVATIONS)}")
        function, self.gated = MLP_ACTIVATIONS[activation]
        ffn = ffn_hidden_size or default_ffn_size(hidden_size, activation)
        common: dict = {
            "bias": bias,
            "tp_mesh": tp_mesh,
            "sequence_parallel": sequence_parallel,
            "transport": transport,
            "device": device,
            "dtype": dtype,
        }
        if self.gated:
            self.shares_gather = ("gate_proj", "up_proj")
            self.gate_proj = ColumnParallelLinear(hidden_size, ffn, init_std=init_std, **common)
            self.up_proj = ColumnParallelLinear(hidden_size, ffn, init_std=init_std, **common)
            self.down_proj = RowParallelLinear(
                ffn, hidden_size, init_std=output_init_std, activation=function, **common
            )
        else:
            self.fc1 = ColumnParallelLinear(hidden_size, ffn, init_std=init_std, **common)
            self.fc2 = RowParallelLinear(ffn, hidden_size, init_std=output_init_std, activation=function, **common)

    def forward(
        self,
        x: Tensor,
        *,
        norm: ops.Norm | None = None,
        residual: Tensor | None = None,
        dropout: ops.Dropout | None = None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not self.gated:
            y = self.fc2(self.fc1(rows, norm=norm), residual=residual, dropout=dropout)
            return y.view(x.shape)
        gate, up = project(rows, [self.gate_proj, self.up_proj], norm)
        return self.down_proj(up, gate=gate, residual=residual, dropout=dropout).view(x.shape)
