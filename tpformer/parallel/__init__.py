"""How a model is laid out on a mesh and how its gradients are completed. Re-exports only."""

from tpformer.config import SCHEDULES, Layout
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.local_gradients import local_norms, scale_gradients
from tpformer.exchange import Exchange

from .clipping import clip_grad_norm_
from .exchange import exchange_named, exchange_of
from .gradients import gradient_norm, gradient_norms, reduce_partial_gradients
from .master_weights import MasterWeights, needs_masters
from .pipeline import Pipeline
from .recording import Action, gather_actions
from .sequential import pipeline_sequential
from .split import split_stages
from .tied import TiedParameter
from .whole_matrices import WholeMatrices
from .zero import apply_zero, gathers_of, prepare_backward, reshard

__all__ = [
    "SCHEDULES",
    "Action",
    "Exchange",
    "Layout",
    "MasterWeights",
    "Pipeline",
    "TiedParameter",
    "WholeMatrices",
    "apply_zero",
    "exchange_named",
    "exchange_of",
    "clip_grad_norm_",
    "gather_actions",
    "gathers_of",
    "gradient_norm",
    "gradient_norms",
    "local_norms",
    "local_part",
    "needs_masters",
    "pipeline_sequential",
    "prepare_backward",
    "reduce_partial_gradients",
    "reshard",
    "scale_gradients",
    "split_stages",
]
