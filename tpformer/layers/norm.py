"""LayerNorm and RMSNorm on all rows or on sequence shards. A linear can apply them while it reads its input."""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops

from .module import Constant, ParallelModule, check_plain
from .tensor_parallel import TensorParallel


class _Norm(ParallelModule):
    """What LayerNorm and RMSNorm have in common."""

    kind: str

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        *,
        of_heads: bool = False,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"normalized_shape={normalized_shape}: norms are over the last dim alone, so give one positive size"
            )
        if eps is not None and not eps >= 0:
            raise ValueError(f"eps={eps} is added under a root: give a number that is not negative")
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.of_heads = of_heads
        for name, value, wanted in (("weight", 1.0, elementwise_affine), ("bias", 0.0, elementwise_affine and bias)):
            if wanted:
                self.add_parameter(name, shape, Constant(value), shard=None, device=device, dtype=dtype)
            else:
                self.register_parameter(name, None)
        self.reset_parameters()

    @classmethod
    def from_norm(cls, norm: Any, *, tp: TensorParallel | DeviceMesh | None = None, **options: Any) -> Self:
        """A layer with copies of the parameters of torch's norm of this name, which all ranks hold and which stays.

        options: of_heads, and the constructor's for parameters. No communication. Errors: TypeError for a norm of
        another kind, ValueError for one over several dims.
        """
        check_plain(norm, getattr(nn, cls.__name__))
        if cls.kind == "layernorm":
            options["bias"] = norm.bias is not None
        if norm.weight is not None:
            options["dtype"] = norm.weight.dtype
        layer = cls(norm.normalized_shape, norm.eps, norm.elementwise_affine, tp=tp, device="meta", **options)
        return layer.filled_from(norm)

    def prologue(self, features: int) -> ops.Norm:
        """The norm for a linear to apply while it reads its input (`norm=` of the linear layers) of so many features.

        Errors: ValueError for another number than the norm is over."""
        if features != self.normalized_shape[0]:
            raise ValueError(
                f"x has {features} features, but the norm is over {self.normalized_shape[0]}: build it for x's"
            )
        partial = self.tp.sequence_parallel or (self.of_heads and self.tp.size > 1)
        weight, bias = self.local("weight", partial), self.local("bias", partial)
        return ops.Norm(self.kind, weight, bias, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """norm(x) over the last dim of x (..., size); result like x."""
        return ops.norm(x, self.prologue(x.shape[-1] if x.dim() else 0))

    def extra_repr(self) -> str:
        """Size and options, as repr() shows them."""
        heads = ", of_heads=True" * self.of_heads
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}{heads}"


class LayerNorm(_Norm):
    """nn.LayerNorm over the last dim: normalized_shape is its size, alone or in a sequence.

    Layout:  weight and bias (size,) are Replicate on the tp axis; x and y (..., size) are sequence shards with
             sequence_parallel, else equal on all ranks.
    Communication: none. With sequence_parallel the parameters' gradients are partial sums over this rank's rows
             (parallel.reduce_partial_gradients, or FSDP2, adds them up once per step).
    of_heads: x is (tokens, heads / t, size), this rank's heads of all tokens. Then the gradients are partial sums
             without sequence_parallel, too.
    Errors:  ValueError for a normalized_shape of several dims, or a negative eps.
    """

    kind = "layernorm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        **options,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, **options)


class RMSNorm(_Norm):
    """nn.RMSNorm over the last dim; layout, communication and errors as for LayerNorm; no bias.

    eps=None is the machine epsilon of promote_types(x.dtype, float32), the dtype that it computes in.
    """

    kind = "rmsnorm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        **options,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, False, **options)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
