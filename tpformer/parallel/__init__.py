"""How a model is laid out on a mesh and how its gradients are completed. Re-exports only."""

from .gradients import gradient_norm, reduce_partial_gradients, scale_gradients
from .layout import SCHEDULES, Layout
from .pipeline import Action, Pipeline
from .split import split_stages
from .tied import TiedParameter
from .zero import apply_zero, data_parallel_mesh, prepare_backward

__all__ = [
    "SCHEDULES",
    "Action",
    "Layout",
    "Pipeline",
    "TiedParameter",
    "apply_zero",
    "data_parallel_mesh",
    "gradient_norm",
    "prepare_backward",
    "reduce_partial_gradients",
    "scale_gradients",
    "split_stages",
]
