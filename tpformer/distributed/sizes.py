"""How the memory that ranks share is rounded. Plain numbers, and nothing else."""

PAGE = 4096  # bytes: a rank's region, and each part of it, begins at a multiple
SLOT_MINIMUM = 1 << 20  # bytes: smaller slots would grow in the first steps, and growing is a collective


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below value."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below value."""
    return 1 << max(value - 1, 0).bit_length()


def slot_bytes(nbytes: int) -> int:
    """The size of a slot that holds nbytes: a power of two, at least SLOT_MINIMUM."""
    return max(SLOT_MINIMUM, power_of_two(nbytes))
