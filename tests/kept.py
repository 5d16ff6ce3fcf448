"""Models and blocks with what they keep for the backward, said in one call. No tests."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from tpformer.config import KEEP_KEYS
from tpformer.layers import keep

Made = TypeVar("Made", bound=nn.Module)


def kept(make: Callable[..., Made], *args: Any, **options: Any) -> Made:
    """make(*args, **options), and layers.keep of it with those options that are keep's."""
    said = {name: options.pop(name) for name in KEEP_KEYS if name in options}
    return keep(make(*args, **options), **said)
