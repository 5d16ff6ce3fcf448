"""What to do about arguments that no operation takes, found once one has failed: a call that is right pays nothing."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from tpformer.distributed.dtensor import is_dtensor
from tpformer.distributed.groups import check_group
from tpformer.words import shown


def explain(error: Exception, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """TypeError with the reason, if the operation has failed because of a DTensor, or of a group or a transport that is
    none."""
    names = inspect.signature(function).parameters
    given = dict(zip(names, args, strict=False)) | dict(options)
    if (group := given.get("group")) is not None and not isinstance(group, ProcessGroup):
        check_group(group)
    if (transport := given.get("transport")) is not None and not hasattr(transport, "gathering"):  # as Transports have
        raise TypeError(
            f"transport={shown(transport)}: operations take an opened one, which "
            f"tpformer.layers.TensorParallel(mesh, sequence_parallel=True).column_transport(x, width) gives "
            f"(row_transport for a row_linear), or None for one rank"
        ) from error
    if "DTensor" in str(error) and (found := [name for name, each in given.items() if _has_dtensor(each)]):
        raise TypeError(
            f"{function.__name__}: {found[0]} is a DTensor, and operations take a rank's own tensors: give x.to_local()"
        ) from error


def _has_dtensor(x: Any) -> bool:
    return any(map(is_dtensor, x)) if isinstance(x, tuple | list) else is_dtensor(x)
