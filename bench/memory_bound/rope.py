"""Cases of `rope`: queries and keys in one call, both conventions, forward and back."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.rope.reference import rope_cost, rope_table
from tpformer.ops.implementation import implementation

from ..shapes import MODELS
from . import formulas, liger
from .case import COMPILED, ITEMSIZE, LIGER, Case, Work
from .formulas import Tensors, compiled

BASE = 10000.0
SEQUENCE = 2048


class Heads(NamedTuple):
    model: str
    tokens: int
    queries: int
    keys: int
    dim: int

    def __str__(self) -> str:
        return f"{self.model} {self.tokens}x({self.queries}+{self.keys})x{self.dim}"


def rope(heads: Heads, interleaved: bool, inverse: bool, device: str, dtype: torch.dtype) -> Work:
    batch = max(1, heads.tokens // SEQUENCE)
    length = heads.tokens // batch
    table = rope_table(length, heads.dim, BASE, dtype, device)
    positions = torch.arange(length, device=device).repeat(batch)
    options: dict = {"device": device, "dtype": dtype}
    q, k = (torch.randn(heads.tokens, count, heads.dim, **options) for count in (heads.queries, heads.keys))
    op = implementation("rope", q).rope_rotate

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Any:
        return op(q, k, (cos, sin), positions, interleaved, inverse)

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensors:
        return formulas.rope(q, k, cos, sin, positions, interleaved, inverse)

    provider = None if interleaved else liger.rope(*table, batch, inverse, q, k)
    rivals = {COMPILED: compiled(plain), LIGER: provider}
    return Work([q, k, *table, positions], ours, plain, rivals, mutated=(0, 1))


def rope_cases(quick: bool) -> list[Case]:
    cases = []
    for name, tokens in (("8B", 8192), ("70B", 8192))[: 1 if quick else 2]:
        config = MODELS[name]
        heads = Heads(name, tokens, config.n_heads, config.kv_heads, config.hidden_size // config.n_heads)
        nbytes = rope_cost(tokens, heads.queries, heads.keys, heads.dim, ITEMSIZE).bytes
        for interleaved in (False, True):
            for inverse in (False, True):
                label = f"{'interleaved' if interleaved else 'half'} {'backward' if inverse else 'forward'}"
                cases.append(Case(label, str(heads), nbytes, partial(rope, heads, interleaved, inverse)))
    return cases
