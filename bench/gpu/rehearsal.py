"""A bench where kernels do not run: its gates let everything pass. Without --wide its models are narrow.

    python -m checks.driver.pretend -m bench.gpu.rehearsal norm --quick
    python -m checks.driver.pretend -m bench.gpu.rehearsal --wide norm --quick

The first asks whether the bench works. The second makes its very calls of our kernels, for what they compile.

Belongs here: which sizes shrink, and which questions are not asked.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from harness import accuracy, timing
from tpformer import config
from tpformer.config import preset_config
from tpformer.models import GPTConfig

SHARE = 8  # by which models are narrower
NARROWED = ("hidden_size", "head_dim", "ffn_hidden_size", "vocab_size", "expert_ffn_size", "shared_expert_size")
ONCE = timing.Effort(1, 1)
COMPILED = "torch.compile"  # which compiles for minutes, and none of our kernels


def narrow(name: str, **overrides: Any) -> GPTConfig:
    """A named architecture with as many heads and layers, all of them narrow."""
    whole = preset_config(name, **overrides)
    sizes = {each: getattr(whole, each) for each in NARROWED}
    return dataclasses.replace(whole, **{each: size and size // SHARE for each, size in sizes.items()})


def nothing(*arguments: object, **options: object) -> None:
    """A stand-in for a gate, which does nothing."""


def called(calls: Mapping[str, timing.Call], effort: timing.Effort) -> timing.Seconds:
    """A stand-in for measure: it calls each once, and says that everything takes a millisecond."""
    for name, call in calls.items():
        if not name.startswith(COMPILED):
            if call.prepare is not None:
                call.prepare()
            call.run()
    return {name: [1e-3] * effort.rounds for name in calls}


def shrink() -> None:
    """Narrow models, and small tensors where no model says how large they are."""
    config.preset_config = narrow  # type: ignore[assignment]
    from .. import ceilings, constants
    from ..memory_bound import updates
    from ..memory_bound.case import Rows

    updates.ROWS = Rows("narrow", 480, 256)
    ceilings.COPIED, ceilings.SIDES = 1 << 20, (256, 512)
    constants.MOVED, constants.SIDE = (1,), 512


def main(arguments: list[str]) -> int:
    """`python -m bench` with these arguments."""
    accuracy.require_accurate = nothing
    timing.QUICK = ONCE
    wide = arguments[0] == "--wide"
    if wide:
        timing.measure = called
    else:
        shrink()
    from ..memory_bound import benches

    benches.require_right = benches.require_same = nothing
    from harness.runner import main as bench

    from ..__main__ import BENCHES

    if wide:
        return bench(arguments[1:], [dataclasses.replace(each, check=None) for each in BENCHES])
    return bench(arguments, BENCHES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
