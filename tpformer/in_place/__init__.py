"""A model that exists, made tensor-parallel where it stands: modules, names and global shapes stay as they are.

Re-exports only."""

from tpformer.parallel import clip_grad_norm_

from .loading import load_sharded, parameters_on_meta
from .parallelize import parallelize
from .plan import Plan, auto_plan
from .saving import full_state_dict
from .styles import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel, FusedVocabParallel
from .verify import verify

__all__ = [
    "FusedColwiseParallel",
    "FusedRowwiseParallel",
    "FusedSequenceParallel",
    "FusedVocabParallel",
    "Plan",
    "auto_plan",
    "clip_grad_norm_",
    "full_state_dict",
    "load_sharded",
    "parallelize",
    "parameters_on_meta",
    "verify",
]
