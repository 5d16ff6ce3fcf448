"""barrier: the specification, and what crosses links."""

from torch import Tensor

from ..cost import Cost


def barrier_reference(arrivals: Tensor) -> Tensor:
    """The earliest time at which each rank may leave, from the times of arrival (t,): the last one's."""
    return arrivals.max().expand_as(arrivals)


def barrier_cost(world: int) -> Cost:
    """One rank's flags, in bytes: each peer writes one here, and this rank reads it."""
    return Cost(0, 2 * barrier_bytes(world))


def barrier_bytes(world: int) -> int:
    """What a rank sends over its links: one int32 flag to every other rank."""
    return 4 * (world - 1)
