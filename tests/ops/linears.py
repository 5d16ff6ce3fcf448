"""The two linears as cases of shards.py, with their plain torch. Sizes that ranks divide are one rank's.

Belongs here: what the tests of the linears share on every transport. No tests.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from opened import opened
from shards import Here
from testing import assert_identical
from torch import Tensor

from tpformer import ops

EPS = 1e-5
P, KEY, SEQ = 0.3, 99, 4


def norm_of(kind: str | None, weight: Tensor | None, bias: Tensor | None) -> ops.Norm | None:
    return None if kind is None else ops.Norm(kind, weight, bias, EPS)


def plain_norm(kind: str | None, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind is None:
        return x
    size = x.shape[-1:]
    return F.rms_norm(x, size, weight, EPS) if kind == "rmsnorm" else F.layer_norm(x, size, weight, bias, EPS)


@dataclass(frozen=True)
class Column:
    """column_linear of one or several weights."""

    t: int
    tokens: int = 4
    k: int = 10
    widths: tuple[int, ...] = (4,)
    norm: tuple[str | None, bool] = (None, False)  # its kind, and whether it has a bias
    bias: bool = True
    sequence_parallel: bool = True
    carry: bool = False

    def inputs(self):
        x, norm = (0, "sum") if self.sequence_parallel else ("equal", "equal")
        shapes = {"x": ((self.t * self.tokens, self.k), x)}
        shapes |= {"norm_weight": ((self.k,), norm)} if self.norm[0] else {}
        shapes |= {"norm_bias": ((self.k,), norm)} if self.norm[1] else {}
        shapes |= {f"weight{i}": ((self.t * width, self.k), 0) for i, width in enumerate(self.widths)}
        # only the first weight has a bias, so that a None among biases occurs
        return shapes | ({"bias0": ((self.t * self.widths[0],), 0)} if self.bias else {})

    def outputs(self):
        rows = self.t * self.tokens
        shapes = {f"y{i}": ((rows, self.t * width), 1) for i, width in enumerate(self.widths)}
        return shapes | ({"carried": self.inputs()["x"]} if self.carry else {})

    def plain(self, x, norm_weight=None, norm_bias=None, **given):
        normed = plain_norm(self.norm[0], x, norm_weight, norm_bias)
        numbers = range(len(self.widths))
        found = {f"y{i}": F.linear(normed, given[f"weight{i}"], given.get(f"bias{i}")) for i in numbers}
        return found | ({"carried": x.clone()} if self.carry else {})

    def ours(self, group, x, norm_weight=None, norm_bias=None, **given):
        weights, biases = ([given.get(f"{name}{i}") for i in range(len(self.widths))] for name in ("weight", "bias"))
        arguments = (weights, biases) if len(weights) > 1 else (weights[0], biases[0])
        how = {"transport": opened(group, x, self.sequence_parallel, Here.transport)}
        norm = norm_of(self.norm[0], norm_weight, norm_bias)
        ys = ops.column_linear(x, *arguments, norm=norm, carry=self.carry, **how)
        ys = [ys] if isinstance(ys, Tensor) else list(ys)
        assert not self.carry or ys[-1].data_ptr() == x.data_ptr()
        return dict(zip([f"y{i}" for i in range(len(weights))] + ["carried"] * self.carry, ys, strict=True))

    def calls(self, itemsize):
        nbytes = self.t * self.tokens * self.k * itemsize
        if self.sequence_parallel:
            return [("all_gather", nbytes)], [("all_gather", nbytes), ("reduce_scatter", nbytes)]
        return [], [("all_reduce", nbytes)]


def columns(t: int) -> st.SearchStrategy[Column]:
    """Sizes per rank from 1, also odd and prime. Several weights of unlike widths share the gather."""
    widths = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    norm = st.sampled_from([(None, False), ("layernorm", True), ("layernorm", False), ("rmsnorm", False)])
    sizes = {"tokens": st.integers(1, 4), "k": st.integers(3, 9), "widths": widths, "norm": norm}
    either = dict.fromkeys(("bias", "sequence_parallel", "carry"), st.booleans())
    return st.builds(Column, st.just(t), **sizes, **either)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@dataclass(frozen=True)
class Row:
    """row_linear with what may stand before its GEMM and behind its reduction."""

    t: int
    tokens: int = 4
    k: int = 4
    n: int = 7
    activation: tuple[str | None, bool] = (None, False)  # its name, and whether it is of a gate
    bias: bool = True
    residual: bool = True
    drop: bool = True
    sequence_parallel: bool = True

    def inputs(self):
        rows, k = self.t * self.tokens, self.t * self.k
        shapes = {"x": ((rows, k), 1), "weight": ((self.n, k), 1)}
        shapes |= {"gate": ((rows, k), 1)} if self.activation[1] else {}
        shapes |= {"bias": ((self.n,), "sum" if self.sequence_parallel else "equal")} if self.bias else {}
        return shapes | ({"residual": self.outputs()["y"]} if self.residual else {})

    def outputs(self):
        return {"y": ((self.t * self.tokens, self.n), 0 if self.sequence_parallel else "equal")}

    def site(self, rank: int, rows: int) -> ops.Dropout | None:
        """The dropout of this rank's rows. The last samples come first: bits follow the index, not the place."""
        samples = torch.arange(-(-self.t * self.tokens // SEQ), device=Here.device).flip(0)
        own = slice(rank * rows, (rank + 1) * rows)
        return ops.Dropout(ops.dropout_starts(samples, SEQ, self.n, own), KEY, P) if self.drop else None

    def plain(self, x, weight, gate=None, bias=None, residual=None):
        name = self.activation[0]
        activated = x if name is None else ACTIVATIONS[name](x if gate is None else gate)
        y = F.linear(activated if gate is None else activated * x, weight, bias)
        y = ops.dropout(y, self.site(0, len(y)))
        return {"y": y if residual is None else y + residual}

    def ours(self, group, x, weight, **given):
        rank, rows = (dist.get_rank(), self.tokens) if self.sequence_parallel else (0, self.t * self.tokens)
        how = {"transport": opened(group, x, self.sequence_parallel, Here.transport)}
        how |= {"activation": self.activation[0], "dropout": self.site(rank, rows)}
        given |= {"x": x, "weight": weight}
        before = {name: x.detach().clone() for name, x in given.items()}
        y = ops.row_linear(**given, **how)
        assert_identical(given, before)  # the epilogue adds in place, but only to its own result
        return {"y": y}

    def calls(self, itemsize):
        nbytes = self.t * self.tokens * self.n * itemsize
        if self.sequence_parallel:
            return [("reduce_scatter", nbytes)], [("all_gather", nbytes)]
        return [("all_reduce", nbytes)], []


def rows(t: int) -> st.SearchStrategy[Row]:
    """Sizes per rank from 1; any combination of activation, gate, bias, residual, dropout, sequence parallelism."""
    activations = [(None, False), ("gelu", False), ("gelu_tanh", True), ("silu", True), ("silu", False)]
    sizes = {"tokens": st.integers(1, 4), "k": st.integers(1, 4), "n": st.integers(1, 9)}
    either = dict.fromkeys(("bias", "residual", "drop", "sequence_parallel"), st.booleans())
    return st.builds(Row, st.just(t), activation=st.sampled_from(activations), **sizes, **either)
