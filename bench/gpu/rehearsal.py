"""A bench on sizes that a CPU can hold, whose gates let everything pass: a rehearsal of it, where kernels do not run.

    python -m checks.driver.pretend -m bench.gpu.rehearsal norm --quick

Belongs here: which sizes shrink, and which questions are not asked.
"""

import dataclasses
import sys
from typing import Any

from tpformer import config
from tpformer.config import preset_config
from tpformer.models import GPTConfig

from .. import accuracy, timing

SHARE = 8  # by which models are narrower
NARROWED = ("hidden_size", "head_dim", "ffn_hidden_size", "vocab_size", "expert_ffn_size", "shared_expert_size")
SECONDS = timing.Effort(1, 1)


def narrow(name: str, **overrides: Any) -> GPTConfig:
    """A named architecture with as many heads and layers, all of them narrow."""
    whole = preset_config(name, **overrides)
    sizes = {each: getattr(whole, each) for each in NARROWED}
    return dataclasses.replace(whole, **{each: size and size // SHARE for each, size in sizes.items()})


def nothing(*arguments: object, **options: object) -> None:
    """In place of a gate."""


def main(arguments: list[str]) -> int:
    """`python -m bench` with these arguments."""
    config.preset_config = narrow  # type: ignore[assignment]
    accuracy.require_accurate = nothing
    timing.QUICK = SECONDS
    from .. import ceilings, constants
    from ..memory_bound import benches, updates
    from ..memory_bound.case import Rows

    benches.require_right = benches.require_same = nothing
    updates.ROWS = Rows("narrow", 480, 256)
    ceilings.COPIED, ceilings.SIDES = 1 << 20, (256, 512)
    constants.MOVED, constants.SIDE = (1,), 512
    from ..__main__ import BENCHES
    from ..runner import main as bench

    return bench(arguments, BENCHES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
