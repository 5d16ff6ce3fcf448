"""Transports for the tests of operations, opened as TensorParallel opens them for layers. No tests."""

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.ops.choice import column_request, open_transport
from tpformer.ops.transports.interface import Transport


def opened(
    group: ProcessGroup | None, x: Tensor, sequence_parallel: bool = True, transport: str = "auto", width: int = 1
) -> Transport:
    """The transport of this name for rows like x. width: by which "auto" chooses on a GPU."""
    rows, k = x.shape[:-1].numel(), x.shape[-1]
    asked, precision = ("auto", "fp8") if transport == "quantized" else (transport, "16")
    request = column_request(rows, k, width, x.dtype, x.device, group, sequence_parallel, asked)
    return open_transport(request._replace(precision=precision))
