"""A rank's part of a parameter, as the math takes it: `to_local()` that sees writes, and costs half as much.

Belongs here: the one step from a parameter, which is a DTensor, to the tensor that an operation saves for its backward.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpformer.ops.unsaved import check_unwritten, versions
from tpformer.torch_private import Function, held_by, laid_out_as

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class LocalPart(Function):
    """`parameter.to_local()`; the gradient is a DTensor like the parameter, or partial sums over the ranks of its mesh.

    A DTensor counts what is written to it for itself, not for its local tensor, which operations save. So autograd
    would not see that a parameter was written between a forward and its backward, and the gradient of the input would
    be that of the new values. read: whether a backward reads the parameter, as it does not read a bias.
    """

    @staticmethod
    def forward(ctx: Any, parameter: "DTensor", partial: bool, read: bool) -> Tensor:
        """The local tensor, as a tensor of its own: autograd writes to the object that a function gives."""
        ctx.parameter, ctx.partial, ctx.versions = parameter, partial, versions(parameter) if read else None
        ctx.set_materialize_grads(False)
        held = held_by(parameter)
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple["DTensor | None", None, None]:
        """The parameter's gradient. RuntimeError if the parameter was written since."""
        (gradient,), parameter = gradients, ctx.parameter
        if gradient is None:
            return None, None, None
        if ctx.versions is not None:
            check_unwritten("a layer's parameter", ctx.versions, parameter)
        if not gradient.requires_grad and gradient.stride() == held_by(parameter).stride():
            return laid_out_as(gradient, parameter, ctx.partial), None, None
        from torch.distributed.tensor import DTensor, Partial

        places = [Partial()] if ctx.partial else parameter.placements
        same = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(gradient, parameter.device_mesh, places, run_check=False, **same), None, None
