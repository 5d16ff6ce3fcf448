"""How a model is laid out on a mesh and how its gradients are completed. Re-exports only."""

from .gradients import clip_gradients, gradient_norm, reduce_partial_gradients
from .precision import apply_mixed_precision

__all__ = ["apply_mixed_precision", "clip_gradients", "gradient_norm", "reduce_partial_gradients"]
