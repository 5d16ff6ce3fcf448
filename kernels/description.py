"""What a plan of a launcher's call depends on: the description by which `replayed` finds it (replay.py).

Belongs here: what of each argument must be the same in every call of a plan, and what may be another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .finish import Dropout, signed
from .launch import ALIGNMENT, Tile


@dataclass(frozen=True, eq=False)
class Lasting:
    """What a launcher takes besides tensors, and whose memory never moves: plans hold its addresses.

    The plans of calls with it are kept in it, and end with it. Its tensors are its attributes, or in tuples there.
    """

    plans: dict = field(default_factory=dict, init=False, repr=False)


def describe_call(
    values: Sequence, description: list, tensors: list[Tensor], addresses: list[int], keys: list[int]
) -> Lasting | None:
    """Append to `description` what a plan depends on, and to the other lists what may differ between its calls.
    Returns the Lasting among the values."""
    lasting = None
    for value in values:
        role = ROLES[type(value)]
        if role is None:
            description.append(value)
        elif role is Tensor:
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            description.append((value.shape, value.stride(), value.dtype, value.device, address % ALIGNMENT))
        elif role is Dropout:
            keys.append(signed(value.key))
            describe_call((value.start, value.p), description, tensors, addresses, keys)
        elif role is Lasting:
            lasting = value
        else:
            description += (type(value), len(value))
            lasting = describe_call(value, description, tensors, addresses, keys) or lasting
    return lasting


class Roles(dict[type, type | None]):
    """What a value of that type is to a description; None if it is held as it is. Every call asks of each argument."""

    def __missing__(self, kind: type) -> type | None:
        each = (Tensor, Dropout, Lasting, tuple, list)
        self[kind] = found = next((role for role in each if issubclass(kind, role)), None)
        return found


ROLES = Roles({Tile: None})
