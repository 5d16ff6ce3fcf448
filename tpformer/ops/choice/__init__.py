"""The one door for the choice of a linear's transport: request, topology, table, threshold. Re-exports only.

`TensorParallel` opens transports through it, explain() and the planner ask it for reasons and times. Operations do not
come here: they take an opened transport.
"""

from .choose import (
    Decision,
    break_even,
    choose_transport,
    device_name,
    machine_of_request,
    open_transport,
    predicted_times,
    use_measured_table,
    why_not_fused,
)
from .request import Grouped, Request, column_request, row_request
from .spare import FEWER_CTAS, spare_processors

__all__ = [
    "FEWER_CTAS",
    "Decision",
    "Grouped",
    "Request",
    "break_even",
    "choose_transport",
    "column_request",
    "device_name",
    "machine_of_request",
    "open_transport",
    "predicted_times",
    "row_request",
    "spare_processors",
    "use_measured_table",
    "why_not_fused",
]
