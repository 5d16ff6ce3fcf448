"""The one type every `<op>_cost` returns; nothing else belongs here."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Work of one call: floating-point operations, and bytes that must cross main memory (each operand once)."""

    flops: int
    bytes: int
