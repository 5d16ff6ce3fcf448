"""Transports for the tests of operations, opened as TensorParallel opens them for layers. No tests."""

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.ops.choice import column_request, open_transport
from tpformer.ops.transports.interface import Transport

IN_FP8 = "quantized "


def opened(
    group: ProcessGroup | None, x: Tensor, sequence_parallel: bool = True, transport: str = "auto", width: int = 1
) -> Transport:
    """The transport of this name for rows like x; behind IN_FP8 it multiplies blocks. width: by which "auto" chooses on
    a GPU."""
    rows, k, asked = x.shape[:-1].numel(), x.shape[-1], transport.removeprefix(IN_FP8)
    request = column_request(rows, k, width, x.dtype, x.device, group, sequence_parallel, asked)
    return open_transport(request._replace(precision="16" if asked == transport else "fp8"))
