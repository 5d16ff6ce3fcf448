"""The GEMMs of the models that tensor parallelism is for, as one of t ranks has them.

Belongs here: which models, layers and numbers of rows are measured, and the names of what is timed on them. Every
size follows from a model's configuration.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tpformer.config import MLP_ACTIVATIONS, preset_config
from tpformer.models import GPTConfig
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

BARE, LIBRARY, SUMMED = "matmul", "torch.matmul", "matmul, torch.sum"
FUSED, PUSHED, BUMPED = "fused", "fused, SM push", "fused, with bump"
MODELS = {
    "8B": preset_config("llama3-8b"),
    "70B": preset_config("llama3-70b"),
    "405B": preset_config("llama3-405b"),
    "GPT-3": preset_config("megatron-145.6b", n_layers=96),  # 175B: the same layers, more of them
}
RANKS = 8
GROUPS = (2, 4, RANKS)  # ranks of the groups that predictions are made for
ROWS = (1024, 2048, 4096, 8192, 16384)
DECODE_ROWS = (8, 32, 128)  # tokens of as many sequences; no sequence parallelism, so the row layers all-reduce


class Shape(NamedTuple):
    """One rank's GEMM (M, K) x (K, N) of a layer that t ranks share; M counts all rows, op is the layer's operation."""

    model: str
    layer: str
    op: str
    m: int
    n: int
    k: int
    t: int

    def __str__(self) -> str:
        return f"{self.model} {self.layer} {self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def column_layers(config: GPTConfig, t: int) -> list[tuple[str, int, int]]:
    """(layer, N, K) per rank of the layers sharded by output feature: q, k and v share a gather, as gate and up do."""
    gated = MLP_ACTIVATIONS[config.activation][1]
    qkv = config.query_size + 2 * config.kv_size
    return [
        ("qkv", qkv // t, config.hidden_size),
        ("gate+up" if gated else "up", config.hidden_features // t, config.hidden_size),
    ]


def row_layers(config: GPTConfig, t: int) -> list[tuple[str, int, int]]:
    """(layer, N, K) per rank of the layers sharded by input feature."""
    return [("o", config.hidden_size, config.query_size // t), ("down", config.hidden_size, config.ffn_size // t)]


def shapes(op: str, rows: Sequence[int] = ROWS, t: int = RANKS) -> list[Shape]:
    """All layers that use the operation, for every number of rows. ValueError if t ranks cannot share them."""
    result = []
    for model, config in MODELS.items():
        for what, size in (("heads", config.kv_heads), ("MLP features", config.ffn_size)):
            if size % t:
                raise ValueError(f"{t} ranks cannot share the {size} {what} of {model}: use a divisor of {RANKS}")
        layers = {GATHER: column_layers, SCATTER: row_layers, ALL_REDUCE: row_layers}[op](config, t)
        result += [Shape(model, layer, op, m, n, k, t) for layer, n, k in layers for m in rows]
    return result


def operation_shapes(op: str, t: int = RANKS) -> list[Shape]:
    """The list of an operation: training's rows, and decoding's where it does not scatter or gather them."""
    return shapes(op, (*DECODE_ROWS, *ROWS) if op == ALL_REDUCE else ROWS, t)


def every_shape(op: str) -> list[Shape]:
    """All layers that use the operation, for GROUPS of ranks and all numbers of rows, decoding's among them."""
    return [shape for t in GROUPS for shape in shapes(op, (*DECODE_ROWS, *ROWS), t)]
