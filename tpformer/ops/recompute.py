"""Recomputation: a region keeps its inputs only, and runs once more in the backward for what its operations save."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from torch.utils.checkpoint import checkpoint

from .uncompiled import uncompiled


@uncompiled
def recompute(region: Callable[..., Any], *inputs: Any, keep_random_state: bool = True) -> Any:
    """region(*inputs) with its inputs saved and nothing else; the backward runs the region again, on all ranks alike.

    torch.utils.checkpoint (Chen et al. 2016, arXiv:1604.06174). keep_random_state: what the region draws from
    torch's generator, as other people's modules do and our blocks without a dropout_key, it draws again; a region whose
    dropout has its key needs no such copy. A row_linear that ends the region (`ends_region=True`) is not multiplied or
    reduced again, as nothing reads its result the second time.
    The second run reads parameters as they are then: under torch.func.functional_call do the backward within the call,
    or do not recompute, else gradients are at the module's own parameters, as torch.utils.checkpoint's are, too.
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
    """Sets whether a region runs again; also around its first run, which may be part of another region's second. One
    object serves every second run (a graph that is kept has several), so it can be entered again."""

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
