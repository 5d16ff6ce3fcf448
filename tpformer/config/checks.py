"""Checks of values that several sections, layers and operations share, so that each mistake has one message."""

from collections.abc import Iterable


def check_positive(**sizes: int | None) -> None:
    """ValueError for the first of these sizes that is below 1. A size of None is unset, and passes."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """ValueError unless the value is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")


def check_dropout(p: float) -> None:
    """ValueError unless p, the probability that an element is zeroed, is in [0, 1)."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout={p} must be in [0, 1)")


def check_loss_terms(label_smoothing: float, z_loss: float, prefix: str = "") -> None:
    """ValueError unless label_smoothing is in [0, 1) and z_loss is not negative.

    prefix: what the message puts before their names, such as "train.".
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{prefix}label_smoothing={label_smoothing} is outside [0, 1)")
    if not z_loss >= 0:
        raise ValueError(f"{prefix}z_loss={z_loss} is negative: give the coefficient of logsumexp squared, or 0")
