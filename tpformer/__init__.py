"""tpformer: tensor-parallel transformer training on plain PyTorch and Triton.

Import from the subpackages: `tpformer.layers` (drop-in modules), `tpformer.models` (GPT), `tpformer.ops`
(differentiable operations). Importing any of them needs neither a GPU nor triton. What works on a model of one's own is
here: `tpformer.parallelize`, the names beside it in `IN_PLACE`, and `tpformer.Muon`.
"""

from importlib import import_module
from typing import Any

from .version import __version__ as __version__

IN_PLACE = (  # names of tpformer.in_place, which is imported when one of them is used
    "FusedColwiseParallel",
    "FusedRowwiseParallel",
    "FusedSequenceParallel",
    "FusedVocabParallel",
    "auto_plan",
    "clip_grad_norm_",
    "full_state_dict",
    "load_sharded",
    "parallelize",
    "parameters_on_meta",
    "verify",
)

OPTIMIZERS = ("Muon",)  # likewise of tpformer.training.muon


def __getattr__(name: str) -> Any:
    if name in IN_PLACE:
        return getattr(import_module("tpformer.in_place"), name)
    if name in OPTIMIZERS:
        return getattr(import_module("tpformer.training.muon"), name)
    raise AttributeError(f"module 'tpformer' has no attribute {name!r}")
