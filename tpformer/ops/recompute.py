"""Recomputation: a region keeps only its inputs, and the backward runs it again to get what its operations save."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from torch.utils.checkpoint import checkpoint

from .uncompiled import uncompiled


@uncompiled
def recompute(region: Callable[..., Any], *inputs: Any, keep_random_state: bool = True) -> Any:
    """region(*inputs), of which only the inputs are saved. The backward runs the region again, on all ranks alike.

    It is torch.utils.checkpoint (Chen et al. 2016, arXiv:1604.06174).
    keep_random_state: the second run draws the same numbers from torch's generator as the first. Other people's modules
    need that, and blocks without a dropout_key; dropout with a key does not.
    A row_linear that ends the region (`ends_region=True`) skips its GEMM and reduction in the second run, because
    nothing reads their result.
    The second run reads the parameters as they are then. Under torch.func.functional_call, run the backward within the
    call or do not recompute; otherwise gradients are taken at the module's own parameters (torch's checkpoint has that
    limit, too).
    """
    return checkpoint(
        region,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=keep_random_state,
        context_fn=lambda: (_Run(again=False), _Run(again=True)),
    )


_AGAIN: ContextVar[bool] = ContextVar("again", default=False)


class _Run:
    """A context that says whether a region runs again.

    It also surrounds a region's first run, which may be part of an outer region's second run. A graph that is kept is
    run several times, so one object can be entered again.
    """

    def __init__(self, again: bool) -> None:
        self.again = again
        self.tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self.tokens.append(_AGAIN.set(self.again))

    def __exit__(self, *_: object) -> None:
        _AGAIN.reset(self.tokens.pop())


def running_again() -> bool:
    """Whether this call is part of the second run of the innermost region around it."""
    return _AGAIN.get()
