"""Differentiable operations on plain tensors and a ProcessGroup (None: one rank). Re-exports only."""

from .activation import activation
from .attention import attention, cached_attention
from .autocast import autocast_dtype
from .choice import Decision, Grouped, choose_transport, use_measured_table
from .column_linear import column_linear
from .context import Context, RankSegments, context_balance, own_tokens
from .context_attention import context_attention
from .cross_entropy import VocabSlice, default_chunk_tokens, linear_cross_entropy, vocab_parallel_cross_entropy
from .dropout import Dropout, dropout, dropout_starts
from .embedding import vocab_parallel_embedding
from .exchanged_experts import exchanged_experts
from .experts import ExpertWeights, experts
from .norm import Norm, Normed, norm
from .offload import Offload
from .packing import packing_report, unpacked_activations
from .recompute import recompute
from .rope import rope
from .route import Balance, Policy, Router, Routing, route
from .row_linear import row_linear
from .sequence import gather_columns, gather_rows, reduce_rows, scatter_rows, sum_gradient, take_columns
from .shared_rows import SharedRows, shared_rows
from .transports.interface import Transport, record_transports
from .weight_gradients import Deferred, WeightGradientQueue, active_queue

__all__ = [
    "Balance",
    "Context",
    "Decision",
    "Deferred",
    "Dropout",
    "ExpertWeights",
    "Grouped",
    "Norm",
    "Normed",
    "Offload",
    "Policy",
    "RankSegments",
    "Router",
    "Routing",
    "SharedRows",
    "Transport",
    "VocabSlice",
    "WeightGradientQueue",
    "activation",
    "active_queue",
    "attention",
    "cached_attention",
    "autocast_dtype",
    "choose_transport",
    "column_linear",
    "context_attention",
    "context_balance",
    "default_chunk_tokens",
    "dropout",
    "dropout_starts",
    "exchanged_experts",
    "experts",
    "gather_columns",
    "gather_rows",
    "linear_cross_entropy",
    "norm",
    "own_tokens",
    "packing_report",
    "record_transports",
    "recompute",
    "reduce_rows",
    "rope",
    "route",
    "row_linear",
    "scatter_rows",
    "shared_rows",
    "sum_gradient",
    "take_columns",
    "unpacked_activations",
    "use_measured_table",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
