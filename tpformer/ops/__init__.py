"""Differentiable operations on plain tensors and a ProcessGroup (None: one rank). Re-exports only."""

from .attention import causal_attention
from .column_linear import column_linear
from .cross_entropy import VocabSlice, linear_cross_entropy, vocab_parallel_cross_entropy
from .dropout import Dropout, dropout
from .embedding import vocab_parallel_embedding
from .norm import Norm, norm
from .rope import rope
from .row_linear import row_linear
from .sequence import gather_rows, reduce_rows, scatter_rows

__all__ = [
    "Dropout",
    "Norm",
    "VocabSlice",
    "causal_attention",
    "column_linear",
    "dropout",
    "gather_rows",
    "linear_cross_entropy",
    "norm",
    "reduce_rows",
    "rope",
    "row_linear",
    "scatter_rows",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
