"""Which transport carries a tensor-parallel linear: the choice, and the error when a choice cannot be honoured."""

from torch.distributed import ProcessGroup

TRANSPORTS = ("auto", "sequential")


def resolve_transport(transport: str, group: ProcessGroup | None) -> str:
    """The transport that will run: "local" for one rank, else "sequential" (the collective, then the GEMM).

    An explicit choice is honoured or raises: ValueError names the transports there are.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} cannot run here; choose one of {', '.join(map(repr, TRANSPORTS))}")
    return "local" if group is None or group.size() == 1 else "sequential"
