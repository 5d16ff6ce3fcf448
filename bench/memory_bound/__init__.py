"""The benches norm, activation, rope, dropout and cross_entropy: kernels that multiply no matrices. Re-exports only."""

from .benches import BENCHES

__all__ = ["BENCHES"]
