"""Drop-in nn.Modules, each usable alone: plain with tp=None, tensor-parallel with a 1-D mesh or a TensorParallel.

Re-exports only."""

from tpformer.kernels.rope.reference import RopeScaling
from tpformer.ops import Policy, Routing, VocabSlice, linear_cross_entropy, vocab_parallel_cross_entropy

from .attention import SelfAttention
from .block import TransformerBlock
from .blocks import transformer_block
from .dropout import DropoutKey
from .embedding import LMHead, PositionEmbedding, VocabParallelEmbedding
from .explain import LinearPlan, explain, linear_plans
from .keep import keep
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import MLP
from .module import Constant, Normal, ParallelModule, init_weights
from .moe import Experts, MoE
from .norm import LayerNorm, RMSNorm
from .positions import Positions
from .router import Router, balance_losses
from .tensor_parallel import TensorParallel

__all__ = [
    "ColumnParallelLinear",
    "Constant",
    "DropoutKey",
    "Experts",
    "LMHead",
    "LayerNorm",
    "LinearPlan",
    "MLP",
    "MoE",
    "Normal",
    "ParallelModule",
    "Policy",
    "PositionEmbedding",
    "Positions",
    "RMSNorm",
    "RopeScaling",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SelfAttention",
    "TensorParallel",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "VocabSlice",
    "balance_losses",
    "explain",
    "init_weights",
    "keep",
    "linear_cross_entropy",
    "linear_plans",
    "vocab_parallel_cross_entropy",
    "transformer_block",
]
