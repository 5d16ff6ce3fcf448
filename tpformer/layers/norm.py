"""LayerNorm and RMSNorm on full rows or on sequence shards; a linear can take them as a prologue."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops

from .module import Constant, ParallelModule
from .tensor_parallel import TensorParallel


class _Norm(ParallelModule):
    kind: str

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = False,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        self.hidden_size, self.eps = hidden_size, eps
        self.add_parameter("weight", (hidden_size,), Constant(1.0), shard=None, device=device, dtype=dtype)
        if bias:
            self.add_parameter("bias", (hidden_size,), Constant(0.0), shard=None, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def prologue(self) -> ops.Norm:
        """The norm for a linear to apply while it reads its input (`norm=` of the linear layers)."""
        partial = self.tp.sequence_parallel
        weight, bias = self.local("weight", partial), self.local("bias", partial)
        return ops.Norm(self.kind, weight, bias, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.prologue())

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class LayerNorm(_Norm):
    """nn.LayerNorm over the last dim.

    Layout:  weight and bias (hidden_size,) are Replicate on the tp axis; x and y (..., hidden_size) are sequence shards
             with sequence_parallel, else equal on all ranks.
    Communication: none. With sequence_parallel the parameters' gradients are partial sums over this rank's rows
             (parallel.reduce_partial_gradients, or FSDP2, adds them up once per step).
    """

    kind = "layernorm"

    def __init__(self, hidden_size: int, *, bias: bool = True, **options) -> None:
        super().__init__(hidden_size, bias=bias, **options)


class RMSNorm(_Norm):
    """nn.RMSNorm over the last dim; layout and communication as for LayerNorm; no bias."""

    kind = "rmsnorm"

    def __init__(self, hidden_size: int, **options) -> None:
        super().__init__(hidden_size, **options)


NORMS: dict[str, type[_Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
